"""StableLM: decoders with partial RoPE, LayerNorm and SwiGLU.

Bellagamba et al. 2024 (Stable LM 2, arXiv:2402.17834). The 12B model normalises queries and keys by LayerNorm with a
weight for each head, and has attention and the feed-forward network side by side.
"""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class StableLmConfig(Config):
    """`rope` rotates halves of the first dimensions of each head."""

    rope: Rope


class StableLm(Architecture):
    """`general.architecture = stablelm`."""

    name = "stablelm"

    def configure(self, metadata: Metadata) -> StableLmConfig:
        """Read the hyperparameters."""
        eps = metadata.get_float("stablelm.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0)
        common = Config.from_gguf(metadata, layer_norm_eps=eps)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        return StableLmConfig.from_gguf(metadata, layer_norm_eps=eps, rope=rope)

    def tensors(self, config: StableLmConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd, needs_bias=True)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd, needs_bias=True)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_q_norm", c.n_head, c.head_dim, optional=True)
            block.add("attn_k_norm", c.n_head_kv, c.head_dim, optional=True)
            block.add("attn_output", c.n_embd, n_q)
            block.add("ffn_norm", c.n_embd, optional=True, bias=True)
            block.add("ffn_gate", c.n_ff, c.n_embd)
            block.add("ffn_up", c.n_ff, c.n_embd)
            block.add("ffn_down", c.n_embd, c.n_ff)
        return table

    def forward(self, g: Graph, config: StableLmConfig, weights: Weights) -> Value:
        """Token ids to logits.

        As in llama.cpp, the feed-forward network is beside attention in blocks that have no `ffn_norm`.
        """
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.layer_norm(x, block.attn_norm, c.layer_norm_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            if block.attn_q_norm:
                q = g.layer_norm(q, block.attn_q_norm, c.layer_norm_eps, c.head_dim)
            if block.attn_k_norm:
                k = g.layer_norm(k, block.attn_k_norm, c.layer_norm_eps, c.head_dim)
            q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            x = g.linear(a, block.attn_output) + x

            if block.ffn_norm:
                h = g.layer_norm(x, block.ffn_norm, c.layer_norm_eps)
            x = g.linear(g.swiglu(g.linear(h, block.ffn_gate), g.linear(h, block.ffn_up)), block.ffn_down) + x
        return g.linear(g.layer_norm(x, w.output_norm, c.layer_norm_eps), w.output)
