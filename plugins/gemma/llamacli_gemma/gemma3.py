"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786).

As Gemma 2, with a norm of each head of Q and K in place of the softcaps. Five of six layers have a sliding window
and an unscaled RoPE of a smaller base.
"""

import attrs

from llamacli.plugin import Architecture, Config, Graph, Metadata, Rope, TensorTable, Value, Weights, sliding_layers
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
        family.add_normed_blocks(table, c)
        return table

    def forward(self, g: Graph, config: GemmaConfig, weights: Weights) -> Value:
        """Token ids to logits."""
        c, w = config, weights
        x = family.embed(g, c, w)
        for layer, block in zip(c.layers, w.blk, strict=True):
            x = family.normed_block(g, c, layer, block, x)
        return family.logits(g, x, w.output or w.token_embd, c, w)
