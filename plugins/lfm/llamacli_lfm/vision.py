"""Pictures of LFM2-VL and LFM2.5-VL.

Liquid AI 2025 (arXiv:2511.23404). A SigLIP 2 encoder (Tschannen et al. 2025, arXiv:2502.14786) sees pictures of any
proportions, whose positions are those of its grid resized; large ones are divided into squares, with the whole behind.
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
    fitting,
    hookimpl,
    mlp,
    padded,
    resized,
    vision_tensors,
    vision_tower,
)

LLAMACLI_API = 1

TILE = 512
"""Side of the squares of a large picture, in pixels; no file has a key of it."""

MAX_TILES = 10
"""Largest number of squares; the smallest is 2."""


class Lfm2Vision(MediaEncoder):
    """`clip.projector_type = lfm2`."""

    name = "lfm2"

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        config = VisionConfig.from_gguf(metadata, n_merge=2, tokens=(64, 256), positions="grid")
        side = config.patch_size * config.n_merge
        if TILE % side or (TILE // side) ** 2 > config.tokens[1]:
            raise ModelFormatError(
                f"{metadata.source}: clip.vision.patch_size = {config.patch_size} and a scale_factor of "
                f"{config.n_merge} do not divide squares of {TILE} pixels into at most {config.tokens[1]} tokens"
            )
        return attrs.evolve(config, n_projector=config.n_embd_text)

    def configure_file(self, file: ModelFile) -> VisionConfig:
        """Read the hyperparameters; the projector's width is its first matrix's."""
        first = file.tensors.get("mm.1.weight")
        config = self.configure(file.metadata)
        return attrs.evolve(config, n_projector=first.shape[0]) if first else config

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of SigLIP and of the projector."""
        table, width = vision_tensors(config), config.n_embd * config.n_merge**2
        table.add("mm.input_norm", width, bias=True, optional=True)
        table.add("mm.1", config.n_projector, width, bias=True)
        table.add("mm.2", config.n_embd_text, config.n_projector, bias=True)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x = g.merge_rows(vision_tower(g, config, weights), config.n_merge**2)
        if weights.mm_input_norm:
            x = g.layer_norm(x, weights.mm_input_norm, 1e-5)
        return mlp(g, x, weights.mm_1, weights.mm_2)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """The picture, behind its squares if it is large, between two tokens."""
        side, (height, width, _) = config.patch_size * config.n_merge, pixels.shape
        least, most = (n * side**2 for n in config.tokens)
        whole = resized(pixels, *fitting(width, height, side, (least, most)), "bilinear")
        rounded = [max(config.patch_size, round(n / side) * side) for n in (width, height)]
        if rounded[0] * rounded[1] <= 2 * most:
            return ["<|image_start|>", whole, "<|image_end|>"]
        columns, rows = _grid(width, height)
        refined = padded(pixels, columns * TILE, rows * TILE, "bilinear")
        parts: list[str | Pixels] = ["<|image_start|>"]
        for y in range(rows):
            for x in range(columns):
                parts.append(f"<|img_row_{y + 1}_col_{x + 1}|>")
                parts.append(refined[y * TILE : (y + 1) * TILE, x * TILE : (x + 1) * TILE])
        return [*parts, "<|img_thumbnail|>", whole, "<|image_end|>"]


def _grid(width: int, height: int) -> tuple[int, int]:
    """Columns and rows whose proportions are nearest.

    Of equal ones, the most squares that the picture half fills.
    """
    one = np.float32
    sides = range(1, MAX_TILES + 1)
    grids = sorted(
        ((w, h) for w in sides for h in sides if 2 <= w * h <= MAX_TILES), key=lambda grid: grid[0] * grid[1]
    )
    best, nearest = (1, 1), one(np.inf)
    for w, h in grids:
        distance = abs(one(width) / one(height) - one(w) / one(h))
        if distance < nearest or (distance == nearest and width * height > TILE**2 * w * h / 2):
            best, nearest = (w, h), distance
    return best


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Lfm2Vision())
