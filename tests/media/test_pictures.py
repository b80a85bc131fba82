"""Decoding of pictures within limits, resizing, and patches."""

import contextlib
import io
import logging
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llamacli import MediaError
from llamacli.media.pictures import MAX_BYTES, MAX_PIXELS, Picture, padded, resized, unfolded
from llamacli.testing.tiny_media import drawn


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


PIXELS = drawn(23, 17)


class TestSources:
    def test_all_kinds_have_the_same_pixels(self, tmp_path: Path) -> None:
        image = Image.fromarray(PIXELS)
        path = tmp_path / "a.png"
        path.write_bytes(encoded(image))
        for given in (path, str(path), path.read_bytes(), image, PIXELS, Picture.of(PIXELS)):
            picture = Picture.of(given)
            np.testing.assert_array_equal(picture.pixels, PIXELS)
            np.testing.assert_array_equal(Picture.of(picture.source).pixels, PIXELS)
            assert picture.size == (23, 17)

    def test_grey_and_transparent_arrays(self) -> None:
        grey = PIXELS[..., 0]
        np.testing.assert_array_equal(Picture.of(grey).pixels, np.repeat(grey[..., None], 3, 2))
        clear = np.dstack([PIXELS, np.zeros(PIXELS.shape[:2], np.uint8)])
        assert (Picture.of(clear).pixels == 255).all()

    @pytest.mark.parametrize("given", [None, 5, PIXELS.astype(np.float32), PIXELS[..., :2], np.zeros((0, 4), np.uint8)])
    def test_anything_else_is_refused(self, given: object) -> None:
        with pytest.raises(MediaError, match=r"array|a picture is a path"):
            Picture.of(given)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(MediaError, match=r"nothing\.png: no such file"):
            Picture.of(tmp_path / "nothing.png")
        with pytest.raises(MediaError, match="not a file"):
            Picture.of(tmp_path)

    def test_without_pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(MediaError, match=r"pip install pillow"):
            Picture.of(PIXELS)


class TestModes:
    def test_exif_orientation_is_applied(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by 90 degrees
        turned = Picture.of(encoded(Image.fromarray(PIXELS), exif=exif.tobytes()))
        np.testing.assert_array_equal(turned.pixels, np.rot90(PIXELS, -1))

    def test_sixteen_bits(self) -> None:
        values = np.linspace(0, 65535, 12).astype(np.uint16).reshape(3, 4)
        pixels = Picture.of(encoded(Image.fromarray(values))).pixels
        np.testing.assert_array_equal(pixels[..., 1], values >> 8)

    def test_floats_are_refused(self) -> None:
        with pytest.raises(MediaError, match="mode F"):
            Picture.of(Image.fromarray(np.ones((2, 2), np.float32)))

    @pytest.mark.parametrize("mode", ["CMYK", "L", "P", "1", "YCbCr"])
    def test_other_colours_are_those_of_pillow(self, mode: str) -> None:
        image = Image.fromarray(PIXELS).convert(mode)
        np.testing.assert_array_equal(Picture.of(image).pixels, np.asarray(image.convert("RGB")))

    def test_a_palette_with_a_transparent_colour(self) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([10, 20, 30, 40, 50, 60])
        image.putpixel((1, 0), 1)
        pixels = Picture.of(encoded(image, transparency=0)).pixels
        assert pixels.tolist() == [[[255, 255, 255], [40, 50, 60]]]

    def test_the_first_of_several_frames(self, caplog: pytest.LogCaptureFixture) -> None:
        frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
        with caplog.at_level(logging.WARNING):
            picture = Picture.of(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
        assert picture.pixels[0, 0].tolist() == [255, 0, 0]
        assert "several frames: the first one is taken" in caplog.text


class TestDamage:
    def test_text_is_no_picture(self) -> None:
        with pytest.raises(MediaError, match=r"the picture is no picture of a known type$"):
            Picture.of(b"hello")

    def test_later_frames_are_not_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from PIL.GifImagePlugin import GifImageFile

        frames = [Image.new("L", (4, 4), i % 256) for i in range(500)]
        data, sought, seek = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), [], GifImageFile._seek
        monkeypatch.setattr(GifImageFile, "_seek", lambda self, n, *rest: sought.append(n) or seek(self, n, *rest))
        assert (Picture.of(data).pixels == 0).all()
        assert max(sought) <= 1

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
    def test_a_file_cut_anywhere(self, kind: str) -> None:
        whole = encoded(Image.fromarray(PIXELS), kind)
        for stop in range(0, len(whole) - 40, max(1, len(whole) // 40)):
            with pytest.raises(MediaError):
                Picture.of(whole[:stop])

    def test_flipped_bytes_raise_nothing_else(self) -> None:
        random = np.random.RandomState(1)
        for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
            whole = np.frombuffer(encoded(Image.fromarray(PIXELS), kind), np.uint8)
            for _ in range(60):
                broken = whole.copy()
                broken[random.randint(0, len(whole), 3)] = random.randint(0, 256, 3)
                with contextlib.suppress(MediaError):
                    assert Picture.of(broken.tobytes()).pixels.dtype == np.uint8

    @pytest.mark.parametrize("side", [1 << 13 | 1, 1 << 16])
    def test_a_bomb_is_refused_before_it_is_decoded(self, side: int) -> None:
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        chunk = b"IHDR" + header
        bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
        bomb += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
        with pytest.raises(MediaError, match=f"more than (the )?{MAX_PIXELS}"):
            Picture.of(bomb)

    def test_a_file_that_is_too_large(self, tmp_path: Path) -> None:
        path = tmp_path / "large.png"
        path.write_bytes(bytes(MAX_BYTES + 1))
        for given in (path, path.read_bytes()):
            with pytest.raises(MediaError, match=f"more than the {MAX_BYTES}"):
                Picture.of(given)


class TestResizing:
    def test_equal_sizes_are_unchanged(self) -> None:
        assert resized(PIXELS, 23, 17, "bicubic") is PIXELS
        assert padded(PIXELS, 23, 17, "bicubic") is PIXELS

    @pytest.mark.parametrize("method", ["bilinear", "bicubic", "lanczos"])
    def test_within_one_level_of_pillow(self, method: str) -> None:
        for width, height in ((9, 40), (40, 9), (23, 8), (64, 64)):
            theirs = np.asarray(Image.fromarray(PIXELS).resize((width, height), Image.Resampling[method.upper()]))
            assert np.abs(resized(PIXELS, width, height, method).astype(int) - theirs).max() <= 2

    def test_padding_is_black_and_centred(self) -> None:
        out = padded(np.full((10, 40, 3), 200, np.uint8), 20, 20, "bilinear")
        assert (out[:7] == 0).all()
        assert (out[7:12] == 200).all()
        assert (out[12:] == 0).all()


def test_patches_are_groups_of_neighbours() -> None:
    pixels = np.arange(8 * 12 * 3).reshape(8, 12, 3).astype(np.uint8)
    patches, numbers = unfolded(pixels, 2, 2, (0.0, 0.5, 0.0), (1.0, 1.0, 2.0))
    assert patches.shape == (24, 12)
    assert numbers[:8].tolist() == [0, 1, 6, 7, 2, 3, 8, 9]
    for patch, number in zip(patches, numbers.tolist(), strict=True):
        y, x = divmod(number, 6)
        square = pixels[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(np.float64) / 255
        expected = [square[..., 0], square[..., 1] - 0.5, square[..., 2] / 2]
        np.testing.assert_allclose(patch, np.ravel(expected), atol=1e-6)
