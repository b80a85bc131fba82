"""Tiny mmproj files of a media encoder, and pictures for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf import GGMLQuantizationType as Type
from llamacli.gguf import Metadata
from llamacli.media.encoder import LoadedEncoder, MediaEncoder, Tile
from llamacli.media.pictures import Picture, Pixels
from llamacli.testing.models import random_tensor, write_gguf

Rows = npt.NDArray[np.float32]
Contents = tuple[dict[str, Any], dict[str, tuple[np.ndarray, Type]]]

VISION: Mapping[str, Any] = {
    "embedding_length": 48, "attention.head_count": 3, "feed_forward_length": 80, "block_count": 2, "image_size": 32,
    "patch_size": 8, "projection_dim": 64, "attention.layer_norm_epsilon": 1e-5, "projector.scale_factor": 2,
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7],
}  # fmt: skip
"""Keys of a tiny encoder, without `clip.vision.` in front."""

PICTURES: Mapping[str, tuple[int, int]] = {"wide": (61, 33), "tall": (30, 77), "square": (32, 32)}
"""Widths and heights of pictures of `drawn`."""

_FLOAT32 = ("v.patch_embd.weight", "v.patch_embd.weight.1", "v.position_embd.weight")
"""Matrices that llama.cpp's converter keeps in float32."""


def mmproj_contents(
    encoder: MediaEncoder,
    *,
    keys: Mapping[str, Any] | None = None,
    seed: str = "",
    gelu: bool = True,
    silu: bool | None = None,
    type: str = "F32",  # noqa: A002 - GGUF's word
    optional: bool = True,
    fused: bool = False,
    convolution: bool = True,
    without: Collection[str] = (),
) -> Contents:
    """Metadata and tensors of a random mmproj file.

    Shapes are those that llama.cpp's converter writes.

    - `keys` are added to `VISION`, both without `clip.vision.` in front; None leaves one out.
    - `gelu` and `silu` are `clip.use_gelu` and `clip.use_silu`; `type` is that of matrices.
    - With or without `optional` tensors; with `fused`, parameters are that may be; `without` are names to leave out.
    - `convolution`: the matrix of patches is stored as (n_embd, 3, height, width).

    Raises ModelFormatError if the encoder cannot be configured with these keys.
    """
    values = {**VISION, **(keys or {})}
    metadata = {
        "general.type": "mmproj", "general.name": f"tiny {seed}", "clip.has_vision_encoder": True,
        "clip.projector_type": encoder.name, "clip.use_gelu": gelu, "clip.use_silu": silu,
        **{f"clip.vision.{key}": value for key, value in values.items()},
    }  # fmt: skip
    metadata = {key: value for key, value in metadata.items() if value is not None}
    config = encoder.configure(Metadata({"general.architecture": "clip", **metadata}, "mmproj.gguf"))
    shapes = encoder.tensors(config).shapes(optional=optional, fused=fused)
    for i in range(config.n_layer, config.n_layer + config.n_unread):
        shapes |= {name.replace("blk.0", f"blk.{i}"): shape for name, shape in shapes.items() if "blk.0" in name}
    kept = dict.fromkeys(encoder.transposed, "F16") | dict.fromkeys(_FLOAT32, "F32")
    tensors = {}
    for name, shape in shapes.items():
        if name in without:
            continue
        array, stored = random_tensor(seed, name, shape, type if type == "F32" else kept.get(name, type))
        if name in encoder.transposed:
            array = np.ascontiguousarray(array.T)
        if convolution and name.startswith("v.patch_embd.weight"):
            array = array.reshape(len(array), 3, config.patch_size, config.patch_size)
        if name == "v.position_embd.weight" and config.positions == "axes":
            array = array.reshape(2, -1, config.n_embd)
        tensors[name] = array, stored
    return metadata, tensors


def write_mmproj(path: Path, *, architecture: MediaEncoder, seed: str = "", **options: Any) -> Path:
    """Write a random mmproj file; see `mmproj_contents`. Returns its path."""
    write_gguf(path, "clip", *mmproj_contents(architecture, seed=seed or architecture.name, **options))
    return path


def drawn(width: int, height: int, seed: int = 0) -> Pixels:
    """Draw gradients, a disc and a little noise, uint8 [height, width, 3]."""
    y, x = np.mgrid[:height, :width].astype(np.float64)
    random = np.random.RandomState(seed)
    out = np.stack([255 * x / width, 255 * y / height, 127 + 100 * np.sin(x / 5 + y / 9 + seed)], -1)
    disc = (x - width / 2) ** 2 + (y - height / 3) ** 2 < (min(width, height) / 4) ** 2
    out[disc] = (230, 40, 60)
    return np.clip(out + random.randint(-9, 10, out.shape), 0, 255).astype(np.uint8)


def embeddings(loaded: LoadedEncoder, pictures: Iterable[Pixels]) -> Rows:
    """Embeddings of the tiles of pictures, float32 [n, width]."""
    parts = [part for picture in pictures for part in loaded.layout(Picture.of(picture))]
    return np.concatenate([loaded.encode(part) for part in parts if isinstance(part, Tile)])
