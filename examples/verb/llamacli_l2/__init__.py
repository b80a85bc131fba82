"""Plugin with an op of its own: L2 norm.

Queries and keys have length 1. The op is there once with a kernel, once without.
"""

from __future__ import annotations

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Lowering,
    Metadata,
    Op,
    Rope,
    TensorTable,
    Value,
    Weights,
    hookimpl,
)
from llamacli_l2.l2_norm import L2Norm, l2_norm

LLAMACLI_API = 1
LLAMACLI_KERNEL_API = 2


@attrs.frozen(eq=False)
class SlowL2Norm(L2Norm):
    """The same op without a kernel."""

    def lower(self, to: Lowering) -> None:
        Op.lower(self, to)


def slow_l2_norm(g: Graph, x: Value, head_dim: int, eps: float) -> Value:
    """Record the op without a kernel."""
    return g.record(SlowL2Norm(g.value(x.width), x, head_dim, eps))


class L2Llama(Architecture):
    """A decoder whose queries and keys have length 1 before RoPE."""

    name = "l2llama"
    norm = staticmethod(l2_norm)

    def configure(self, metadata: Metadata) -> Config:
        return Config.from_gguf(metadata)

    def tensors(self, config: Config) -> TensorTable:
        c, table = config, TensorTable()
        n_kv = c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            for name in ("attn_norm", "ffn_norm"):
                block.add(name, c.n_embd)
            for name, n_out, n_in in (
                ("attn_q", c.n_embd, c.n_embd), ("attn_k", n_kv, c.n_embd), ("attn_v", n_kv, c.n_embd),
                ("attn_output", c.n_embd, c.n_embd), ("ffn_gate", c.n_ff, c.n_embd), ("ffn_up", c.n_ff, c.n_embd),
                ("ffn_down", c.n_embd, c.n_ff),
            ):  # fmt: skip
                block.add(name, n_out, n_in)
        return table

    def forward(self, g: Graph, config: Config, weights: Weights) -> Value:
        c, rope = config, Rope(config.head_dim, interleaved=True)
        x = g.embed(weights.token_embd)
        for block in weights.blk:
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k = (self.norm(g, g.linear(h, param), c.head_dim, 1e-6) for param in (block.attn_q, block.attn_k))
            q, k = (g.rope(heads, rope, c.head_dim) for heads in (q, k))
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=4.0), block.attn_output)
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)
        return g.linear(g.rms_norm(x, weights.output_norm, c.rms_eps), weights.output)


class SlowL2Llama(L2Llama):
    """The same decoder, its norm in NumPy."""

    name = "slowl2llama"
    norm = staticmethod(slow_l2_norm)


@hookimpl
def register_architectures(register):
    register(L2Llama())
    register(SlowL2Llama())
