"""Pictures of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen3.6.

Wang et al. 2024 (arXiv:2409.12191), Bai et al. 2025 (arXiv:2502.13923, arXiv:2511.21631). Pictures keep their
proportions; four neighbouring patches become one token, whose row and column are its positions in the language model.
"""

from llamacli.plugin import (
    Graph,
    MediaEncoder,
    Metadata,
    Pixels,
    Rope,
    TensorTable,
    Value,
    VisionConfig,
    Weights,
    fitting,
    hookimpl,
    mlp,
    padded,
    vision_layers,
    vision_tensors,
)

LLAMACLI_API = 1

WINDOW = 112
"""Side of a window of attention, in pixels; no file has a key of it."""


class Qwen2Vision(MediaEncoder):
    """`clip.projector_type = qwen2vl_merger`."""

    name = "qwen2vl_merger"
    has_grid = True

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        # The key of the width has that of the language model, in files of llama.cpp's converter.
        return self.read(metadata, n_ff=4 * metadata.get_int("clip.vision.embedding_length", minimum=1))

    def read(self, metadata: Metadata, **family: object) -> VisionConfig:
        """Read what all members of the family have."""
        return VisionConfig.from_gguf(
            metadata,
            n_merge=2,
            merge_key="spatial_merge_size",
            ropes=_ropes,
            **{"tokens": (8, 4096), "n_frames": 2, "positions": "", **family},
        )

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of the transformer and of the merger."""
        table, width = vision_tensors(config), config.n_embd * config.n_merge**2
        table.add("mm.0", width, width, bias=True)
        table.add("mm.2", config.n_embd_text, width, bias=True)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x = g.merge_rows(vision_layers(g, config, weights)[-1], config.n_merge**2)
        return mlp(g, x, weights.mm_0, weights.mm_2)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """The picture, between its two tokens."""
        side, (height, width, _) = config.patch_size * config.n_merge, pixels.shape
        least, most = (n * side**2 for n in config.tokens)
        size = fitting(width, height, side, (least, most))
        return ["<|vision_start|>", padded(pixels, *size, "bicubic"), "<|vision_end|>"]


class Qwen25Vision(Qwen2Vision):
    """`clip.projector_type = qwen2.5vl_merger`: windows, RMSNorm, gated networks."""

    name = "qwen2.5vl_merger"

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        pattern = metadata.get_int("clip.vision.n_wa_pattern", minimum=0, maximum=1 << 10)
        return self.read(metadata, rms=True, gated=True, full_attention=pattern)

    def windows(self, rows: int, columns: int, config: VisionConfig) -> list[list[int]]:
        """Squares of tokens, those at the right and lower edges cut."""
        side = max(1, WINDOW // config.patch_size // config.n_merge)
        squares = [(y, x) for y in range(0, rows, side) for x in range(0, columns, side)]
        return [
            [row * columns + i for row in range(y, min(y + side, rows)) for i in range(x, min(x + side, columns))]
            for y, x in squares
        ]


class Qwen3Vision(Qwen2Vision):
    """`clip.projector_type = qwen3vl_merger`: learned positions, deepstack."""

    name = "qwen3vl_merger"

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        key = "clip.vision.is_deepstack_layers"
        n_layer = metadata.get_int("clip.vision.block_count", minimum=1, maximum=1 << 10)
        flags = metadata.get_bools(key, n_layer) if key in metadata else ()
        return self.read(metadata, positions="corners", deepstack=tuple(i for i, flag in enumerate(flags) if flag))

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of the transformer, of the merger, and of those of deepstack."""
        table, width = super().tensors(config), config.n_embd * config.n_merge**2
        for i in config.deepstack:
            table.add(f"v.deepstack.{i}.norm", width, bias=True)
            table.add(f"v.deepstack.{i}.fc1", width, width, bias=True)
            table.add(f"v.deepstack.{i}.fc2", config.n_embd_text, width, bias=True)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings, with those of deepstack beside them."""
        layers = vision_layers(g, config, weights)
        x, *stacked = (g.merge_rows(layers[i], config.n_merge**2) for i in (-1, *config.deepstack))
        out = mlp(g, x, weights.mm_0, weights.mm_2)
        for i, hidden in zip(config.deepstack, stacked, strict=True):
            norm, up, down = (getattr(weights, f"v_deepstack_{i}_{name}") for name in ("norm", "fc1", "fc2"))
            out = g.concat(out, mlp(g, g.layer_norm(hidden, norm, config.layer_norm_eps), up, down))
        return out


def _ropes(head_dim: int) -> tuple[Rope, ...]:
    components = (1,) * (head_dim // 4) + (2,) * (head_dim // 4)
    return (Rope(head_dim, interleaved=False, components=components, axial=True),)


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoders."""
    for encoder in (Qwen2Vision, Qwen25Vision, Qwen3Vision):
        register(encoder())
