"""Hybrid of gated short convolutions and attention, as LFM2 (Liquid AI 2025)."""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights, hookimpl

LLAMACLI_API = 1


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class ExampleHybridConfig(Config):
    """Hyperparameters of example-hybrid."""

    full_attention_interval: int
    shortconv_l_cache: int
    rope: Rope


class ExampleHybrid(Architecture):
    """`general.architecture = example-hybrid`."""

    name = "example-hybrid"

    def configure(self, metadata: Metadata) -> ExampleHybridConfig:
        """Read the hyperparameters."""
        head_dim = Config.from_gguf(metadata).head_dim
        return ExampleHybridConfig.from_gguf(
            metadata,
            full_attention_interval=metadata.get_int(f"{self.name}.full_attention_interval", minimum=1),
            shortconv_l_cache=metadata.get_int(f"{self.name}.shortconv.l_cache", minimum=2),
            rope=Rope.from_gguf(metadata, self.name, head_dim, interleaved=False),
        )

    def tensors(self, config: ExampleHybridConfig) -> TensorTable:
        """Tensors of a file, rows first."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd)
        table.add("output", c.n_vocab, c.n_embd)
        for i in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd)
            block.add("ffn_norm", c.n_embd)
            block.add("ffn_gate", c.n_ff, c.n_embd)
            block.add("ffn_up", c.n_ff, c.n_embd)
            block.add("ffn_down", c.n_embd, c.n_ff)
            if (i + 1) % c.full_attention_interval != 0:
                block.add_tensor("shortconv.in_proj.weight", 3 * c.n_embd, c.n_embd)
                block.add_tensor("shortconv.conv.weight", c.n_embd, c.shortconv_l_cache)
                block.add_tensor("shortconv.out_proj.weight", c.n_embd, c.n_embd)
            if (i + 1) % c.full_attention_interval == 0:
                block.add("attn_q", n_q, c.n_embd)
                block.add("attn_k", n_kv, c.n_embd)
                block.add("attn_v", n_kv, c.n_embd)
                block.add("attn_output", c.n_embd, n_q)
        return table

    def forward(self, g: Graph, config: ExampleHybridConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for i, block in enumerate(w.blk):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            if (i + 1) % c.full_attention_interval == 0:
                q, k, v = (g.linear(h, part) for part in (block.attn_q, block.attn_k, block.attn_v))
                q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
                kv = g.store(k, v, head_dim=c.head_dim)
                a = g.linear(g.attention(q, kv, scale=c.head_dim**-0.5), block.attn_output)
                x = x + a
            else:
                before, after, value = (
                    g.linear(h, part) for part in block.shortconv_in_proj_weight.split(c.n_embd, c.n_embd, c.n_embd)
                )
                value = g.short_conv(g.mul(before, value), block.shortconv_conv_weight)
                x = x + g.linear(g.mul(after, value), block.shortconv_out_proj_weight)
            h = g.rms_norm(x, block.ffn_norm, c.rms_eps)
            gated = g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up))
            y = g.linear(gated, block.ffn_down)
            x = x + y
        x = g.rms_norm(x, w.output_norm, c.rms_eps)
        return g.linear(x, w.output)


@hookimpl
def register_architectures(register):  # type: ignore[no-untyped-def]
    """Register the architecture."""
    register(ExampleHybrid())
