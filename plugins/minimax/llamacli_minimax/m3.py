"""MiniMax-M3 (MiniMax 2026): attention to blocks of cells that an indexer chooses.

As MiniMax-M2, with queries and keys normalised by head, first blocks dense, shared experts and clamped SwiGLU. In the
blocks with experts, each head of keys has an index query: the blocks of positions whose best key scores highest are
read, and the last ones.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Activation,
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Mixture,
    ModelFormatError,
    Params,
    TensorTable,
    Value,
    Weights,
    hookimpl,
)

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class M3Config(DecoderConfig):
    """Hyperparameters of MiniMax-M3.

    `n_chosen` blocks of `block` positions, `n_local` of them the last, are chosen by queries `index_dim` wide.
    """

    index_dim: int
    n_chosen: int
    block: int
    n_local: int


class MiniMaxM3(Decoder):
    """`general.architecture = minimax-m3`."""

    name = "minimax-m3"
    interleaved = False
    qk_norm = "before"
    output = "required"
    activation = Activation.SWIGLU_OAI

    def configure(self, metadata: Metadata) -> M3Config:
        """Read the hyperparameters; an index query for each head of keys."""
        fields, key = self.fields(metadata), f"{self.name}.attention.indexer"

        def count(name: str, minimum: int = 1, maximum: int = 1 << 16) -> int:
            return metadata.get_int(f"{key}.{name}", minimum=minimum, maximum=maximum)

        if count("head_count") != fields["n_head_kv"]:
            raise ModelFormatError(
                f"{metadata.source}: {key}.head_count must be {self.name}.attention.head_count_kv, "
                f"{fields['n_head_kv']}"
            )
        index_dim, n_chosen = count("key_length", fields["ropes"][0].n_dims), count("top_k")
        if index_dim % 16:
            raise ModelFormatError(f"{metadata.source}: {key}.key_length = {index_dim} is not a multiple of 16")
        return M3Config.from_gguf(
            metadata,
            **fields,
            index_dim=index_dim,
            n_chosen=n_chosen,
            block=count("block_size"),
            n_local=count("local_blocks", 0, n_chosen),
        )

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts behind the first blocks, beside shared ones."""
        return Mixture.from_gguf(
            metadata, self.name, n_shared=None, bias="exp_probs_b.bias", needs_bias=True, activation=self.activation
        )

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the attention of block i, with its indexer."""
        super().add_attention(block, c, i)
        if self.has_experts(c, i):
            block.add("indexer.q_proj", c.n_head_kv * c.index_dim, c.n_embd)
            block.add("indexer.k_proj", c.index_dim, c.n_embd)
            block.add("indexer.q_norm", c.index_dim)
            block.add("indexer.k_norm", c.index_dim)

    def attention(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> Value:
        """Attention of block i to the normalised input."""
        if not self.has_experts(c, i):
            return super().attention(g, c, w, i, block, h)
        pairs = (block.indexer_q_proj, block.indexer_q_norm), (block.indexer_k_proj, block.indexer_k_norm)
        q_index, k_index = (
            g.rope(g.rms_norm(g.linear(h, matrix), norm, c.eps, c.index_dim), c.ropes[i], c.index_dim)
            for matrix, norm in pairs
        )
        index = g.store(k_index, None, head_dim=c.index_dim)
        cells = g.select(q_index, index, c.n_chosen, n_head=c.n_head_kv, block=c.block, n_local=c.n_local)
        q, k, v = self.project(g, c, w, i, block, h)
        kv = g.store(k, v, head_dim=c.head_dim)
        return g.linear(g.attention(q, kv, scale=c.attention_scale, cells=cells), block.attn_output)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network or experts of block i."""
        if not self.has_experts(c, i):
            return super().feed_forward(g, c, i, block, h)
        result: Value = c.mixture.layer(g, block, h, self.activation)
        return result


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(MiniMaxM3())
