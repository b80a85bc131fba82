"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786).

As Gemma 2, with a norm of each head of Q and K in place of the softcaps. Five of six layers have a sliding window
and an unscaled RoPE of a smaller base.
"""

import attrs

from llamacli import Architecture, Config, Graph, Rope, TensorTable, Value, Weights
from llamacli.architecture import sliding_layers
from llamacli.gguf import Metadata
from llamacli_gemma import family
from llamacli_gemma.family import GemmaConfig, Layer


class Gemma3(Architecture):
    """`general.architecture = gemma3`."""

    name = "gemma3"

    def configure(self, metadata: Metadata) -> GemmaConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        layers = (Layer(rope),) * common.n_layer
        if window := metadata.get_int("gemma3.attention.sliding_window", default=0, minimum=0):
            local = Layer(
                family.sliding_rope(
                    metadata, "gemma3.rope.freq_base_swa", attrs.evolve(rope, base=10000.0, freq_scale=1.0)
                ),
                window,
            )
            slides = sliding_layers(metadata, self.name, common.n_layer, period=6)
            layers = tuple(local if sliding else Layer(rope) for sliding in slides)
        return GemmaConfig.from_gguf(
            metadata,
            layers=layers,
            attention_scale=family.attention_scale(common, n_layer_27b=62),
            final_softcap=family.softcap(metadata, "gemma3.final_logit_softcapping", default=0.0),
        )

    def tensors(self, config: GemmaConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        family.add_vocabulary(table, c)
        table.add("output", c.n_vocab, c.n_embd, optional=True)
        for _ in c.layers:
            block = table.block()
            block.add("attn_norm", c.n_embd)
            family.add_attention(block, c.n_embd, c.n_head * c.head_dim, c.n_head_kv * c.head_dim)
            block.add("attn_q_norm", c.head_dim)
            block.add("attn_k_norm", c.head_dim)
            block.add("post_attention_norm", c.n_embd)
            block.add("ffn_norm", c.n_embd)
            family.add_feed_forward(block, c.n_embd, c.n_ff)
            block.add("post_ffw_norm", c.n_embd)
        return table

    def forward(self, g: Graph, config: GemmaConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = family.embed(g, c, w)
        for layer, block in zip(c.layers, w.blk, strict=True):
            h = g.rms_norm(x, block.attn_norm, c.rms_eps)
            q = g.rms_norm(g.linear(h, block.attn_q), block.attn_q_norm, c.rms_eps, c.head_dim)
            k = g.rms_norm(g.linear(h, block.attn_k), block.attn_k_norm, c.rms_eps, c.head_dim)
            q, k = (g.rope(value, layer.rope, c.head_dim) for value in (q, k))
            kv = g.store(k, g.linear(h, block.attn_v), head_dim=c.head_dim, window=layer.window)
            a = g.attention(q, kv, scale=c.attention_scale)
            x = x + g.rms_norm(g.linear(a, block.attn_output), block.post_attention_norm, c.rms_eps)

            h = family.feed_forward(g, g.rms_norm(x, block.ffn_norm, c.rms_eps), block)
            x = x + g.rms_norm(h, block.post_ffw_norm, c.rms_eps)
        return family.logits(g, x, w.output or w.token_embd, c, w)
