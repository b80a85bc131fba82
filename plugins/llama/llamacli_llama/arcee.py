"""Arcee Foundation Models (AFM 4.5B): feed-forward network with squared ReLU.

Without a gate, as in Primer (So et al. 2021, arXiv:2109.08668).
"""

from llamacli.plugin import Graph, Params, TensorTable, Value, Weights, hookimpl, relu_squared
from llamacli_llama import LlamaConfig
from llamacli_llama.decoder import Decoder

LLAMACLI_API = 1


class Arcee(Decoder):
    """`general.architecture = arcee`."""

    name = "arcee"

    def tensors(self, config: LlamaConfig) -> TensorTable:
        """The tensors of a file, with Llama 3's frequency factors."""
        table = super().tensors(config)
        table.add("rope_freqs", config.rope.n_dims // 2, optional=True)
        return table

    def add_feed_forward(self, block: TensorTable, c: LlamaConfig) -> None:
        """Feed-forward network of one block."""
        block.add("ffn_up", c.n_ff, c.n_embd)
        block.add("ffn_down", c.n_embd, c.n_ff)

    def rotate(self, g: Graph, c: LlamaConfig, w: Weights, layer: int, heads: Value) -> Value:
        """Queries or keys after RoPE."""
        return g.rope(heads, c.rope, c.head_dim, w.rope_freqs)

    def feed_forward(self, g: Graph, block: Params, h: Value) -> Value:
        """Two matrices with max(x, 0)^2 between them."""
        return g.linear(g.map(g.linear(h, block.ffn_up), relu_squared), block.ffn_down)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Arcee())
