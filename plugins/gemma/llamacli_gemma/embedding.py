"""EmbeddingGemma (Schechter Vera et al. 2025, arXiv:2509.20354).

The blocks of Gemma 3 with attention in both directions: windows are symmetric. Dense layers without activation follow,
where the file has them. They are applied to pooled vectors; as they are linear, here they are applied to each token.
"""

import attrs

from llamacli.plugin import (
    Architecture,
    Config,
    Graph,
    Metadata,
    ModelFormatError,
    Rope,
    TensorTable,
    Value,
    Weights,
    sliding_layers,
)
from llamacli_gemma import family
from llamacli_gemma.family import GemmaConfig, Layer


@attrs.define(kw_only=True, on_setattr=attrs.setters.frozen)
class EmbeddingConfig(GemmaConfig):
    """Hyperparameters of EmbeddingGemma.

    `n_dense` is the width between the two dense layers, 0 without.
    """

    n_dense: int


class GemmaEmbedding(Architecture):
    """`general.architecture = gemma-embedding`."""

    name = "gemma-embedding"

    def configure(self, metadata: Metadata) -> EmbeddingConfig:
        """Read the hyperparameters."""
        common = Config.from_gguf(metadata)
        rope = Rope.from_gguf(metadata, self.name, common.head_dim, interleaved=False)
        window = metadata.get_int(f"{self.name}.attention.sliding_window", minimum=1)
        unscaled = attrs.evolve(rope, base=10000.0, freq_scale=1.0)
        local = Layer(family.sliding_rope(metadata, f"{self.name}.rope.freq_base_swa", unscaled), window)
        slides = sliding_layers(metadata, self.name, common.n_layer, period=6)
        metadata.get_bool(f"{self.name}.attention.causal", default=False)  # attention goes in both directions anyway
        n_dense = metadata.get_int(f"{self.name}.dense_2_feat_out", default=0, minimum=0, maximum=1 << 20)
        for key, width in (
            ("dense_2_feat_in", common.n_embd), ("dense_3_feat_in", n_dense), ("dense_3_feat_out", common.n_embd)
        ):  # fmt: skip
            found, expected = metadata.get_int(f"{self.name}.{key}", default=0), width if n_dense else 0
            if found != expected:
                raise ModelFormatError(
                    f"{metadata.source}: {self.name}.{key} = {found}, expected {expected} with "
                    f"{self.name}.dense_2_feat_out = {n_dense}"
                )
        return EmbeddingConfig.from_gguf(
            metadata,
            layers=tuple(local if sliding else Layer(rope) for sliding in slides),
            attention_scale=common.head_dim**-0.5,
            n_dense=n_dense,
        )

    def tensors(self, config: EmbeddingConfig) -> TensorTable:
        """The tensors of a file."""
        c, table = config, TensorTable()
        family.add_vocabulary(table, c)
        table.add_unused("output", c.n_vocab, c.n_embd)
        if c.n_dense:
            table.add("dense_2", c.n_dense, c.n_embd)
            table.add("dense_3", c.n_embd, c.n_dense)
        family.add_normed_blocks(table, c)
        return table

    def forward(self, g: Graph, config: EmbeddingConfig, weights: Weights) -> Value:
        """Token ids to hidden states."""
        c, w = config, weights
        x = family.embed(g, c, w)
        for layer, block in zip(c.layers, w.blk, strict=True):
            x = family.normed_block(g, c, layer, block, x, causal=False)
        x = g.rms_norm(x, w.output_norm, c.rms_eps)
        return g.linear(g.linear(x, w.dense_2), w.dense_3) if c.n_dense else x
