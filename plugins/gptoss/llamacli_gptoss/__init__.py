"""gpt-oss: gpt-oss-20b and gpt-oss-120b.

OpenAI 2025 (arXiv:2508.10925). A pre-norm decoder whose layers are all mixtures of experts: RMSNorm, rotary attention
with grouped heads and a learned sink per head, alternating between sliding-window and full attention, then a mixture of
clamped gated units. All projections have biases, except for the embedding and the output.
"""

import attrs

from llamacli.plugin import (
    Activation,
    Architecture,
    Config,
    Graph,
    Metadata,
    Rope,
    TensorTable,
    Value,
    Weights,
    hookimpl,
    sliding_layers,
)
from llamacli_gptoss.chat import FORMAT

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GptOssConfig(Config):
    """Hyperparameters of gpt-oss.

    `rope` and, in sliding layers, `sliding_rope` rotate halves of heads (NeoX order). `n_ff_expert` is the width of an
    expert. `windows` has one item per layer: the sliding window in tokens, the current one included, or None for full
    attention.
    """

    rope: Rope
    sliding_rope: Rope
    n_ff_expert: int
    windows: tuple[int | None, ...]


class GptOss(Architecture):
    """`general.architecture = gpt-oss`."""

    name = "gpt-oss"

    def configure(self, metadata: Metadata) -> GptOssConfig:
        """Read the hyperparameters; by default every second layer slides."""
        for key in ("expert_count", "expert_used_count"):
            metadata.get_int(f"{self.name}.{key}", minimum=1)
        common = Config.from_gguf(metadata)
        window = metadata.get_int(f"{self.name}.attention.sliding_window", minimum=1)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        sliding_base = metadata.get_float(f"{self.name}.rope.freq_base_swa", default=rope.base, minimum=2.0)
        slides = sliding_layers(metadata, self.name, common.n_layer, period=2)
        return GptOssConfig.from_gguf(
            metadata,
            rope=rope,
            sliding_rope=attrs.evolve(rope, base=sliding_base),
            n_ff_expert=metadata.get_int(f"{self.name}.expert_feed_forward_length", minimum=1, maximum=1 << 24),
            windows=tuple(window if sliding else None for sliding in slides),
        )

    def tensors(self, config: GptOssConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            q, k, v = (n_q, c.n_embd), (n_kv, c.n_embd), (n_kv, c.n_embd)
            block.add_fused("attn_qkv", bias=True, attn_q=q, attn_k=k, attn_v=v)
            block.add("attn_sinks", c.n_head)
            block.add("attn_output", c.n_embd, n_q, needs_bias=True)
            block.add("post_attention_norm", c.n_embd)
            block.add("ffn_gate_inp", c.n_expert, c.n_embd, needs_bias=True)
            block.add("ffn_gate_exps", c.n_expert, c.n_ff_expert, c.n_embd, needs_bias=True)
            block.add("ffn_up_exps", c.n_expert, c.n_ff_expert, c.n_embd, needs_bias=True)
            block.add("ffn_down_exps", c.n_expert, c.n_embd, c.n_ff_expert, needs_bias=True)
        return table

    def forward(self, g: Graph, config: GptOssConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block, window in zip(w.blk, c.windows, strict=True):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            rope = c.sliding_rope if window else c.rope
            q = g.rope(g.linear(h, block.attn_q), rope, c.head_dim)
            k = g.rope(g.linear(h, block.attn_k), rope, c.head_dim)
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim, window=window)
            a = g.attention(q, kv, scale=c.head_dim**-0.5, sinks=block.attn_sinks)
            x = x + g.linear(a, block.attn_output)

            h = g.rms_norm(x, block.post_attention_norm, c.rms_eps)
            x = x + g.moe(
                h,
                g.linear(h, block.ffn_gate_inp),
                gate=block.ffn_gate_exps,
                up=block.ffn_up_exps,
                down=block.ffn_down_exps,
                n_used=c.n_expert_used,
                activation=Activation.SWIGLU_OAI,
            )
        return g.linear(g.rms_norm(x, w.output_norm, c.rms_eps), w.output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture of this family."""
    register(GptOss())


@hookimpl
def register_chat_formats(register):  # type: ignore[no-untyped-def]
    """Register the chat format of this family."""
    register(FORMAT)
