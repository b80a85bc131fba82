"""Muse Glimmer 30B (Meta 2026): sliding windows and gated attention.

Embeddings are normalised without a weight, results of attention and network by norms with a smaller epsilon. Every
fourth layer attends to everything and has no RoPE.
"""

from typing import Any

import attrs

from llamacli.plugin import Decoder, Graph, Metadata, Params, Rope, TensorTable, Value, Weights, hookimpl, sigmoid

LLAMACLI_API = 1

POST_NORM_EPS = 1e-8

LOGIT_SOFTCAP = 30.0
"""Bound of the logits of files that have no key for it, as by llama.cpp."""


class MuseGlimmer(Decoder):
    """`general.architecture = muse-glimmer`."""

    name = "muse-glimmer"
    qk_norm = "before"
    output = "required"
    post_norms = True
    period = 4

    def fields(self, metadata: Metadata) -> dict[str, Any]:
        """Fields of the configuration, with scale and bound of the logits."""
        cap = metadata.get_float(f"{self.name}.final_logit_softcapping", default=LOGIT_SOFTCAP, minimum=0.0)
        scale = metadata.get_float(f"{self.name}.logit_scale")
        return super().fields(metadata) | {"logit_scale": scale, "logit_softcap": cap}

    def ropes(self, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """RoPE of sliding layers, unscaled."""
        ropes = super().ropes(metadata, head_dim, windows)
        return tuple(
            attrs.evolve(rope, freq_scale=1.0) if rope and window else None
            for rope, window in zip(ropes, windows, strict=True)
        )

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with its gate."""
        super().add_attention(block, c, i)
        block.add("attn_gate", c.n_head * c.head_dim, c.n_embd)

    def embed(self, g: Graph, c: Any, w: Weights) -> Value:
        """Normalised embeddings of the tokens."""
        return g.rms_norm(g.embed(w.token_embd), None, c.eps)

    def branch(self, g: Graph, c: Any, block: Params, x: Value, norm: str) -> Value:
        """Normalised result of attention or network."""
        return g.rms_norm(x, getattr(block, norm), POST_NORM_EPS)

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention behind its gate."""
        return g.linear(g.mul(a, g.map(g.linear(h, block.attn_gate), sigmoid)), block.attn_output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(MuseGlimmer())
