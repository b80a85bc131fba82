"""Gemma 1 (Gemma Team 2024, arXiv:2403.08295) and CodeGemma.

A pre-norm decoder: RMSNorm, rotary attention with one or more heads of keys and values, a GeGLU feed-forward network.
"""

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights
from llamacli_gemma import family
from llamacli_gemma.family import GemmaConfig, Layer


class Gemma1(Architecture):
    """`general.architecture = gemma`."""

    name = "gemma"

    def configure(self, metadata: Metadata) -> GemmaConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        layers = (Layer(rope),) * common.n_layer
        return GemmaConfig.from_gguf(metadata, layers=layers, attention_scale=common.head_dim**-0.5)

    def tensors(self, config: GemmaConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        family.add_vocabulary(table, c)
        for _ in c.layers:
            block = table.block()
            block.add("attn_norm", c.n_embd)
            family.add_attention(block, c.n_embd, c.n_head * c.head_dim, c.n_head_kv * c.head_dim)
            block.add("ffn_norm", c.n_embd)
            family.add_feed_forward(block, c.n_embd, c.n_ff)
        return table

    def forward(self, g: Graph, config: GemmaConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.scale(g.embed(w.token_embd), c.n_embd**0.5)
        for layer, block in zip(c.layers, w.blk, strict=True):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rope(g.linear(h, block.attn_q), layer.rope, c.head_dim)
            k = g.rope(g.linear(h, block.attn_k), layer.rope, c.head_dim)
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim)
            x = x + g.linear(g.attention(q, kv, scale=c.attention_scale), block.attn_output)
            x = x + family.feed_forward(g, g.rms_norm(x, block.ffn_norm, c.rms_eps), block)
        return family.logits(g, x, w.token_embd, c, w)
