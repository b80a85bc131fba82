"""Pictures of SmolVLM, SmolVLM2, Idefics 3 and Granite-Docling.

Laurençon et al. 2024 (arXiv:2408.12637), Marafioti et al. 2025 (arXiv:2504.05299). A SigLIP encoder sees the whole
picture and tiles of it; a pixel shuffle and one matrix make few tokens of many patches.
"""

import math

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
    resized,
    vision_tensors,
    vision_tower,
)

LLAMACLI_API = 1


class Idefics3(MediaEncoder):
    """`clip.projector_type = idefics3`."""

    name = "idefics3"

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        return VisionConfig.from_gguf(metadata)

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of SigLIP and of the connector."""
        table = vision_tensors(config)
        table.add("mm.model.fc", config.n_embd_text, config.n_embd * config.n_merge**2)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x = vision_tower(g, config, weights)
        return g.linear(g.merge_rows(x, config.n_merge**2), weights.mm_model_fc)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """Tiles row by row, then the whole picture."""
        side = config.image_size
        whole, overview = self.refined(pixels, config)
        parts: list[str | Pixels] = []
        rows, columns = whole.shape[0] // side, whole.shape[1] // side
        for row in range(rows):
            for column in range(columns):
                parts.append(f"<fake_token_around_image><row_{row + 1}_col_{column + 1}>")
                parts.append(whole[row * side : (row + 1) * side, column * side : (column + 1) * side])
            parts.append("\n" if row < rows - 1 else "\n\n<fake_token_around_image><global-img>")
        return [*parts, overview, "<fake_token_around_image>"]

    def refined(self, pixels: Pixels, config: VisionConfig) -> tuple[Pixels, Pixels]:
        """The picture in sides of whole tiles, and in one tile.

        Files without a longest edge are of the time before llama.cpp had one: their pictures keep their size.
        """
        side, edge = config.image_size, config.longest_edge
        height, width = pixels.shape[:2]
        if not edge:
            rows, columns = (max(1, math.floor(n / side + 0.5)) for n in (height, width))
            whole = padded(pixels, columns * side, rows * side, "bicubic")
            return whole, resized(pixels, side, side, "bicubic")
        ratio = width / height
        wide = width >= height
        shorter = int(edge / ratio if wide else edge * ratio)
        shorter = max(1, shorter + shorter % 2)
        w, h = (edge, shorter) if wide else (shorter, edge)
        first = resized(pixels, w, h, "lanczos")
        whole = resized(first, -(-w // side) * side, -(-h // side) * side, "lanczos")
        return whole, resized(whole, side, side, "lanczos")


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Idefics3())
