"""Pictures, and image processors of transformers for tiny encoders."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from llamacli.testing.tiny_media import drawn


def lines(width: int, height: int) -> np.ndarray:
    """Draw black lines on white, uint8 [height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    ink = (x + 2 * y) % 17 < 2
    ink |= np.abs((x - width / 2) ** 2 + (y - height / 2) ** 2 - (height / 3) ** 2) < height
    return np.where(ink[..., None], 0, 255).repeat(3, -1).astype(np.uint8)


PICTURES: Mapping[str, Callable[[], np.ndarray]] = {
    "square": lambda: drawn(80, 80),
    "wide": lambda: drawn(161, 90),
    "tall": lambda: drawn(70, 150),
    "small": lambda: drawn(20, 20),
    "lines": lambda: lines(96, 96),
    "wide lines": lambda: lines(128, 64),
    "point": lambda: drawn(1, 1),
    "strip": lambda: drawn(1, 5000),
}


def _file(image: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _transparent() -> bytes:
    alpha = np.linspace(0, 255, 24 * 16).reshape(16, 24, 1).astype(np.uint8)
    return _file(Image.fromarray(np.concatenate([drawn(24, 16), alpha], -1)), "PNG")


def _sixteen_bits() -> bytes:
    return _file(Image.fromarray((np.arange(24 * 16).reshape(16, 24) * 170).astype(np.uint16)), "PNG")


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return _file(Image.fromarray(drawn(24, 16)), "JPEG", exif=exif, quality=95)


def _animated() -> bytes:
    frames = [Image.fromarray(drawn(24, 16, seed)) for seed in range(3)]
    return _file(frames[0], "GIF", save_all=True, append_images=frames[1:])


FILES: Mapping[str, Callable[[], bytes]] = {
    "grey": lambda: _file(Image.fromarray(drawn(24, 16)[..., 0]), "PNG"),
    "palette": lambda: _file(Image.fromarray(drawn(24, 16)).quantize(16), "PNG"),
    "cmyk": lambda: _file(Image.fromarray(drawn(24, 16)).convert("CMYK"), "JPEG", quality=95),
    "turned": _turned,
    "animated": _animated,
    "transparent": _transparent,
    "16 bits": _sixteen_bits,
}
"""Files of pictures."""

_IDEFICS = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
_SQUARE = {"height": 32, "width": 32}
_QWEN = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}

PROCESSORS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "idefics3": ("idefics3.image_processing_pil_idefics3", "Idefics3ImageProcessorPil", _IDEFICS),
    "gemma3": ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil", {"size": _SQUARE}),
    "qwen2vl": (
        "qwen2_vl.image_processing_pil_qwen2_vl",
        "Qwen2VLImageProcessorPil",
        _QWEN | {"size": {"shortest_edge": 8 * 16**2, "longest_edge": 4096 * 16**2}},
    ),
    "pixtral": (
        "pixtral.image_processing_pil_pixtral",
        "PixtralImageProcessorPil",
        {"patch_size": {"height": 4, "width": 4}, "size": {"longest_edge": 1024}},
    ),
    "internvl": (
        "got_ocr2.image_processing_pil_got_ocr2",
        "GotOcr2ImageProcessorPil",
        {"size": _SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
    ),
    "llava": (
        "llava.image_processing_pil_llava",
        "LlavaImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": _SQUARE, "do_pad": True},
    ),
    "llava tiles": (
        "llava_next.image_processing_pil_llava_next",
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 32},
            "crop_size": _SQUARE,
            "image_grid_pinpoints": [[64, 32], [32, 64], [64, 64], [32, 96], [96, 32]],
        },
    ),
    "gemma4v": (
        "gemma4.image_processing_pil_gemma4",
        "Gemma4ImageProcessorPil",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 1120},
    ),
}
"""Module, class and options by the case of `media_cases` whose encoder they are of."""

TORCHVISION: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("lfm2_vl.image_processing_lfm2_vl", "Lfm2VlImageProcessor", {}),
    "gemma4uv": (
        "gemma4_unified.image_processing_gemma4_unified",
        "Gemma4UnifiedImageProcessor",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 1120},
    ),
}
"""Those that need torchvision, whose tiles are too large for a golden."""
