"""BitNet b1.58 (Ma et al. 2024, arXiv:2402.17764).

Matrices of -1, 0 and 1. What the output matrices of attention and network read is normalised; each matrix may have a
scale.
"""

from typing import Any

from llamacli.plugin import Activation, Decoder, Graph, Params, TensorTable, Value, hookimpl, relu_squared

LLAMACLI_API = 1


class BitNet(Decoder):
    """`general.architecture = bitnet`."""

    name = "bitnet"
    interleaved = False
    may_have_bias = ()
    output = "none"
    gating: Any = Activation.SWIGLU

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of attention; queries, keys and values are apart."""
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        block.add("attn_norm", c.n_embd)
        block.add("attn_q", n_q, c.n_embd)
        block.add("attn_k", n_kv, c.n_embd)
        block.add("attn_v", n_kv, c.n_embd)
        block.add("attn_sub_norm", n_q)
        block.add("attn_output", c.n_embd, n_q)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network."""
        super().add_feed_forward(block, c, i)
        block.add("ffn_sub_norm", c.n_ff)

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention."""
        return g.linear(g.rms_norm(a, block.attn_sub_norm, c.eps), block.attn_output)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Gated network with a norm inside."""
        hidden = g.gated(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up), self.gating)
        return g.linear(g.rms_norm(hidden, block.ffn_sub_norm, c.eps), block.ffn_down)


def _gated(v: Any, gate: Any, up: Any) -> Any:
    return relu_squared(v, gate) * up


class BitNet158(BitNet):
    """`general.architecture = bitnet-b1.58`: BitNet b1.58 2B4T as bitnet.cpp's converter writes it."""

    name = "bitnet-b1.58"
    gating = staticmethod(_gated)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(BitNet())
    register(BitNet158())
