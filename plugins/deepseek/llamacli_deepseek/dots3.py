"""dots3note (rednote 2026): latent attention with windows or chosen cells.

Both kinds of layers have ranks, heads and RoPE of their own, a norm of the shared key, and a gate a head; an indexer as
in DeepSeek-V3.2 chooses the cells in layers without a window.
"""

from typing import Any, Self

import attrs

from llamacli.plugin import (
    Decoder,
    DecoderConfig,
    Graph,
    Metadata,
    Mixture,
    ModelFormatError,
    Params,
    Rope,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    sigmoid,
)
from llamacli_deepseek.kda import KimiLinear
from llamacli_deepseek.sparse import Indexer

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Dots3Config(DecoderConfig):
    """Hyperparameters of latent attention.

    Queries are compressed to `rank_q`, keys and values to `rank_kv`; keys have `nope_dim` numbers a head without
    positions and `n_rope` more, values are `value_dim_mla` wide. `sliding` are the last three sizes but `n_rope` of
    layers with a window.
    """

    rank_q: int
    n_rope: int
    rank_kv: int
    nope_dim: int
    value_dim_mla: int
    sliding: tuple[int, int, int]
    indexer: Indexer

    def at(self, i: int) -> Self:
        """Hyperparameters of block i.

        Heads of multi-token prediction are like layers with a window.
        """
        sizes = self.rank_kv, self.nope_dim, self.value_dim_mla
        rank_kv, nope_dim, value_dim = self.sliding if i >= self.n_layer or self.windows[i] else sizes
        scale = (nope_dim + self.n_rope) ** -0.5
        changed = {"rank_kv": rank_kv, "nope_dim": nope_dim, "value_dim_mla": value_dim, "attention_scale": scale}
        return attrs.evolve(self, n_head=self.heads[i], **changed)


class Dots3Note(KimiLinear):
    """`general.architecture = dots3note`."""

    name = "dots3note"
    output = "optional"
    has_nextn = True
    period = 4
    needs_pattern = True

    def configure(self, metadata: Metadata) -> Any:
        """Read the hyperparameters; layers with an indexer are those without a window."""
        fields = self.fields(metadata)
        n_layer, key = fields["n_layer"], f"{self.name}.attention.indexer.types"

        def count(name: str, minimum: int = 1, maximum: int = 1 << 20) -> int:
            return metadata.get_int(f"{self.name}.{name}", minimum=minimum, maximum=maximum)

        def sizes(suffix: str) -> tuple[int, int, int]:
            rank, key_dim = (count(f"attention.{name}{suffix}") for name in ("kv_lora_rank", "key_length_mla"))
            count(f"attention.key_length{suffix}", rank + n_rope, rank + n_rope)
            count(f"attention.value_length{suffix}", rank, rank)
            return rank, key_dim - n_rope, count(f"attention.value_length_mla{suffix}")

        n_rope = count("rope.dimension_count", 2)
        if metadata.get_bools(key, n_layer) != tuple(window is None for window in fields["windows"][:n_layer]):
            raise ModelFormatError(f"{metadata.source}: {key}: layers without a window choose, and no others")
        rank_kv, nope_dim, value_dim = sizes("")
        halves = Rope.from_gguf(metadata, self.name, n_rope, interleaved=False)
        return Dots3Config.from_gguf(
            metadata,
            **fields | {"n_head_kv": 1},
            rank_q=count("attention.q_lora_rank"),
            n_rope=n_rope,
            rank_kv=rank_kv,
            nope_dim=nope_dim,
            value_dim_mla=value_dim,
            sliding=sizes("_swa"),
            indexer=Indexer.from_gguf(metadata, self.name, halves),
        )

    def ropes(self, metadata: Metadata, head_dim: int, windows: Any) -> Any:
        """RoPE of each layer."""
        return Decoder.ropes(self, metadata, metadata.get_int(f"{self.name}.rope.dimension_count"), windows)

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts behind the first blocks, beside shared ones."""
        return Mixture.from_gguf(metadata, self.name, n_shared=None, bias="exp_probs_b.bias", needs_bias=True)

    def has_experts(self, c: Any, i: int) -> bool:
        """True for a block with experts."""
        return super().has_experts(c, i) and i < c.n_layer

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the attention of block i."""
        own = c.at(i)
        block.add("attn_norm", c.n_embd)
        self.add_latent(block, own)
        block.add("attn_k_norm", c.n_rope)
        block.add("attn_gate", own.n_head, c.n_embd)
        if i < c.n_layer and not c.windows[i]:
            c.indexer.add_tensors(block, c.n_embd, c.rank_q)

    def attention(self, g: Graph, c: Any, w: Weights, i: int, block: Params, h: Value) -> Value:
        """Attention of block i to the normalised input."""
        return self.latent(g, c.at(i), i, block, h)

    def shared_key(self, g: Graph, c: Any, block: Params, k: Value) -> Value:
        """Part of the key that RoPE rotates, normalised."""
        return g.rms_norm(k, block.attn_k_norm, c.eps)

    def select(self, g: Graph, c: Any, i: int, block: Params, h: Value, h_q: Value) -> Any:
        """Cells that attention of block i reads, None for its window."""
        return None if c.windows[i] else c.indexer.choose(g, block, h, h_q)

    def project_out(self, g: Graph, c: Any, i: int, block: Params, h: Value, a: Value) -> Value:
        """Output of attention behind its gate."""
        gate = g.map(g.linear(h, block.attn_gate), sigmoid)
        return g.linear(g.mul(a, gate, c.value_dim_mla), block.attn_output)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network or experts of block i."""
        return Decoder.feed_forward(self, g, c, i, block, h)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Dots3Note())
