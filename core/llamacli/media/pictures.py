"""Pictures: decoding by Pillow within limits, resizing, and patches.

Needs Pillow. Resizing is Pillow's, whose bits llama.cpp's own code reproduces.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import MediaError
from llamacli.media.files import data_of_base64, read_media

Pixels = npt.NDArray[np.uint8]
"""Pixels of a picture in RGB, uint8 [height, width, 3]."""

MAX_BYTES = 32 << 20
"""Largest file of a picture, in bytes."""

MAX_PIXELS = 1 << 26
"""Pixels of the largest picture that is decoded; a frame of it then takes 192 MiB."""

FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM", "TGA")
"""Types of files that are decoded, by Pillow's names; for EPS Pillow starts Ghostscript."""

MAX_SCANS = 200
"""Most scans of a JPEG: each is decoded over all pixels, and may have some 30 bytes of a file."""

_log = logging.getLogger(__name__)

_SCAN = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e]")


@attrs.frozen(eq=False)
class Picture:
    """A picture, decoded: `pixels`, uint8 [height, width, 3] in RGB.

    `source` is the content of its file, or a PNG of it.
    """

    pixels: Pixels
    source: bytes = attrs.field(repr=False)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, in pixels."""
        return self.pixels.shape[1], self.pixels.shape[0]

    @classmethod
    def of(cls, given: object) -> Picture:
        """Picture of a file, its bytes, a Pillow image or an array.

        Arrays are uint8, [h, w] grey, [h, w, 3] RGB or [h, w, 4] with transparency. Pictures are turned as their EXIF
        orientation says; what is transparent becomes white; of several frames the first is taken, and a warning in the
        log says so. Raises MediaError for a file that cannot be read or decoded, one beyond `MAX_BYTES` or
        `MAX_PIXELS`, and for anything else; naming Pillow if it is missing.
        """
        pillow = _pillow()
        if isinstance(given, Picture):
            return given
        if isinstance(given, np.ndarray):
            image = _image_of_array(pillow, given)
            return cls(_rgb(pillow, image, "the array"), _png(image))
        if isinstance(given, pillow.Image):
            _expect_size(given.size, "the image")
            return cls(_rgb(pillow, given, "the image"), _png(given))
        kinds = "a path, bytes, a Pillow image or an array"
        name, source = read_media(given, MAX_BYTES, "a picture", kinds)
        return cls(_decoded(pillow, source, name), source)


def resized(pixels: Pixels, width: int, height: int, method: str) -> Pixels:
    """Resize a picture by Pillow's `method`: "bilinear", "bicubic" or "lanczos".

    The rows first, then the columns: new versions of Pillow choose the order by the shape, which is a difference
    of one level.
    """
    pillow, (own_height, own_width) = _pillow(), pixels.shape[:2]
    for own, size in (((own_width, own_height), (width, own_height)), ((width, own_height), (width, height))):
        if own != size:
            image = pillow.fromarray(np.ascontiguousarray(pixels))
            pixels = np.asarray(image.resize(size, pillow.Resampling[method.upper()]))
    return pixels


def padded(pixels: Pixels, width: int, height: int, method: str, colour: tuple[int, int, int] = (0, 0, 0)) -> Pixels:
    """Resize a picture into a frame, centred on a colour.

    Its proportions stay; its sides are rounded up to pixels.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    own_height, own_width = pixels.shape[:2]
    one = np.float32
    ratio = min(one(width) / one(own_width), one(height) / one(own_height))
    w, h = (min(math.ceil(one(n) * ratio), most) for n, most in ((own_width, width), (own_height, height)))
    out = np.full((height, width, 3), colour, np.uint8)
    x, y = (width - w) // 2, (height - h) // 2
    out[y : y + h, x : x + w] = resized(pixels, w, h, method)
    return out


def tiled(pixels: Pixels, side: int, sizes: Sequence[tuple[int, int]]) -> list[Pixels]:
    """Tiles of a picture row by row, then the whole in one.

    A picture with a side longer than `side` is resized into the one of `sizes`, multiples of `side`, that keeps the
    most of its pixels, and of these leaves the least empty (LLaVA-NeXT, Liu et al. 2024).
    """
    whole, (height, width, _) = resized(pixels, side, side, "bicubic"), pixels.shape
    if width <= side and height <= side:
        return [whole]

    def kept(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(np.float32(size[0]) / np.float32(width), np.float32(size[1]) / np.float32(height))
        n_pixels = min(int(np.float32(width) * scale) * int(np.float32(height) * scale), width * height)
        return n_pixels, n_pixels - size[0] * size[1]

    w, h = max(sizes, key=kept)
    refined = padded(pixels, w, h, "bicubic")
    squares = [(y, x) for y in range(0, h, side) for x in range(0, w, side)]
    return [*(refined[y : y + side, x : x + side] for y, x in squares), whole]


def fitting(width: int, height: int, align: int, pixels: tuple[int, int]) -> tuple[int, int]:
    """Size near that of a picture, in multiples of `align`.

    Its width and height, with as many pixels as the two limits allow ("smart resize" in transformers). Raises
    MediaError for proportions with which no size does.
    """
    one = np.float32
    w, h = (max(align, math.floor(one(n) / one(align) + one(0.5)) * align) for n in (width, height))
    least, most = pixels
    if w * h > most:
        beta = np.sqrt(one(height) * one(width) / one(most))
        w, h = (max(align, math.floor(one(n) / beta / one(align)) * align) for n in (width, height))
    elif w * h < least:
        beta = np.sqrt(one(least) / (one(height) * one(width)))
        w, h = (math.ceil(one(n) * beta / one(align)) * align for n in (width, height))
    if w * h > most:
        raise MediaError(f"a picture of {width} x {height} pixels is too long: no size of its proportions fits")
    return w, h


def unfolded(
    pixels: Pixels, patch: int, merge: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Patches of a tile, with their numbers.

    The tile, uint8 [h, w, 3], has sides of whole groups of `merge` patches. Returns float32 [n, 3 * patch * patch], the
    colours one after another and normalised, in groups of merge * merge neighbours; and int32 [n], the number of each
    patch from left to right and from top to bottom.
    """
    colours = (pixels.astype(np.float32) / np.float32(255) - np.array(mean, np.float32)) / np.array(std, np.float32)
    rows, columns = (n // patch for n in pixels.shape[:2])
    grid = colours.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    numbers = np.arange(rows * columns, dtype=np.int32).reshape(rows // merge, merge, columns // merge, merge)
    patches = grid.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1)
    return np.ascontiguousarray(patches), np.ascontiguousarray(numbers.transpose(0, 2, 1, 3).reshape(-1))


def data_of_uri(uri: str) -> bytes:
    """Bytes of a data URI in base64.

    Raises MediaError for anything else, and for more than `MAX_BYTES`.
    """
    head, comma, _ = uri[:256].partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise MediaError(f"it is not a data URI such as data:image/png;base64,...: {uri[:32]!a}")
    return data_of_base64(uri[len(head) + 1 :], MAX_BYTES, "a picture", "its data URI")


def _pillow() -> ModuleType | Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MediaError(f"pictures need Pillow: pip install pillow ({error})") from error
    return Image


def _decoded(pillow: Any, source: bytes, name: str) -> Pixels:
    if (n_scans := sum(1 for _ in _SCAN.finditer(source))) > MAX_SCANS:
        raise MediaError(f"{name}: {n_scans} scans are more than the {MAX_SCANS} of a JPEG")
    pillow.init()
    formats = [kind for kind in FORMATS if kind in pillow.OPEN]  # of AVIF not all versions have the code
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow: its own, smaller limits, and odd metadata
            with pillow.open(io.BytesIO(source), formats=formats) as image:
                _expect_size(image.size, name)
                if getattr(image, "is_animated", False):
                    _log.warning("%s: %s has several frames: the first one is taken", name, image.format)
                    image.seek(0)
                return _rgb(pillow, image, name)
    except MediaError:
        raise
    except pillow.DecompressionBombError:
        raise MediaError(f"{name}: the picture has more than {MAX_PIXELS} pixels") from None
    except (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, LookupError, TypeError, RuntimeError) as error:
        text = " ".join(str(error).split())
        kind = "is no picture of a known type" if type(error).__name__ == "UnidentifiedImageError" else "is damaged"
        reason = "" if "cannot identify" in text else f": {text[:120]}"
        raise MediaError(f"{name} {kind}{reason}") from None


def _expect_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if not width * height:
        raise MediaError(f"{name}: a picture of {width} x {height} pixels is empty")
    if width * height > MAX_PIXELS:
        raise MediaError(f"{name}: {width} x {height} pixels are more than the {MAX_PIXELS} of a picture")


def _rgb(pillow: Any, image: Any, name: str) -> Pixels:
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "I":  # of 16 bits: Pillow would clip them
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 0xFFFF:
            raise MediaError(f"{name}: grey values from {grey.min()} to {grey.max()} are not of 16 bits")
        image = pillow.fromarray((grey >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise MediaError(f"{name}: pictures of floats, Pillow's mode F, have no range of brightness: give uint8")
    if image.mode in ("RGBA", "LA", "La", "PA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.array(image.convert("RGB"), np.uint8)


def _image_of_array(pillow: Any, array: npt.NDArray[Any]) -> Any:
    fits = array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)))
    if not fits:
        raise MediaError(
            f"an array of a picture is uint8 [h, w], [h, w, 3] or [h, w, 4], not {array.dtype} {list(array.shape)}"
        )
    _expect_size((array.shape[1], array.shape[0]), "the array")
    return pillow.fromarray(np.ascontiguousarray(array))


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    kept = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
    kept.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
