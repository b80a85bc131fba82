"""DeepSeek-V3.2 and GLM-5: latent attention to the cells that an indexer chooses.

DeepSeek-AI 2025 (arXiv:2512.02556), Z.ai 2026. The rest is DeepSeek-V3. Small queries and one small key a token, cached
beside the latent ones, score the cells; in GLM-5.2, only some layers choose, and those behind them read the same cells.
"""

from typing import Any, Self

import attrs

from llamacli.plugin import Graph, Metadata, ModelFormatError, Params, Rope, Scoring, TensorTable, Value, hookimpl
from llamacli_deepseek.deepseek2 import DeepSeek2, DeepSeek2Config

LLAMACLI_API = 1

_NORM_EPS = 1e-6
"""Epsilon of the indexer's layer norm where files do not have it."""

_ALL_CHOOSE_BELOW = 1 << 20
"""Context length below which all layers choose in files that do not say: GLM-5 and 5.1."""


@attrs.frozen
class Indexer:
    """Lightning indexer: `n_chosen` cells by `n_head` queries, `dim` wide.

    `rope` rotates queries and keys, None does not.
    """

    n_head: int
    dim: int
    rope: Rope | None
    n_chosen: int
    norm_eps: float = _NORM_EPS

    @classmethod
    def from_gguf(cls, metadata: Metadata, architecture: str, rope: Rope, *, at_end: bool = False) -> Self:
        """Read the keys `{architecture}.attention.indexer.*`.

        RoPE rotates the first numbers of queries and keys, or the last `at_end`.
        """

        def count(key: str, minimum: int = 1) -> int:
            return metadata.get_int(f"{architecture}.attention.indexer.{key}", minimum=minimum, maximum=1 << 16)

        dim = count("key_length", rope.n_dims)
        rope = attrs.evolve(rope, first=dim - rope.n_dims if at_end else 0)
        return cls(count("head_count"), dim, rope, count("top_k"))

    def add_tensors(self, block: TensorTable, n_embd: int, rank_q: int, *, unused: bool = False) -> None:
        """Add its tensors; `unused` ones are not read."""
        shapes = {
            "k_norm": (self.dim,),
            "proj": (self.n_head, n_embd),
            "attn_k": (self.dim, n_embd),
            "attn_q_b": (self.n_head * self.dim, rank_q),
        }
        for name, shape in shapes.items():
            if not unused:
                block.add(f"indexer.{name}", *shape, needs_bias=name == "k_norm")
                continue
            for kind in ("weight", "bias") if name == "k_norm" else ("weight",):
                block.add_unused(f"indexer.{name}", *shape, kind=kind)

    def choose(self, g: Graph, block: Params, h: Value, h_q: Value) -> Any:
        """Choice of the cells by the input of attention and compressed queries."""
        return self.best(g, block, h, h_q, self.rotated(g, self.keys(g, block, h)))

    def keys(self, g: Graph, block: Params, h: Value) -> Value:
        """Normalised keys."""
        return g.layer_norm(g.linear(h, block.indexer_attn_k), block.indexer_k_norm, self.norm_eps)

    def best(self, g: Graph, block: Params, h: Value, h_q: Value, k: Value, n_pooled: int = 0) -> Any:
        """Choice among keys, or pooled keys of blocks of `n_pooled` tokens."""
        q = self.rotated(g, g.linear(h_q, block.indexer_attn_q_b))
        pooled: dict[str, Any] = {"block": n_pooled, "pooled": True} if n_pooled else {}
        index, weights = g.store(k, None, head_dim=self.dim), g.linear(h, block.indexer_proj)
        return g.select(q, index, self.n_chosen, weights=weights, **pooled)

    def rotated(self, g: Graph, x: Value) -> Value:
        """Queries or keys behind RoPE."""
        return g.rope(x, self.rope, self.dim) if self.rope else x


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class SparseConfig(DeepSeek2Config):
    """Hyperparameters of latent attention with an indexer.

    `chooses` by layer: False reads the cells that the layer before reads.
    """

    indexer: Indexer
    chooses: tuple[bool, ...]


class DeepSeek32(DeepSeek2):
    """`general.architecture = deepseek32`."""

    name = "deepseek32"
    interleaved = False

    def configure(self, metadata: Metadata) -> SparseConfig:
        """Read the hyperparameters; queries are compressed, and heads absorbed."""
        common = super().configure(metadata)
        for key, value in (("attention.q_lora_rank", common.rank_q), ("attention.key_length_mla", common.absorbed)):
            if not value:
                raise ModelFormatError(f"{metadata.source}: {self.name}.{key} is missing")

        fields = {field.name: getattr(common, field.name) for field in attrs.fields(type(common))}
        rope = attrs.evolve(common.rope, interleaved=self.interleaved)
        indexer = Indexer.from_gguf(metadata, self.name, rope)
        return SparseConfig(**fields, indexer=indexer, chooses=self.chooses(metadata, common))

    def chooses(self, metadata: Metadata, common: DeepSeek2Config) -> tuple[bool, ...]:
        """True for layers that choose: all."""
        return (True,) * common.n_layer

    def add_block(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of block `i`; files may have indexers that are not read."""
        super().add_block(block, c, i)
        c.indexer.add_tensors(block, c.n_embd, c.rank_q, unused=i >= c.n_layer or not c.chooses[i])

    def select(self, g: Graph, c: Any, i: int, block: Params, h: Value, h_q: Value, previous: Any) -> Any:
        """Cells that attention of block `i` reads."""
        return c.indexer.choose(g, block, h, h_q) if c.chooses[i] else previous


class GlmDsa(DeepSeek32):
    """`general.architecture = glm-dsa`: GLM-5, 5.1 and 5.2."""

    name = "glm-dsa"
    interleaved = True

    def chooses(self, metadata: Metadata, common: DeepSeek2Config) -> tuple[bool, ...]:
        """True for layers that choose, the first at least."""
        key = f"{self.name}.attention.indexer.types"
        if key in metadata:
            chooses = metadata.get_bools(key, common.n_layer)
        else:
            every = common.context_length < _ALL_CHOOSE_BELOW
            chooses = tuple(every or i < 2 or (i - 2) % 4 == 0 for i in range(common.n_layer))
        if not chooses[0]:
            raise ModelFormatError(f"{metadata.source}: {key}: the first layer must choose")
        return chooses

    def routing(self, metadata: Metadata, common: Any) -> dict[str, Any]:
        """Options of the mixture, by sigmoid in files that do not say."""
        found = super().routing(metadata, common)
        return found if metadata.get(f"{self.name}.expert_gating_func") else found | {"scoring": Scoring.SIGMOID}


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architectures."""
    register(DeepSeek32())
    register(GlmDsa())
