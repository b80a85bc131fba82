"""Tiles and decoded files beside those of transformers' image processors."""

import importlib.util
from typing import Any

import numpy as np
import pytest

from llamacli.errors import MediaError
from llamacli.gguf import Metadata
from llamacli.media.pictures import Picture, Pixels
from llamacli.testing.tiny_media import drawn, mmproj_contents
from media_cases import CASES
from oracle.goldens import DIRECTORY
from oracle.preprocessing import tiles as tiles_of_transformers
from preprocessing_cases import FILES, PICTURES, PROCESSORS, TORCHVISION

GOLDEN = np.load(DIRECTORY / "preprocessing.npz")

DIFFERENT = {
    "gemma3": ("wide", "tall", "wide lines", "strip"),  # on black, where transformers stretches to a square
    "qwen2vl": ("wide", "tall"),  # proportions stay, and the rest is black, where transformers stretches
    "pixtral": ("wide", "tall", "point"),  # sizes are rounded, and have a least number of tokens
    "internvl": ("wide", "tall", "strip"),  # tiles are chosen by the pixels that are kept, not by proportions alone
    "llava": ("wide", "tall", "wide lines", "strip"),  # the margin is added after resizing, not before
    "llava tiles": ("small", "point"),  # one tile is enough for pictures that are no larger than it
    "gemma4v": tuple(PICTURES),  # sizes stay in the limits, where transformers fills the largest number of tokens
}
"""Pictures of which llama.cpp makes other tiles than transformers."""

LEVELS = {("idefics3", "tall"): 2}
"""Levels by which resizing differs; Pillow's order of rows and columns depends on its version and on the shape."""


def ours(case: str, picture: Pixels, **keys: Any) -> list[Pixels]:
    made = CASES[case]
    options = {name: value for name, value in made.options.items() if name not in ("swapped", "clamps")}
    metadata, _ = mmproj_contents(made.encoder, keys={**made.keys, **keys}, **options)
    config = made.encoder.configure(Metadata({"general.architecture": "clip", **metadata}, "mmproj.gguf"))
    return [part for part in made.encoder.layout(picture, config) if not isinstance(part, str)]


def theirs(case: str, name: str) -> tuple[list[tuple[int, ...]], list[Pixels]]:
    shapes, tiles, prefix = list[tuple[int, ...]](), list[Pixels](), f"{case} {name}"
    while f"{prefix} {len(shapes)} shape" in GOLDEN:
        tiles += [GOLDEN[key]] if (key := f"{prefix} {len(shapes)}") in GOLDEN else []
        shapes.append(tuple(GOLDEN[f"{key} shape"].tolist()))
    return (shapes, tiles[1:] + tiles[:1]) if case == "llava tiles" else (shapes, tiles)  # there the whole is first


def levels(tiles: list[Pixels], expected: list[Pixels]) -> int:
    return max(int(np.abs(a.astype(int) - b).max()) for a, b in zip(tiles, expected, strict=True))


@pytest.mark.parametrize("case", PROCESSORS)
@pytest.mark.parametrize("name", PICTURES)
def test_tiles_are_those_of_transformers(case: str, name: str) -> None:
    shapes, expected = theirs(case, name)
    try:
        tiles = ours(case, PICTURES[name]())
    except MediaError:
        assert name == "strip"
        return
    if not shapes:
        assert name == "strip"  # transformers refuses it
        return
    same = [tile.shape for tile in tiles] == shapes
    if name in DIFFERENT.get(case, ()):
        assert not same or levels(tiles, expected) > 2
    else:
        assert same
        assert levels(tiles, expected) <= LEVELS.get((case, name), 1)


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("transparent", "16 bits")])
def test_files_are_decoded_as_by_transformers(name: str) -> None:
    pixels = Picture.of(GOLDEN[f"file {name}"].tobytes()).pixels
    assert int(np.abs(pixels.astype(int) - GOLDEN[f"pixels {name}"]).max()) <= 1


def test_transparent_pictures_lie_on_white() -> None:
    """transformers drops the transparency, and shows colours that nobody sees."""
    pixels, dropped = Picture.of(GOLDEN["file transparent"].tobytes()).pixels, GOLDEN["pixels transparent"]
    assert (pixels[0, 0] == 255).all()
    assert int(np.abs(pixels[-1, -1].astype(int) - dropped[-1, -1]).max()) <= 1


def test_16_bits_keep_their_range() -> None:
    """Pillow cuts what is above 255, so that transformers sees white."""
    pixels, cut = Picture.of(GOLDEN["file 16 bits"].tobytes()).pixels, GOLDEN["pixels 16 bits"]
    assert len(np.unique(pixels)) > 200
    assert (cut.reshape(-1, 3)[2:] == 255).all()


TOO_LARGE = {"lfm2 even": (1060, 530), "lfm2 odd": (1100, 700), "gemma4uv even": (300, 300), "gemma4uv odd": (400, 300)}
"""Pictures beyond the largest number of tokens: of sides that keep their proportions, and of others."""


@pytest.mark.slow
@pytest.mark.parametrize("case", TORCHVISION)
def test_tiles_are_those_of_transformers_with_torchvision(case: str) -> None:
    """Of LFM2-VL all, of Gemma 4 those that fill all tokens.

    Where the proportions change llamacli and llama.cpp leave a margin, and transformers stretches.
    """
    if not all(map(importlib.util.find_spec, ("transformers", "torchvision"))):
        pytest.skip("needs transformers and torchvision")
    keys, names = ({}, PICTURES) if case == "lfm2" else ({"image_size": 2048}, ())
    pictures = [PICTURES[name]() for name in names] + [drawn(*TOO_LARGE[f"{case} even"])]
    for picture in pictures:
        tiles, expected = ours(case, picture, **keys), tiles_of_transformers(case, picture)
        assert levels(tiles, expected) <= 1
    odd = drawn(*TOO_LARGE[f"{case} odd"])
    tiles, expected = ours(case, odd, **keys), tiles_of_transformers(case, odd)
    assert [tile.shape for tile in tiles] == [tile.shape for tile in expected]
    assert (tiles[0][:, 0] == 0).all() or (tiles[0][0] == 0).all()
