"""GLM-5.3 (Z.ai 2026): delta attention, and latent attention to pooled blocks.

Kimi Linear's layers in residual streams (mHC). Latent attention has no RoPE; an indexer scores blocks of tokens by one
pooled key each, and attention reads the best blocks and the tokens behind the last whole one.
"""

import functools
from typing import Any

import attrs

from llamacli.plugin import (
    Graph,
    Metadata,
    Mixture,
    ModelFormatError,
    Params,
    Scoring,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    network,
)
from llamacli_deepseek.clamps import clamped, expert_limits
from llamacli_deepseek.kda import KdaConfig, KimiLinear
from llamacli_deepseek.pooling import pooled
from llamacli_deepseek.sparse import Indexer
from llamacli_deepseek.streams import Streams

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Glm5Config(KdaConfig):
    """Hyperparameters of GLM-5.3.

    The `indexer` chooses blocks of `pool` tokens in the layers of `chooses`; others read those of the layer before.
    """

    streams: Streams
    indexer: Indexer
    pool: int
    chooses: tuple[bool, ...]


class Glm5Next(KimiLinear):
    """`general.architecture = glm5-next`; blocks for multi-token prediction are not computed."""

    name = "glm5-next"
    config = Glm5Config
    has_nextn = True
    a_shape = ()
    always_renormalizes = False
    decay_sign = -1.0
    l2_eps = 1e-6
    rope_dims = (0, 0)

    def other_fields(self, metadata: Metadata, n_blocks: int) -> dict[str, Any]:
        """Fields that architectures differ in."""
        count, key = functools.partial(self.count, metadata), f"{self.name}.attention.indexer"
        heads_kv = metadata.get_ints(f"{self.name}.attention.head_count_kv", n_blocks)
        n_layer = n_blocks - count("nextn_predict_layers", default=0, minimum=0, maximum=n_blocks - 1)
        types = metadata.get_bools(f"{key}.types", n_layer) if f"{key}.types" in metadata else (True,) * n_layer
        first = next((i for i in range(n_layer) if heads_kv[i]), None)
        if first is not None and not types[first]:
            raise ModelFormatError(f"{metadata.source}: {key}.types: the first layer of latent attention must choose")
        if not metadata.get_bool(f"{key}.kpool_select_tail", default=True):
            raise ModelFormatError(f"{metadata.source}: {key}.kpool_select_tail = false is not supported")
        pool = count("attention.indexer.kpool", minimum=2, maximum=1 << 10)
        n_chosen, rest = divmod(count("attention.indexer.top_k", minimum=pool), pool)
        if rest:
            raise ModelFormatError(f"{metadata.source}: {key}.top_k is not a multiple of {key}.kpool = {pool}")
        return {
            "bound": metadata.get_float(f"{self.name}.kda.gate_lower_bound", default=0.0, maximum=0.0),
            "rank_q": count("attention.q_lora_rank"),
            "streams": Streams.from_gguf(metadata, self.name),
            "indexer": Indexer(
                count("attention.indexer.head_count"), count("attention.indexer.key_length"), None, n_chosen,
                metadata.get_float(f"{self.name}.attention.layer_norm_epsilon", default=0.0, minimum=0.0),
            ),
            "pool": pool,
            "chooses": types,
            **expert_limits(metadata, self.name, n_blocks),
        }  # fmt: skip

    def mixture(self, metadata: Metadata) -> Mixture:
        """Experts behind the first blocks, by sigmoid as a default."""
        scoring = Scoring.SIGMOID
        return Mixture.from_gguf(
            metadata, self.name, default_scoring=scoring, n_shared=None, bias="exp_probs_b.bias", needs_bias=True
        )

    def add_attention(self, block: TensorTable, c: Any, i: int) -> None:
        """Tensors of the attention of block i, and of the streams."""
        super().add_attention(block, c, i)
        if i < c.n_layer:
            c.streams.add_tensors(block, c.n_embd)
        if c.heads_kv[i]:
            unused = i < c.n_layer and not c.chooses[i]
            c.indexer.add_tensors(block, c.n_embd, c.rank_q, unused=unused)
            for name, shape in (("gate", (c.indexer.dim, c.n_embd)), ("ape", (c.pool, c.indexer.dim))):
                (block.add_unused if unused else block.add)(f"indexer_compressor_{name}", *shape)

    def forward(self, g: Graph, config: Any, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w, cells = config, weights, None

        def attention(i: int, block: Params, h: Value) -> Value:
            nonlocal cells
            if not c.heads_kv[i]:
                return self.delta(g, c, block, h)
            h_q = g.rms_norm(g.linear(h, block.attn_q_a), block.attn_q_a_norm, c.eps)
            cells = self.choose(g, c, block, h, h_q) if c.chooses[i] else cells
            return self.sparse(g, c, block, h, h_q, cells)

        feed_forward = functools.partial(self.feed_forward, g, c)
        streams = c.streams.layers(g, w.blk, g.embed(w.token_embd), c.eps, attention, feed_forward)
        parts = (g.columns(streams, i * c.n_embd, c.n_embd) for i in range(c.streams.n))
        x = g.scale(functools.reduce(g.add, parts), 1 / c.streams.n)
        return g.linear(g.rms_norm(x, w.output_norm, c.eps), w.output)

    def choose(self, g: Graph, c: Any, block: Params, h: Value, h_q: Value) -> Any:
        """Choice of blocks, by queries and pooled keys."""
        scores, bias = g.linear(h, block.indexer_compressor_gate), block.indexer_compressor_ape
        k = pooled(g, c.indexer.keys(g, block, h), scores, bias, c.pool)
        return c.indexer.best(g, block, h, h_q, k, c.pool)

    def sparse(self, g: Graph, c: Any, block: Params, h: Value, h_q: Value, cells: Any) -> Value:
        """Multi-head latent attention, absorbed, without RoPE."""
        q = g.batched_linear(g.linear(h_q, block.attn_q_b), block.attn_k_b)
        latent = g.rms_norm(g.linear(h, block.attn_kv_a_mqa), block.attn_kv_a_norm, c.eps)
        kv = g.store(latent, None, head_dim=c.rank_kv)
        a = g.attention(q, kv, scale=c.attention_scale, cells=cells)
        return g.linear(g.batched_linear(a, block.attn_v_b), block.attn_output)

    def feed_forward(self, g: Graph, c: Any, i: int, block: Params, h: Value) -> Value:
        """Network or experts of block i, clamped."""
        routed, shared = clamped(c.limits[i], c.limits_shared[i])
        if not self.has_experts(c, i):
            return network(g, block, h, activation=shared)
        result: Value = c.mixture.layer(g, block, h, shared, activation=routed)
        return result


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Glm5Next())
