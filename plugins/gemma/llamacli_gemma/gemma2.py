"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118).

Norms before and after attention and the feed-forward network, softcaps of scores and logits, and a sliding window in
every other layer.
"""

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights, sliding_layers
from llamacli_gemma import family
from llamacli_gemma.family import GemmaConfig, Layer


class Gemma2(Architecture):
    """`general.architecture = gemma2`."""

    name = "gemma2"

    def configure(self, metadata: Metadata) -> GemmaConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        window = metadata.get_int("gemma2.attention.sliding_window", default=4096, minimum=1)
        local, everywhere = Layer(family.sliding_rope(metadata, "gemma2.rope.freq_base_swa", rope), window), Layer(rope)
        slides = sliding_layers(metadata, self.name, common.n_layer, period=2)
        return GemmaConfig.from_gguf(
            metadata,
            layers=tuple(local if sliding else everywhere for sliding in slides),
            attention_scale=family.attention_scale(common, n_layer_27b=46),
            attention_softcap=family.softcap(metadata, "gemma2.attn_logit_softcapping", default=50.0),
            final_softcap=family.softcap(metadata, "gemma2.final_logit_softcapping", default=30.0),
        )

    def tensors(self, config: GemmaConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        family.add_vocabulary(table, c)
        for _ in c.layers:
            block = table.block()
            block.add("attn_norm", c.n_embd)
            family.add_attention(block, c.n_embd, c.n_head * c.head_dim, c.n_head_kv * c.head_dim)
            block.add("post_attention_norm", c.n_embd)
            block.add("ffn_norm", c.n_embd)
            family.add_feed_forward(block, c.n_embd, c.n_ff)
            block.add("post_ffw_norm", c.n_embd)
        return table

    def forward(self, g: Graph, config: GemmaConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = g.scale(g.embed(w.token_embd), c.n_embd**0.5)
        for layer, block in zip(c.layers, w.blk, strict=True):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rope(g.linear(h, block.attn_q), layer.rope, c.head_dim)
            k = g.rope(g.linear(h, block.attn_k), layer.rope, c.head_dim)
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim, window=layer.window)
            a = g.attention(q, kv, scale=c.attention_scale, softcap=c.attention_softcap)
            x = x + g.rms_norm(g.linear(a, block.attn_output), block.post_attention_norm, c.rms_eps)

            h = family.feed_forward(g, g.rms_norm(x, block.ffn_norm, c.rms_eps), block)
            x = x + g.rms_norm(h, block.post_ffw_norm, c.rms_eps)
        return family.logits(g, x, w.token_embd, c, w)
