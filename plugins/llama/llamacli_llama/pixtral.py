"""Pictures of Pixtral, Mistral Small 3.1 and 3.2, and Ministral 3.

Agrawal et al. 2024 (arXiv:2410.07073). A transformer of the language model's kind, with RoPE of rows and columns, sees
pictures of any proportions; the embedding of `[IMG_BREAK]` stands between the rows of tokens. Mistral 3 merges patches.
"""

import attrs

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
    vision_tensors,
    vision_tower,
)

LLAMACLI_API = 1


class Pixtral(MediaEncoder):
    """`clip.projector_type = pixtral`."""

    name = "pixtral"
    row_break = "v.token_embd.img_break"

    def configure(self, metadata: Metadata) -> VisionConfig:
        """Read the hyperparameters."""
        return VisionConfig.from_gguf(
            metadata,
            merge_key="spatial_merge_size",
            tokens=(8, 1024),
            rms=True,
            gated=True,
            positions="",
            ropes=two_axes,
        )

    def tensors(self, config: VisionConfig) -> TensorTable:
        """Tensors of the transformer, of the patch merger and of the projector."""
        table = vision_tensors(config)
        table.add("mm.input_norm", config.n_embd, optional=True)
        table.add("mm.patch_merger", config.n_embd, config.n_embd * config.n_merge**2, optional=config.n_merge == 1)
        table.add("mm.1", config.n_embd_text, config.n_embd, bias=True)
        table.add("mm.2", config.n_embd_text, config.n_embd_text, bias=True)
        table.add_tensor(self.row_break, config.n_embd_text)
        return table

    def forward(self, g: Graph, config: VisionConfig, weights: Weights) -> Value:
        """Patches to embeddings."""
        x = vision_tower(g, config, weights)
        if weights.mm_patch_merger:
            x = g.rms_norm(x, weights.mm_input_norm, config.layer_norm_eps)
            x = g.merge_rows(x, config.n_merge**2, interleaved=True)
            x = g.linear(x, weights.mm_patch_merger)
        return mlp(g, x, weights.mm_1, weights.mm_2)

    def layout(self, pixels: Pixels, config: VisionConfig) -> list[str | Pixels]:
        """The picture, and the token behind it."""
        side, (height, width, _) = config.patch_size * config.n_merge, pixels.shape
        least, most = (n * side**2 for n in config.tokens)
        return [padded(pixels, *fitting(width, height, side, (least, most)), "bicubic"), "[IMG_END]"]


def two_axes(head_dim: int) -> tuple[Rope, ...]:
    """RoPE of rows and of columns, each on half a head.

    Each has every other frequency of the whole head.
    """
    half = head_dim // 2
    rows = Rope(half, interleaved=True, components=(1,) * (half // 2))
    return rows, attrs.evolve(rows, first=half, components=(2,) * (half // 2), freq_scale=rows.base ** (-2 / head_dim))


@hookimpl
def register_media(register):  # type: ignore[no-untyped-def]
    """Register the encoder."""
    register(Pixtral())
