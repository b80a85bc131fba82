"""HRM-Text 1B (2026): hierarchical reasoning, two stacks of blocks read in cycles.

Wang et al. 2025 (arXiv:2506.21734). The low stack runs some times on the sum of both states, then the high stack once;
this is repeated. The low state begins as a learned vector, the high one as the embeddings. Norms have no weights.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    sigmoid,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class HrmConfig(DecoderConfig):
    """`n_stack` blocks make a stack.

    `n_high` cycles have `n_low` runs of the low stack each.
    """

    n_stack: int
    n_high: int
    n_low: int


class HrmText(Decoder):
    """`general.architecture = hrm_text`."""

    name = "hrm_text"
    interleaved = False
    has_norms = False

    def configure(self, metadata: Metadata) -> HrmConfig:
        """Read the hyperparameters; `block_count` is the number of blocks that are computed."""
        fields = self.fields(metadata)
        n_stack, n_high, n_low = (
            metadata.get_int(f"{self.name}.hrm.{key}", minimum=1, maximum=1 << 10)
            for key in ("layers_per_stack", "h_cycles", "l_cycles")
        )
        if (n := n_stack * n_high * (n_low + 1)) != fields["n_layer"]:
            raise ModelFormatError(
                f"{metadata.source}: {self.name}.block_count = {fields['n_layer']}, "
                f"expected the {n} of {self.name}.hrm.*"
            )
        metadata.get_bool(f"{self.name}.hrm.prefix_lm", default=False)
        scale = metadata.get_float(f"{self.name}.embedding_scale", default=0.0, minimum=0.0)
        changed = {"n_layer": 2 * n_stack, "embedding_scale": scale or 1.0}
        return HrmConfig.from_gguf(metadata, **fields | changed, n_stack=n_stack, n_high=n_high, n_low=n_low)

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file."""
        table = super().tensors(config)
        table.add_tensor("hrm.z_l_init", config.n_embd)
        return table

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with its gate."""
        super().add_attention(block, c, i)
        block.add("attn_gate", c.n_head * c.head_dim, c.n_embd)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        high, low = self.embed(g, c, w), None
        for _ in range(c.n_high):
            for _ in range(c.n_low):
                low = self.stack(g, c, w, 0, self.combined(g, w, high, low))
            high = self.stack(g, c, w, c.n_stack, self.combined(g, w, high, low))
        return g.linear(high, w.output or w.token_embd)

    def combined(self, g: Graph, w: Weights, high: Value, low: Value | None) -> Value:
        """Sum of both states, the low one learned at first."""
        return high + low if low else g.add(high, w.hrm_z_l_init)

    def stack(self, g: Graph, c: Any, w: Weights, first: int, x: Value) -> Value:
        """Normalised output of the stack that begins with a block."""
        for i in range(first, first + c.n_stack):
            x = self.layer(g, c, w, i, w.blk[i], x)
        return g.rms_norm(x, None, c.eps)

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention behind its gate."""
        return g.linear(g.mul(a, g.map(g.linear(h, block.attn_gate), sigmoid)), block.attn_output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(HrmText())
