"""Pictures of Gemma 3.

Gemma Team 2025 (arXiv:2503.19786). A SigLIP encoder sees the picture as one square; average pooling makes 256 tokens of
its patches, which attend to each other in both directions in the language model.
"""

from llamacli.plugin import (
    Graph,
    MediaEncoder,
    Metadata,
    Pixels,
    TensorTable,
    Value,
    VisionConfig,
    Weights,
    hookimpl,
    padded,
    vision_tensors,
    vision_tower,
)

LLAMACLI_API = 1


class Gemma3Vision(MediaEncoder):
    """`clip.projector_type = gemma3`."""

    name = "gemma3"
    is_bidirectional = True
    transposed = ("mm.input_projection.weight",)

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        return VisionConfig.from_gguf(metadata, n_merge=4)

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of SigLIP and of the projector."""
        table = vision_tensors(config)
        table.add("mm.soft_emb_norm", config.n_embd)
        table.add("mm.input_projection", config.n_embd_text, config.n_embd)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x = g.merge_rows(vision_tower(g, config, weights), config.n_merge**2, mean=True)
        x = g.rms_norm(x, weights.mm_soft_emb_norm, config.layer_norm_eps)
        return g.linear(x, weights.mm_input_projection)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """The picture in a square, between its two tokens."""
        square = padded(pixels, config.image_size, config.image_size, "bilinear")
        return ["<start_of_image>", square, "<end_of_image>"]


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Gemma3Vision())
