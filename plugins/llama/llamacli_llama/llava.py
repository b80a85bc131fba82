"""Pictures of LLaVA 1.5 and 1.6, BakLLaVA, Yi-VL and Moondream.

Liu et al. 2023 (arXiv:2304.08485, arXiv:2310.03744). A CLIP encoder with a class token sees the picture as a square, or
tiles of it and the whole; its last layer is not read.
"""

import attrs
import numpy as np

from llamacli.plugin import (
    Graph,
    MediaEncoder,
    Metadata,
    ModelFile,
    ModelFormatError,
    Pixels,
    TensorTable,
    Value,
    VisionConfig,
    Weights,
    gelu,
    hookimpl,
    mlp,
    padded,
    tiled,
    vision_tensors,
    vision_tower,
)

LLAMACLI_API = 1

GREY = (122, 116, 104)
"""Colour beside a picture that is no square, the mean of CLIP's."""


class Llava(MediaEncoder):
    """`clip.projector_type = mlp`."""

    name = "mlp"

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        config = VisionConfig.from_gguf(metadata, n_merge=1)
        if config.n_layer < 2 or "clip.vision.feature_layer" in metadata:
            raise ModelFormatError(
                f"{metadata.source}: LLaVA's encoder needs clip.vision.block_count of 2 or more, and no "
                "clip.vision.feature_layer: the last layer but one is read"
            )
        config = attrs.evolve(config, tile_sizes=_tile_sizes(metadata))
        return attrs.evolve(config, n_layer=config.n_layer - 1, n_unread=1, class_token="kept")

    def configure_file(self, file: ModelFile) -> VisionConfig:
        """Read the hyperparameters; CLIP has a class token, SigLIP none."""
        config = self.configure(file.metadata)
        return config if "v.class_embd" in file.tensors else attrs.evolve(config, class_token="")

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of the transformer and of the projector, with Yi-VL's norms."""
        table, square = vision_tensors(config), (config.n_embd_text, config.n_embd_text)
        table.add("mm.0", config.n_embd_text, config.n_embd, bias=True)
        table.add("mm.2", *square, bias=True, optional=True)
        table.add("mm.1", config.n_embd_text, bias=True, optional=True)
        table.add("mm.3", *square, bias=True, optional=True)
        table.add("mm.4", config.n_embd_text, bias=True, optional=True)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x, w, eps = vision_tower(g, config, weights), weights, config.layer_norm_eps
        if w.mm_3:
            x = g.layer_norm(g.linear(x, w.mm_0), w.mm_1, eps)
            return g.layer_norm(g.linear(g.map(x, gelu), w.mm_3), w.mm_4, eps)
        return mlp(g, x, w.mm_0, w.mm_2) if w.mm_2 else g.map(g.linear(x, w.mm_0), gelu)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """The picture in a square, or its tiles."""
        side = config.image_size
        if config.tile_sizes:
            return [*tiled(pixels, side, config.tile_sizes)]
        return [padded(pixels, side, side, "bicubic", GREY)]


def _tile_sizes(metadata: Metadata) -> tuple[tuple[int, int], ...]:
    key, side = "clip.vision.image_grid_pinpoints", metadata.get_int("clip.vision.image_size", minimum=1)
    if key not in metadata:
        return ()
    numbers = metadata.get_ints(key, np.size(metadata[key]))
    if len(numbers) % 2 or any(n < side or n % side for n in numbers):
        raise ModelFormatError(f"{metadata.source}: {key} = {numbers} are not widths and heights of whole tiles")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Llava())
