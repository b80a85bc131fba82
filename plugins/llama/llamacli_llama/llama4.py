"""Llama 4: chunked attention and experts with weighted inputs (Meta AI 2025).

Three of four layers attend within chunks of 8192 tokens and have RoPE; the fourth attends to all tokens, has none, and
queries that grow with the logarithm of the position. Some blocks have experts, chosen by the largest logits, whose
inputs are multiplied by the sigmoid of the logit, beside a shared expert.
"""

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    Param,
    Params,
    Rope,
    Scoring,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    sliding_layers,
)

LLAMACLI_API = 1

CHUNK = 8192
"""Tokens of a chunk, and positions after which queries grow; files do not have the number."""

_TEMPERATURE = 0.1
_ROPE_PERIOD = 4


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Llama4Config(Config):
    """Hyperparameters of Llama 4.

    Layers with `chunked` attend within chunks and rotate by `chunked_rope`, others by `rope`, but every fourth is not
    rotated. Blocks with `has_experts` have experts of `n_ff_expert` numbers. `normed`: rotated queries and keys are
    normalised.
    """

    rope: Rope
    chunked_rope: Rope
    chunked: tuple[bool, ...]
    has_experts: tuple[bool, ...]
    n_ff_expert: int
    normed: bool


class Llama4(Architecture):
    """`general.architecture = llama4`."""

    name = "llama4"

    def configure(self, metadata: Metadata) -> Llama4Config:
        """Read the hyperparameters.

        Only Maverick, with 128 experts, does not normalise queries and keys. Files with `sliding_window` = 0, without
        chunks, are refused.
        """
        metadata.get_int(f"{self.name}.attention.sliding_window", default=CHUNK, minimum=1)
        metadata.get_int(f"{self.name}.expert_count", minimum=1)
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=True)
        metadata.get_int(
            f"{self.name}.rope.dimension_count", default=common.head_dim, minimum=common.head_dim
        )  # llama.cpp requires whole heads
        base = metadata.get_float(f"{self.name}.rope.freq_base_swa", default=rope.base, minimum=2.0)
        step = metadata.get_int(f"{self.name}.interleave_moe_layer_step", minimum=0, maximum=1 << 10)
        return Llama4Config.from_gguf(
            metadata,
            rope=rope,
            chunked_rope=attrs.evolve(rope, base=base),
            chunked=sliding_layers(metadata, self.name, common.n_layer, 4),
            has_experts=tuple(step > 0 and (i + 1) % step == 0 for i in range(common.n_layer)),
            n_ff_expert=metadata.get_int(f"{self.name}.expert_feed_forward_length", minimum=1, maximum=1 << 24),
            normed=common.n_expert != 128,
        )

    def tensors(self, config: Llama4Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        table.add("rope_freqs", c.rope.n_dims // 2, optional=True)
        for has_experts in c.has_experts:
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd)
            if has_experts:
                block.add("ffn_gate_inp", c.n_expert, c.n_embd)
                block.add("ffn_gate_exps", c.n_expert, c.n_ff_expert, c.n_embd)
                block.add("ffn_up_exps", c.n_expert, c.n_ff_expert, c.n_embd)
                block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff_expert)
            suffix, n_ff = ("_shexp", c.n_ff_expert) if has_experts else ("", c.n_ff)
            block.add(f"ffn_gate{suffix}", n_ff, c.n_embd)
            block.add(f"ffn_up{suffix}", n_ff, c.n_embd)
            block.add(f"ffn_down{suffix}", c.n_embd, n_ff)
        return table

    def forward(self, g: Graph, config: Llama4Config, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            if (i + 1) % _ROPE_PERIOD:
                rope = c.chunked_rope if c.chunked[i] else c.rope
                q, k = (g.rope(heads, rope, c.head_dim, w.rope_freqs) for heads in (q, k))
                if c.normed:
                    q, k = (g.rms_norm(heads, None, c.rms_eps, c.head_dim) for heads in (q, k))
            else:
                q = g.attention_temperature(q, _TEMPERATURE, CHUNK, 1)
            kv = g.store(k, v, head_dim=c.head_dim, chunk=CHUNK if c.chunked[i] else None)
            x = x + g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            if c.has_experts[i]:
                x = x + self.experts(g, c, block, h)
            else:
                x = x + _swiglu(g, h, block.ffn_gate, block.ffn_up, block.ffn_down)
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output or w.token_embd)

    def experts(self, g: Graph, c: Llama4Config, block: Params, h: Value) -> Value:
        """Routed experts plus the shared one."""
        routed = g.moe(
            h,
            g.linear(h, block.ffn_gate_inp),
            gate=block.ffn_gate_exps,
            up=block.ffn_up_exps,
            down=block.ffn_down_exps,
            n_used=c.n_expert_used,
            scoring=Scoring.SIGMOID,
            renormalize=False,
            weigh_input=True,
        )
        return routed + _swiglu(g, h, block.ffn_gate_shexp, block.ffn_up_shexp, block.ffn_down_shexp)


def _swiglu(g: Graph, h: Value, gate: Param, up: Param, down: Param) -> Value:
    """Feed-forward network with a gate."""
    return g.linear(g.swiglu(g.linear(h, gate), g.linear(h, up)), down)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(Llama4())
