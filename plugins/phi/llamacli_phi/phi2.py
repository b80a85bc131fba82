"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel.

Li et al. 2023 (arXiv:2309.05463), Javaheripi et al. 2023. Both read the same LayerNorm and are added to the residual
together; the MLP has GELU and no gate, RoPE rotates the first dimensions of each head, and every matrix has a bias.
"""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights, gelu


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class Phi2Config(Config):
    """`rope` rotates halves of the first dimensions of each head (NeoX order)."""

    rope: Rope


class Phi2(Architecture):
    """`general.architecture = phi2`."""

    name = "phi2"

    def configure(self, metadata: Metadata) -> Phi2Config:
        """Read the hyperparameters."""
        eps = metadata.get_float("phi2.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0)
        common = Config.from_gguf(metadata, layer_norm_eps=eps)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        return Phi2Config.from_gguf(metadata, layer_norm_eps=eps, rope=rope)

    def tensors(self, config: Phi2Config) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd, needs_bias=True)
        table.add("output", c.n_vocab, c.n_embd, needs_bias=True)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd, needs_bias=True)
            block.add_fused(
                "attn_qkv", bias=True, attn_q=(n_q, c.n_embd), attn_k=(n_kv, c.n_embd), attn_v=(n_kv, c.n_embd)
            )
            block.add("attn_output", c.n_embd, n_q, needs_bias=True)
            block.add("ffn_up", c.n_ff, c.n_embd, needs_bias=True)
            block.add("ffn_down", c.n_embd, c.n_ff, needs_bias=True)
        return table

    def forward(self, g: Graph, config: Phi2Config, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.layer_norm(x, block.attn_norm, c.layer_norm_eps)
            q, k, v = (g.linear(h, param) for param in (block.attn_q, block.attn_k, block.attn_v))
            q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            f = g.map(g.linear(h, block.ffn_up), gelu)
            x = g.linear(a, block.attn_output) + g.linear(f, block.ffn_down) + x
        return g.linear(g.layer_norm(x, w.output_norm, c.layer_norm_eps), w.output)
