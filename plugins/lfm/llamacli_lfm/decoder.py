"""LFM2: gated short convolutions, and attention in some layers.

Liquid AI 2025 (LFM2 Technical Report, arXiv:2511.23404). A layer mixes tokens by a short convolution between two gates,
or by attention over grouped heads, whose queries and keys are normalised; a SwiGLU network or experts follow.
"""

from typing import Any

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    Weights,
)


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Lfm2Config(Config):
    """Hyperparameters of LFM2.

    `rope` rotates halves of heads (NeoX order). `heads_kv` are the heads of keys and values of each layer; layers with
    0 are convolutions over `n_taps` tokens. Unless the model is `causal`, those are around a token, and attention goes
    in both directions. It sees the last `window` tokens, or all with None. The first `n_dense` layers have no experts;
    experts are `n_ff_expert` wide, embeddings `n_out`.
    """

    rope: Rope
    heads_kv: tuple[int, ...]
    n_taps: int
    causal: bool
    n_dense: int
    window: int | None = None
    n_ff_expert: int = 0
    n_out: int
    scoring: Scoring = Scoring.SIGMOID


class Lfm2(Architecture):
    """`general.architecture = lfm2`: LFM2 and LFM2.5, embedding models without a mask too."""

    name = "lfm2"

    def configure(self, metadata: Metadata) -> Lfm2Config:
        """Read the hyperparameters; even numbers of taps around a token are refused."""
        name = self.name
        n_taps = metadata.get_int(f"{name}.shortconv.l_cache", minimum=2, maximum=64)
        causal = metadata.get_bool(f"{name}.attention.causal", default=True)
        if not causal and n_taps % 2 == 0:
            raise ModelFormatError(
                f"{metadata.source}: {name}.shortconv.l_cache = {n_taps}, expected an odd number with "
                f"{name}.attention.causal = false"
            )
        n_layer = metadata.get_int(f"{name}.block_count", minimum=1, maximum=1 << 10)
        heads_kv = metadata.get_ints(f"{name}.attention.head_count_kv", n_layer, minimum=0, maximum=1 << 14)
        n_head = metadata.get_int(f"{name}.attention.head_count", minimum=1, maximum=1 << 14)
        if any(n and n_head % n for n in heads_kv):
            raise ModelFormatError(
                f"{metadata.source}: {name}.attention.head_count_kv = {list(heads_kv)}, expected 0 or divisors of "
                f"{name}.attention.head_count = {n_head}"
            )
        n_head_kv = max(*heads_kv, 1)
        head_dim = Config.from_gguf(metadata, n_head_kv=n_head_kv).head_dim
        return Lfm2Config.from_gguf(
            metadata,
            n_head_kv=n_head_kv,
            rope=Rope.from_gguf(metadata, name, head_dim, interleaved=False),
            heads_kv=heads_kv,
            n_taps=n_taps,
            causal=causal,
            n_out=metadata.get_int(
                f"{name}.embedding_length_out",
                default=metadata.get_int(f"{name}.embedding_length"),
                minimum=1,
                maximum=1 << 20,
            ),
            **self.read_layers(metadata, n_layer),
        )

    def read_layers(self, metadata: Metadata, n_layer: int) -> dict[str, Any]:
        """Sliding window; all layers are dense."""
        window = metadata.get_int(f"{self.name}.attention.sliding_window", default=0, minimum=0)
        return {"n_dense": n_layer, "window": window or None}

    def tensors(self, config: Lfm2Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("token_embd_norm", c.n_embd)  # the final norm
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        table.add("dense_2", c.n_out, c.n_embd, optional=True, bias=True)
        for i, n_head_kv in enumerate(c.heads_kv):
            block, n_q, n_kv = table.block(), c.n_head * c.head_dim, n_head_kv * c.head_dim
            block.add("attn_norm", c.n_embd)
            if n_head_kv:
                block.add_fused(
                    "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
                )
                block.add("attn_q_norm", c.head_dim)
                block.add("attn_k_norm", c.head_dim)
                block.add("attn_output", c.n_embd, n_q)
            else:
                block.add("shortconv.in_proj", 3 * c.n_embd, c.n_embd)
                block.add("shortconv.conv", c.n_embd, c.n_taps)
                block.add("shortconv.out_proj", c.n_embd, c.n_embd)
            block.add("ffn_norm", c.n_embd)
            if i < c.n_dense:
                block.add("ffn_gate", c.n_ff, c.n_embd)
                block.add("ffn_up", c.n_ff, c.n_embd)
                block.add("ffn_down", c.n_embd, c.n_ff)
            else:
                block.add("ffn_gate_inp", c.n_expert, c.n_embd)
                block.add_tensor("exp_probs_b.bias", c.n_expert)
                block.add("ffn_gate_exps", c.n_expert, c.n_ff_expert, c.n_embd)
                block.add("ffn_up_exps", c.n_expert, c.n_ff_expert, c.n_embd)
                block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff_expert)
        return table

    def forward(self, g: Graph, config: Lfm2Config, weights: Weights) -> Value:
        """Token ids to logits, or to hidden states without a mask."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            x = x + (self.attention(g, c, block, h) if c.heads_kv[i] else self.convolution(g, c, block, h))
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            x = x + (self.network(g, block, h) if i < c.n_dense else self.experts(g, c, block, h))
        x = g.rms_norm(x, w.token_embd_norm, c.rms_eps)
        return g.linear(x, w.output or w.token_embd) if c.causal else x

    def dense(self, g: Graph, config: Lfm2Config, weights: Weights) -> Value | None:
        """Dense layer of embeddings, `dense_2`."""
        return g.linear(g.previous_hidden(config.n_embd), weights.dense_2) if weights.dense_2 else None

    def convolution(self, g: Graph, c: Lfm2Config, block: Params, h: Value) -> Value:
        """Short convolution with a gate before it and one behind it."""
        n_ahead = 0 if c.causal else c.n_taps // 2
        mixed = g.linear(h, block.shortconv_in_proj)
        before, behind, x = (g.columns(mixed, i * c.n_embd, c.n_embd) for i in range(3))
        y = g.mul(behind, g.short_conv(g.mul(before, x), block.shortconv_conv, n_ahead=n_ahead))
        return g.linear(y, block.shortconv_out_proj)

    def attention(self, g: Graph, c: Lfm2Config, block: Params, h: Value) -> Value:
        """Attention with RMSNorm of each head of queries and keys."""
        q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps, c.head_dim)
        k = g.rms_norm(g.linear(h, block.attn_k), block.attn_k_norm, c.rms_eps, c.head_dim)
        q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
        kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim, window=c.window)
        return g.linear(g.attention(q, kv, scale=c.head_dim**-0.5, causal=c.causal), block.attn_output)

    def network(self, g: Graph, block: Params, h: Value) -> Value:
        """SwiGLU feed-forward network."""
        return g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down)

    def experts(self, g: Graph, c: Lfm2Config, block: Params, h: Value) -> Value:
        """Experts chosen by score plus bias, with weights that sum to 1."""
        return g.moe(
            h,
            g.linear(h, block.ffn_gate_inp),
            gate=block.ffn_gate_exps,
            up=block.ffn_up_exps,
            down=block.ffn_down_exps,
            n_used=c.n_expert_used,
            scoring=c.scoring,
            selection_bias=block.exp_probs_b_bias,
            renormalize=True,
        )


class Lfm2Moe(Lfm2):
    """`general.architecture = lfm2moe`: LFM2-8B-A1B and LFM2-24B-A2B."""

    name = "lfm2moe"

    def read_layers(self, metadata: Metadata, n_layer: int) -> dict[str, Any]:
        """Number of dense layers, and sizes of experts; no sliding window."""

        def count(key: str, minimum: int, maximum: int, **default: int) -> int:
            return metadata.get_int(f"{self.name}.{key}", minimum=minimum, maximum=maximum, **default)

        count("expert_count", 1, 1 << 14)
        return {
            "n_dense": count("leading_dense_block_count", 0, n_layer, default=0),
            "n_ff_expert": count("expert_feed_forward_length", 1, 1 << 24),
            "scoring": Scoring(count("expert_gating_func", min(Scoring), max(Scoring))),
        }
