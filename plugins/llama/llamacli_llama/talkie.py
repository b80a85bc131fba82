"""Talkie (2026).

Norms without weights, and a skip of the embeddings to each layer.
"""

from typing import Any

from llamacli.plugin import Decoder, Graph, Metadata, Params, TensorTable, Value, Weights, hookimpl

LLAMACLI_API = 1


class Talkie(Decoder):
    """`general.architecture = talkie`.

    Queries and keys are normalised behind RoPE; queries have a scale a head.
    """

    name = "talkie"
    interleaved = False
    has_norms = False
    qk_norm = "after"
    output = "required"

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration, with the scale of logits."""
        return super().fields(metadata) | {"logit_scale": metadata.get_float(f"{self.name}.logit_scale")}

    def add_head_norms(self, block: TensorTable, c: Any) -> None:
        """Scales of queries, and of the skip."""
        block.add("attn_q_norm", c.n_head, 1)
        block.add("layer_output_scale", 1)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        embedded = x = g.rms_norm(g.embed(w.token_embd), None, c.eps)
        for i, block in enumerate(w.blk):
            x = self.layer(g, c, w, i, block, x) + g.scale(embedded, block.layer_output_scale)
        return g.scale(g.linear(g.rms_norm(x, None, c.eps), w.output), c.logit_scale)

    def norm_heads(self, g: Graph, c: Any, block: Params, q: Value, k: Value) -> tuple[Value, Value]:
        """Queries and keys, normalised by head; queries scaled."""
        q, k = (g.rms_norm(heads, None, c.eps, c.head_dim) for heads in (q, k))
        return g.mul(q, block.attn_q_norm.reshaped(c.n_head), c.head_dim), k


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Talkie())
