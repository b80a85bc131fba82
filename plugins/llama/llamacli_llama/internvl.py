"""Pictures of InternVL 1.5 to 3.5 and Intern-S1.

Chen et al. 2024 (arXiv:2404.16821), Zhu et al. 2025 (arXiv:2504.10479). A vision transformer with a class token sees
tiles of a picture and the whole; a pixel shuffle makes one token of four patches.
"""

from llamacli.plugin import (
    Graph,
    MediaEncoder,
    Metadata,
    ModelFormatError,
    Pixels,
    TensorTable,
    Value,
    VisionConfig,
    Weights,
    hookimpl,
    mlp,
    tiled,
    vision_tensors,
    vision_tower,
)

LLAMACLI_API = 1

LARGE = (3200, 45)
"""Width and layers of InternViT-6B, which has RMSNorm; no file has a key of it."""


class InternVl(MediaEncoder):
    """`clip.projector_type = internvl`."""

    name = "internvl"

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        size = tuple(metadata.get_int(f"clip.vision.{key}", minimum=1) for key in ("embedding_length", "block_count"))
        least, most = (
            metadata.get_int(f"clip.vision.preproc_{key}_tiles", default, minimum=1, maximum=100)
            for key, default in (("min", 1), ("max", 12))
        )
        if least > most:
            raise ModelFormatError(
                f"{metadata.source}: clip.vision.preproc_min_tiles = {least} is above clip.vision.preproc_max_tiles = "
                f"{most}"
            )
        side = metadata.get_int("clip.vision.image_size", minimum=1)
        sides = range(least, most + 1)
        return VisionConfig.from_gguf(
            metadata,
            rms=size == LARGE,
            class_token="dropped",
            layer_scale=True,
            qk_norm="row",
            tile_sizes=tuple((a * side, b * side) for a in sides for b in sides if least <= a * b <= most),
        )

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of the transformer and of the projector."""
        table, width = vision_tensors(config), config.n_embd * config.n_merge**2
        table.add("mm.model.mlp.0", width, bias=True)
        table.add("mm.model.mlp.1", config.n_embd_text, width, bias=True)
        table.add("mm.model.mlp.3", config.n_embd_text, config.n_embd_text, bias=True)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x = g.merge_rows(vision_tower(g, config, weights), config.n_merge**2)
        x = g.layer_norm(x, weights.mm_model_mlp_0, 1e-5)
        return mlp(g, x, weights.mm_model_mlp_1, weights.mm_model_mlp_3)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """Tiles row by row and the whole picture, between two tokens."""
        return ["<img>", *tiled(pixels, config.image_size, config.tile_sizes), "</img>"]


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(InternVl())
