"""Llama-Nemotron 49B, 51B and 253B (Bercovich et al. 2025, arXiv:2505.00949).

Llama found by architecture search. Layers have their own numbers of heads and widths; attention may be a matrix, or be
missing, and so may the network.
"""

from typing import Any

from llamacli.plugin import Decoder, Graph, Params, TensorTable, Value, Weights, hookimpl

LLAMACLI_API = 1


class Deci(Decoder):
    """`general.architecture = deci`.

    Blocks without a network are skipped, as by llama.cpp; no known file has one with attention.
    """

    name = "deci"
    has_rope_freqs = True
    may_have_bias = ("attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    by_layer = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the attention of block i, if there is any."""
        if c.widths[i] and c.heads_kv[i]:
            super().add_attention(block, c, i)
        elif c.widths[i] and c.heads[i]:
            block.add("attn_norm", c.n_embd)
            block.add("attn_output", c.n_embd, c.n_embd)

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network of block i, if there is one."""
        if c.widths[i]:
            super().add_feed_forward(block, c, i)

    def layer(self, g: Graph, c: Any, w: Weights, i: int, block: Params, x: Value) -> Value:
        """Output of block i."""
        if not c.widths[i]:
            return x
        if c.heads[i]:
            h = g.rms_norm(x, block.attn_norm, c.eps)
            x = x + (self.attention(g, c, w, i, block, h) if c.heads_kv[i] else g.linear(h, block.attn_output))
        return x + self.feed_forward(g, c, i, block, g.rms_norm(x, block.ffn_norm, c.eps))


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Deci())
