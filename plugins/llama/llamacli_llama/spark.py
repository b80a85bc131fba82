"""iFlytek Spark 2.5 (2026): GEGLU, sliding windows, and attention gated by head."""

from typing import Any

import attrs

from llamacli.plugin import (
    Activation,
    Decoder,
    Graph,
    Metadata,
    Params,
    Rope,
    TensorTable,
    Value,
    hookimpl,
    sigmoid,
)

LLAMACLI_API = 1


class Spark(Decoder):
    """`general.architecture = spark2_5`."""

    name = "spark2_5"
    interleaved = False
    activation = Activation.GEGLU
    by_layer = ("attention.head_count", "attention.head_count_kv")
    period = 4
    needs_pattern = True

    def sliding_rope(self, metadata: Metadata, rope: Rope) -> Rope:
        """RoPE of sliding layers, which may rotate other dimensions."""
        n_dims = metadata.get_int(f"{self.name}.rope.dimension_count_swa", default=rope.n_dims, minimum=2)
        return attrs.evolve(super().sliding_rope(metadata, rope), n_dims=n_dims)

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention, with its gate."""
        super().add_attention(block, c, i)
        block.add("attn_gate", c.heads[i], c.n_embd)

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention behind its gate."""
        gate = g.map(g.linear(h, block.attn_gate), sigmoid)
        return g.linear(g.mul(a, gate, c.head_dim), block.attn_output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Spark())
