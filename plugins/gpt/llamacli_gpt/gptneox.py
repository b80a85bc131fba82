"""GPT-NeoX and Pythia: decoders with RoPE, LayerNorm and GELU.

Black et al. 2022 (GPT-NeoX-20B, arXiv:2204.06745), Biderman et al. 2023 (Pythia, arXiv:2304.01373). Attention and the
MLP read norms of their own, and are added to the residual together, or one after the other.
"""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights, gelu


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class GptNeoXConfig(Config):
    """Hyperparameters of GPT-NeoX.

    `rope` rotates halves of the first dimensions of each head. `parallel`: the MLP reads the input of attention.
    """

    rope: Rope
    parallel: bool


class GptNeoX(Architecture):
    """`general.architecture = gptneox`."""

    name = "gptneox"

    def configure(self, metadata: Metadata) -> GptNeoXConfig:
        """Read the hyperparameters."""
        eps = metadata.get_float("gptneox.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0)
        common = Config.from_gguf(metadata, layer_norm_eps=eps)
        return GptNeoXConfig.from_gguf(
            metadata,
            layer_norm_eps=eps,
            rope=Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False),
            parallel=metadata.get_bool("gptneox.use_parallel_residual"),
        )

    def tensors(self, config: GptNeoXConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        table.add("token_embd", c.n_vocab, c.n_embd)
        table.add("output_norm", c.n_embd, needs_bias=True)
        table.add("output", c.n_vocab, c.n_embd)
        for _ in range(c.n_layer):
            block = table.block()
            block.add("attn_norm", c.n_embd, needs_bias=True)
            block.add("attn_qkv", n_q + 2 * n_kv, c.n_embd, needs_bias=True)
            block.add("attn_output", c.n_embd, n_q, needs_bias=True)
            block.add("ffn_norm", c.n_embd, needs_bias=True)
            block.add("ffn_up", c.n_ff, c.n_embd, needs_bias=True)
            block.add("ffn_down", c.n_embd, c.n_ff, needs_bias=True)
        return table

    def forward(self, g: Graph, config: GptNeoXConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        x = g.embed(w.token_embd)
        for block in w.blk:
            h = g.layer_norm(x, block.attn_norm, c.layer_norm_eps)
            q, k, v = (g.linear(h, param) for param in block.attn_qkv.split(n_q, n_kv, n_kv))
            q, k = (g.rope(heads, c.rope, c.head_dim) for heads in (q, k))
            a = g.attention(q, g.store(k, v, head_dim=c.head_dim), scale=c.head_dim**-0.5)
            a = g.linear(a, block.attn_output)

            h = g.layer_norm(x if c.parallel else a + x, block.ffn_norm, c.layer_norm_eps)
            h = g.linear(g.map(g.linear(h, block.ffn_up), gelu), block.ffn_down)
            x = h + x + a
        return g.linear(g.layer_norm(x, w.output_norm, c.layer_norm_eps), w.output)
