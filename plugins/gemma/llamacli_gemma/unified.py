"""Pictures of Gemma 4 without an encoder.

Gemma Team 2026. The language model sees the patches itself, of 48 x 48 pixels: each is normalised, projected, and gets
the learned positions of its column and row.
"""

from llamacli.plugin import (
    Graph,
    MediaEncoder,
    Metadata,
    ModelFile,
    Pixels,
    TensorTable,
    Value,
    VisionConfig,
    Weights,
    gelu,
    hookimpl,
)
from llamacli_gemma.vision import TOKENS, one_picture, with_positions

LLAMACLI_API = 1

NORM_EPS = 1e-5
"""Epsilon of the norms around the projection of patches, which no key tells."""


class Gemma4Unified(MediaEncoder):
    """`clip.projector_type = gemma4uv`."""

    name = "gemma4uv"
    is_bidirectional = True

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters; those of a transformer are 0 in files."""

        def count(key: str, maximum: int, **default: int) -> int:
            return metadata.get_int(f"clip.vision.{key}", minimum=1, maximum=maximum, **default)

        n_embd = count("embedding_length", 1 << 16)
        patch_size = count("patch_size", 1 << 10) * count("projector.scale_factor", 1 << 6, default=3)
        for key in ("attention.head_count", "block_count", "feed_forward_length"):
            metadata.get_int(f"clip.vision.{key}", 0, minimum=0, maximum=0)
        for key in ("gelu", "silu"):  # nothing is activated
            metadata.get_bool(f"clip.use_{key}", default=False)
        image_size = count("image_size", 1 << 14)
        return VisionConfig(
            n_embd=n_embd,
            n_layer=0,
            n_head=1,
            head_dim=n_embd,
            n_ff=0,
            layer_norm_eps=metadata.get_float("clip.vision.attention.layer_norm_epsilon", minimum=0.0, maximum=1.0),
            image_size=image_size,
            patch_size=patch_size,
            n_merge=1,
            n_embd_text=count("projection_dim", 1 << 20),
            mean=metadata.get_floats("clip.vision.image_mean", 3),
            std=metadata.get_floats("clip.vision.image_std", 3, minimum=1e-6),
            activation=gelu,
            tokens=TOKENS,
            positions="axes",
            n_positions=max(1, image_size // patch_size),
        )

    def configure_file(self, file: ModelFile) -> VisionConfig:
        """Read the hyperparameters, and the number of positions."""
        return with_positions(self.configure(file.metadata), file)

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of the projection, of its norms, and of the projector."""
        table, width = TensorTable(), 3 * config.patch_size**2
        table.add("v.patch_embd", config.n_embd, width, bias=True)
        table.add("v.position_embd", 2 * config.n_positions, config.n_embd)
        for i, size in enumerate((width, config.n_embd, config.n_embd), start=1):
            table.add(f"v.patch_norm.{i}", size, bias=True)
        table.add("mm.input_projection", config.n_embd_text, config.n_embd)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        w = weights
        x = g.layer_norm(g.patches(3 * config.patch_size**2), w.v_patch_norm_1, NORM_EPS)
        x = g.layer_norm(g.linear(x, w.v_patch_embd), w.v_patch_norm_2, NORM_EPS)
        x = g.layer_norm(x + g.axis_positions(w.v_position_embd), w.v_patch_norm_3, NORM_EPS)
        return g.linear(g.rms_norm(x, None, config.layer_norm_eps), w.mm_input_projection)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """The picture, between its two tokens."""
        return one_picture(pixels, config)


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Gemma4Unified())
