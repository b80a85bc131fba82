"""Pictures of Gemma 4.

Gemma Team 2026. A transformer of the language model's kind sees pictures of any proportions; columns and rows have
learned positions and RoPE. Average pooling makes one token of nine patches.
"""

import math

import attrs
import numpy as np

from llamacli.plugin import (
    Graph,
    MediaEncoder,
    MediaError,
    Metadata,
    ModelFile,
    Pixels,
    Rope,
    TensorTable,
    Value,
    VisionConfig,
    Weights,
    bounded,
    fitting,
    hookimpl,
    padded,
    vision_tensors,
    vision_tower,
)

LLAMACLI_API = 1

TOKENS = (70, 1120)
"""Smallest and largest number of tokens of a picture."""

CAUSAL = (1536, 2560)
"""Widths of E2B and E4B, which attend to pictures in order."""

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Gemma4Vision(MediaEncoder):
    """`clip.projector_type = gemma4v`."""

    name = "gemma4v"
    is_bidirectional = True

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        config = VisionConfig.from_gguf(
            metadata,
            n_merge=3,
            ropes=_ropes,
            tokens=TOKENS,
            rms=True,
            gated=True,
            positions="axes",
            qk_norm="head",
            v_norm=True,
            post_norms=True,
            score_scale=1.0,
        )
        # The encoder sees 2 * colour - 1.
        mean = tuple(mean + std / 2 for mean, std in zip(config.mean, config.std, strict=True))
        return attrs.evolve(
            config,
            mean=mean,
            std=tuple(std / 2 for std in config.std),
            n_positions=config.image_size // config.patch_size,
            causal=config.n_embd_text in CAUSAL,
        )

    def configure_file(self, file: ModelFile) -> VisionConfig:
        """Read the hyperparameters, the number of positions and the bounds of matrices."""
        clamps = {}
        for name in file.tensors:
            stem = name.removesuffix("weight")
            if stem != name and all(f"{stem}{bound}" in file.tensors for bound in BOUNDS):
                a, b, c, d = (float(file.data(f"{stem}{bound}").view(np.float32)[0, 0]) for bound in BOUNDS)
                clamps[name] = (a, b, c, d)
        return attrs.evolve(with_positions(self.configure(file.metadata), file), clamps=clamps)

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of the transformer, of the pooling and of the projector."""
        table = vision_tensors(config)
        for name in config.clamps:
            for bound in BOUNDS:
                table.add_unused(name.removesuffix(".weight"), 1, kind=bound)
        table.add_tensor("v.std_bias", config.n_embd, optional=True)
        table.add_tensor("v.std_scale", config.n_embd, optional=True)
        table.add("mm.input_projection", config.n_embd_text, config.n_embd)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x = g.merge_rows(vision_tower(g, config, weights), config.n_merge**2, mean=True)
        x = g.scale(x, math.sqrt(config.n_embd))
        if weights.v_std_bias and weights.v_std_scale:
            x = g.mul(g.scale(g.add(g.scale(x, -1.0), weights.v_std_bias), -1.0), weights.v_std_scale)
        return bounded(g, config, g.rms_norm(x, None, config.layer_norm_eps), weights.mm_input_projection)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """The picture, between its two tokens."""
        return one_picture(pixels, config)


def with_positions(config: VisionConfig, file: ModelFile) -> VisionConfig:
    """Hyperparameters with the number of positions that a file has."""
    table = file.tensors.get("v.position_embd.weight")
    return attrs.evolve(config, n_positions=table.shape[0] // 2) if table else config


def one_picture(pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
    """A picture in its proportions, between its two tokens."""
    side, (height, width, _) = config.patch_size * config.n_merge, pixels.shape
    least, most = (n * side**2 for n in config.tokens)
    size = fitting(width, height, side, (least, most))
    if max(size) > config.n_positions * config.patch_size:
        raise MediaError(f"a picture of {width} x {height} pixels is too long: it has more patches than positions")
    return ["<|image>", padded(pixels, *size, "bicubic"), "<image|>"]


def _ropes(head_dim: int) -> tuple[Rope, ...]:
    half = head_dim // 2
    columns = Rope(half, interleaved=False, base=100.0, components=(2,) * (half // 2))
    return columns, attrs.evolve(columns, first=half, components=(1,) * (half // 2))


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Gemma4Vision())
