"""DeepSeek-V4 (DeepSeek-AI 2026): compressed keys and values, residual streams.

All heads read one key of each token, which is its value too, in a window; and pooled keys of blocks of tokens: all
blocks of 128, or those of 4 that an indexer chooses. RoPE is undone behind attention, whose output has two steps.
Residual streams are mixed (mHC). In the first layers, a token's id decides about its experts.
"""

import functools
import math
from typing import Any

import attrs
import numpy as np

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    Mixture,
    ModelFormatError,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    Weights,
    hookimpl,
)
from llamacli_deepseek.clamps import clamped, expert_limits
from llamacli_deepseek.pooling import pooled, pooled_attention
from llamacli_deepseek.sparse import Indexer
from llamacli_deepseek.streams import Streams, add_gates, gate_inputs, mix_streams, stream_gate

LLAMACLI_API = 1

_CHOSEN, _ALL = 4, 128
"""Tokens of a block: those of layers with an indexer, whose blocks overlap, and of others."""


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class DeepSeek4Config(Config):
    """Hyperparameters of DeepSeek-V4.

    `ratios` are the tokens of a block by layer, 0 without blocks; such layers have another `rope` than others, `ropes`.
    Outputs of attention are compressed to `rank_o` numbers in each of `n_group` groups of heads. `limits` bound routed
    experts, `limits_shared` the shared ones. The first `n_hash` layers choose experts by the token.
    """

    rope: Rope
    rope_pooled: Rope
    ratios: tuple[int, ...]
    window: int
    rank_q: int
    n_group: int
    rank_o: int
    indexer: Indexer
    streams: Streams
    mixture: Mixture
    limits: tuple[float, ...]
    limits_shared: tuple[float, ...]
    n_hash: int


class DeepSeek4(Architecture):
    """`general.architecture = deepseek4`."""

    name = "deepseek4"

    def configure(self, metadata: Metadata) -> DeepSeek4Config:
        """Read the hyperparameters; files of multi-token-prediction heads are refused."""

        def count(key: str, **limits: int) -> int:
            return metadata.get_int(f"{self.name}.{key}", **{"minimum": 1, "maximum": 1 << 24} | limits)

        count("nextn_predict_layers", default=0, minimum=0, maximum=0)
        count("expert_gating_func", minimum=Scoring.SQRT_SOFTPLUS, maximum=Scoring.SQRT_SOFTPLUS)
        renormalize = metadata.get_bool(f"{self.name}.expert_weights_norm")
        metadata.get_float(f"{self.name}.expert_weights_scale")
        mixture = Mixture.from_gguf(metadata, self.name, renormalize=renormalize, n_shared=None)
        common = Config.from_gguf(metadata, n_head_kv=count("attention.head_count_kv", maximum=1), n_ff=mixture.n_ff)
        n_layer, n_out = common.n_layer, 4 * common.n_embd
        count("embedding_length_out", default=n_out, minimum=n_out, maximum=n_out)
        key = f"{self.name}.attention.compress_ratios"
        ratios = metadata.get_ints(key, max(n_layer, np.size(metadata.get(key, 0))))[:n_layer]
        if {*ratios} - {0, _CHOSEN, _ALL}:
            raise ModelFormatError(f"{metadata.source}: {key} has numbers other than 0, {_CHOSEN} and {_ALL}")
        n_group = count("attention.output_group_count", maximum=common.n_head)
        if common.n_head % n_group:
            raise ModelFormatError(f"{metadata.source}: {self.name}.attention.output_group_count does not divide heads")
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=True)
        rope = attrs.evolve(rope, first=common.head_dim - rope.n_dims)
        # The magnitude of YaRN is undone.
        magnitude = 1 / (1 - 0.1 * math.log(rope.freq_scale)) if rope.ext_factor and rope.freq_scale < 1 else 1.0
        base = metadata.get_float(f"{self.name}.attention.compress_rope_freq_base", minimum=2.0)
        rope_pooled = attrs.evolve(rope, base=base, attn_factor=magnitude)
        return DeepSeek4Config(
            **{field.name: getattr(common, field.name) for field in attrs.fields(Config)},
            rope=attrs.evolve(rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0),
            rope_pooled=rope_pooled,
            ratios=ratios,
            window=count("attention.sliding_window"),
            rank_q=count("attention.q_lora_rank"),
            n_group=n_group,
            rank_o=count("attention.output_lora_rank"),
            indexer=Indexer.from_gguf(metadata, self.name, rope_pooled, at_end=True),
            streams=Streams.from_gguf(metadata, self.name),
            mixture=mixture,
            n_hash=count("hash_layer_count", minimum=0, maximum=n_layer),
            **expert_limits(metadata, self.name, n_layer, needed=True),
        )

    def tensors(self, config: DeepSeek4Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        add_gates(table, "output_hc", c.streams.n, c.n_embd)
        for i in range(c.n_layer):
            block = table.block()
            c.streams.add_tensors(block, c.n_embd)
            self.add_attention(block, c, c.ratios[i])
            block.add("ffn_norm", c.n_embd)
            block.add_unused("exp_probs_b_vl", c.n_expert, kind="bias")  # for images
            if i < c.n_hash:
                block.add_tensor("ffn_gate_tid2eid.weight", c.n_vocab, c.n_expert_used)
            else:
                block.add_tensor("exp_probs_b.bias", c.n_expert)
            c.mixture.add_tensors(block, c)
        return table

    def add_attention(self, block: TensorTable, c: DeepSeek4Config, ratio: int) -> None:
        """Tensors of attention, with blocks of `ratio` tokens."""
        block.add("attn_norm", c.n_embd)
        block.add("attn_sinks", c.n_head)
        block.add("attn_q_a", c.rank_q, c.n_embd)
        block.add("attn_q_a_norm", c.rank_q)
        block.add("attn_q_b", c.n_head * c.head_dim, c.rank_q)
        block.add("attn_kv", c.head_dim, c.n_embd)
        block.add("attn_kv_a_norm", c.head_dim)
        block.add("attn_output_a", c.n_group * c.rank_o, c.n_head * c.head_dim // c.n_group)
        block.add("attn_output_b", c.n_embd, c.n_group * c.rank_o)
        if ratio:
            self.add_compressor(block, c, "attn", c.head_dim, ratio)
        if ratio == _CHOSEN:
            block.add("indexer.proj", c.indexer.n_head, c.n_embd)
            block.add("indexer.attn_q_b", c.indexer.n_head * c.indexer.dim, c.rank_q)
            self.add_compressor(block, c, "indexer", c.indexer.dim, ratio)

    def add_compressor(self, block: TensorTable, c: DeepSeek4Config, name: str, width: int, ratio: int) -> None:
        """Tensors of pooled keys."""
        n = 2 * width if ratio == _CHOSEN else width
        block.add(f"{name}_compressor_kv", n, c.n_embd)
        block.add(f"{name}_compressor_gate", n, c.n_embd)
        block.add(f"{name}_compressor_ape", ratio, n)
        block.add(f"{name}_compressor_norm", width)

    def forward(self, g: Graph, config: DeepSeek4Config, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        branches = (functools.partial(branch, g, c) for branch in (self.attention, self.feed_forward))
        streams = c.streams.layers(g, w.blk, g.embed(w.token_embd), c.rms_eps, *branches)
        gates = gate_inputs(g, w, "output_hc", streams, c.streams.n, c.rms_eps)
        x = mix_streams(g, streams, stream_gate(g, gates, 1.0, c.streams.eps), c.n_embd)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)

    def attention(self, g: Graph, c: DeepSeek4Config, i: int, block: Params, h: Value) -> Value:
        """Attention of block i to recent tokens and to blocks of tokens."""
        d, ratio, scale = c.head_dim, c.ratios[i], c.head_dim**-0.5
        rope = c.rope_pooled if ratio else c.rope
        h_q = g.rms_norm(g.linear(h, block.attn_q_a), block.attn_q_a_norm, c.rms_eps)
        q = g.rope(g.rms_norm(g.linear(h_q, block.attn_q_b), None, c.rms_eps, d), rope, d)
        k = g.rope(g.rms_norm(g.linear(h, block.attn_kv), block.attn_kv_a_norm, c.rms_eps), rope, d)
        if ratio:
            chosen = self.choose(g, c, block, h, h_q) if ratio == _CHOSEN else None
            shared = {"chosen": chosen, "block": ratio, "n_recent": c.window, "scale": scale}
            a = pooled_attention(g, q, k, self.pooled(g, c, block, "attn", h, ratio, d), block.attn_sinks, **shared)
        else:
            kv = g.store(k, None, head_dim=d, window=c.window)
            a = g.attention(q, kv, scale=scale, sinks=block.attn_sinks)
        a = g.rope(a, attrs.evolve(rope, inverse=True), d)
        matrices = block.attn_output_a.reshaped(c.n_group, c.rank_o, c.n_head * d // c.n_group)
        return g.linear(g.batched_linear(a, matrices), block.attn_output_b)

    def pooled(self, g: Graph, c: DeepSeek4Config, block: Params, name: str, h: Value, ratio: int, width: int) -> Value:
        """Pooled keys of blocks, at the positions of their first tokens."""
        x, scores, bias, norm = (getattr(block, f"{name}_compressor_{part}") for part in ("kv", "gate", "ape", "norm"))
        k = pooled(g, g.linear(h, x), g.linear(h, scores), bias, ratio, overlap=ratio == _CHOSEN)
        rope = attrs.evolve(c.rope_pooled, first=width - c.rope_pooled.n_dims, offset=1 - ratio)
        return g.rope(g.rms_norm(k, norm, c.rms_eps), rope, width)

    def choose(self, g: Graph, c: DeepSeek4Config, block: Params, h: Value, h_q: Value) -> Any:
        """Numbers of the blocks that attention reads."""
        k = self.pooled(g, c, block, "indexer", h, _CHOSEN, c.indexer.dim)
        return c.indexer.best(g, block, h, h_q, k, _CHOSEN).chosen

    def feed_forward(self, g: Graph, c: DeepSeek4Config, i: int, block: Params, h: Value) -> Value:
        """Routed and shared experts of block i."""
        routed, shared = clamped(c.limits[i], c.limits_shared[i])
        if i < c.n_hash:
            return c.mixture.layer(g, block, h, shared, activation=routed, by_token=block.ffn_gate_tid2eid_weight)
        return c.mixture.layer(g, block, h, shared, activation=routed, selection_bias=block.exp_probs_b_bias)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(DeepSeek4())
