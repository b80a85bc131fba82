"""CogVLM and CogVLM2, the text halves.

Wang et al. 2023 (arXiv:2311.03079). Llama's decoder. In the files, pictures have matrices of their own, which nothing
reads here: embeddings as inputs are refused.
"""

from typing import Any

from llamacli.plugin import (
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    ModelFormatError,
    TensorTable,
    Value,
    Weights,
    hookimpl,
)

LLAMACLI_API = 1


class CogVlm(Decoder):
    """`general.architecture = cogvlm`."""

    name = "cogvlm"
    is_fused = True
    interleaved = False
    may_have_bias = ()

    def configure(self, metadata: Metadata) -> DecoderConfig:
        """Read the hyperparameters; heads share no keys and are rotated whole."""
        c, key = super().configure(metadata), f"{self.name}.attention.head_count_kv"
        if c.n_head_kv != c.n_head:
            raise ModelFormatError(f"{metadata.source}: {key} = {c.n_head_kv}, expected {c.n_head}, as many as heads")
        metadata.get_int(f"{self.name}.rope.dimension_count", default=c.head_dim, minimum=c.head_dim)
        return c

    def tensors(self, config: Any) -> TensorTable:
        """The tensors of a file; those of pictures are not read."""
        c, table = config, super().tensors(config)
        table.add_unused("rope_freqs", c.head_dim // 2)
        return table

    def add_feed_forward(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the network of block i, and the matrices of pictures."""
        super().add_feed_forward(block, c, i)
        n_q = c.n_head * c.head_dim
        block.add_unused("vis_attn_qkv", 3 * n_q, c.n_embd)
        block.add_unused("vis_attn_output", c.n_embd, n_q)
        block.add_unused("vis_gate", c.n_ff, c.n_embd)
        block.add_unused("vis_up", c.n_ff, c.n_embd)
        block.add_unused("vis_down", c.n_embd, c.n_ff)

    def embed(self, g: Graph, c: Any, w: Weights) -> Value:
        """Embeddings of the tokens, in whose place inputs cannot give any."""
        return g.embed(w.token_embd, placeholder=0)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(CogVlm())
