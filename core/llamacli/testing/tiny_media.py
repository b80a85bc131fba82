"""Tiny mmproj files of a media encoder, and media for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gguf import GGMLQuantizationType as Type
from llamacli.gguf import Metadata
from llamacli.media.encoder import LoadedEncoder, MediaEncoder, Tile
from llamacli.media.pictures import Pixels
from llamacli.media.sound import SAMPLE_RATE, Samples, Sound
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

AUDIO: Mapping[str, Any] = {
    "embedding_length": 48, "attention.head_count": 3, "feed_forward_length": 64, "block_count": 2,
    "projection_dim": 64, "attention.layer_norm_epsilon": 1e-5, "num_mel_bins": 16,
}  # fmt: skip
"""Keys of a tiny encoder of sound, without `clip.audio.` in front."""

SOUNDS: Mapping[str, float] = {"short": 0.2, "seconds": 2.37}
"""Lengths of sounds of `tone` in seconds."""

_FLOAT32 = ("v.patch_embd.weight", "v.patch_embd.weight.1", "v.position_embd.weight")
"""Matrices that llama.cpp's converter keeps in float32."""

_CONVOLUTIONS = ("a.conv1d.", "a.conv2d.")
"""Beginnings of the names of convolutions of sound, over time, and over time and frequency."""


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
    fields: Mapping[str, Any] | None = None,
) -> Contents:
    """Metadata and tensors of a random mmproj file.

    Shapes are those that llama.cpp's converter writes.

    - `keys` are added to `VISION`, both without `clip.vision.` in front, or to `AUDIO`, without `clip.audio.`; None
      leaves one out.
    - `gelu` and `silu` are `clip.use_gelu` and `clip.use_silu` of pictures; `type` is that of matrices.
    - With or without `optional` tensors; with `fused`, parameters are that may be; `without` are names to leave out.
    - `convolution`: the matrix of patches is stored as (n_embd, 3, height, width).
    - `fields` are those of the configuration that only tensors tell.

    Raises ModelFormatError if the encoder cannot be configured with these keys.
    """
    hears = encoder.medium is Sound
    kind, own = ("audio", AUDIO) if hears else ("vision", VISION)
    activation = {} if hears else {"clip.use_gelu": gelu, "clip.use_silu": silu}
    metadata = {
        "general.type": "mmproj", "general.name": f"tiny {seed}", f"clip.has_{kind}_encoder": True,
        "clip.projector_type": encoder.name, **activation,
        **{f"clip.{kind}.{key}": value for key, value in {**own, **(keys or {})}.items()},
    }  # fmt: skip
    metadata = {key: value for key, value in metadata.items() if value is not None}
    config = encoder.configure(Metadata({"general.architecture": "clip", **metadata}, "mmproj.gguf"))
    config = attrs.evolve(config, **(fields or {}))
    shapes = encoder.tensors(config).shapes(optional=optional, fused=fused)
    for i in range(config.n_layer, config.n_layer + config.n_unread):
        shapes |= {name.replace("blk.0", f"blk.{i}"): shape for name, shape in shapes.items() if "blk.0" in name}
    kept = dict.fromkeys(encoder.transposed, "F16") | dict.fromkeys(_FLOAT32, "F32")
    tensors = {}
    for name, shape in shapes.items():
        if name in without:
            continue
        is_float = type == "F32" or name.startswith(_CONVOLUTIONS)
        array, stored = random_tensor(seed, name, shape, "F32" if is_float else kept.get(name, type))
        if name in encoder.transposed:
            array = np.ascontiguousarray(array.T)
        if convolution and name.startswith("v.patch_embd.weight"):
            array = array.reshape(len(array), 3, config.patch_size, config.patch_size)
        if name == "v.position_embd.weight" and config.positions == "axes":
            array = array.reshape(2, -1, config.n_embd)
        if name.startswith(_CONVOLUTIONS):
            taps = (3,) if name.startswith(_CONVOLUTIONS[0]) else (3, 3)
            array = array.reshape(len(array), *((-1, *taps) if array.ndim == 2 else (1,) * len(taps)))
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


def tone(seconds: float = 0.6, hertz: float = 440.0, rate: int = SAMPLE_RATE) -> Samples:
    """Make a growing tone with a little noise, float32 [n]."""
    n = int(seconds * rate)
    times = np.arange(n) / rate
    noise = np.random.RandomState(int(hertz)).standard_normal(n)
    return (0.5 * np.sin(2 * np.pi * hertz * times) * times / seconds + 0.01 * noise).astype(np.float32)


def made(size: tuple[int, int] | list[int] | float, seed: int = 0) -> Pixels | Samples:
    """Make a picture of a size, or sound of so many seconds.

    A size is the width and the height. The sound falls: llama.cpp has a frame behind the last one, which would be the
    loudest.
    """
    if not isinstance(size, float):
        width, height = size
        return drawn(width, height, seed)
    return np.ascontiguousarray(tone(size, 440.0 + 110 * seed)[::-1])


def sizes_of(encoder: MediaEncoder) -> Mapping[str, tuple[int, int]] | Mapping[str, float]:
    """Sizes of what an encoder reads, by name: `PICTURES` or `SOUNDS`."""
    return SOUNDS if encoder.medium is Sound else PICTURES


def embeddings(loaded: LoadedEncoder, contents: Iterable[Pixels | Samples]) -> Rows:
    """Embeddings of the tiles of pictures or sounds, float32 [n, width]."""
    parts = [part for content in contents for part in loaded.layout(loaded.medium.of(content))]
    return np.concatenate([loaded.encode(part) for part in parts if isinstance(part, Tile)])
