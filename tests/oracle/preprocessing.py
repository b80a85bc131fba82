"""Record tiles of transformers' image processors: `python -m oracle.preprocessing`.

Needs transformers and torch. The processors have the sizes of tiny encoders (`preprocessing_cases`), and neither
rescale nor normalise. A picture that a processor refuses has no arrays.
"""

from __future__ import annotations

import base64
import importlib
import math
import sys
import types
from typing import Any

import numpy as np

from oracle.goldens import DIRECTORY
from preprocessing_cases import FILES, PICTURES, PROCESSORS, TORCHVISION

MAX_SIZE = 50_000
"""Numbers of a tile of whose larger ones the shape alone is recorded."""
PATH = DIRECTORY / "preprocessing.npz"


def tiles(case: str, picture: np.ndarray) -> list[np.ndarray]:
    """Tiles of a processor, uint8 [height, width, 3], in its order."""
    from PIL import Image

    if case in TORCHVISION:
        # Its operators, which resizing does not need, are built for one version of torch.
        sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("_meta_registrations"))
    module, name, options = (PROCESSORS | TORCHVISION)[case]
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    found: Any = kind(do_rescale=False, do_normalize=False, **options)(Image.fromarray(picture), return_tensors=None)
    if "image_grid_thw" in found:
        return [_unfolded(np.asarray(found["pixel_values"]), np.asarray(found["image_grid_thw"])[0], options)]
    if "spatial_shapes" in found:
        shapes, patches = (np.asarray(found[key]) for key in ("spatial_shapes", "pixel_values"))
        places = [np.indices(shape[::-1]).transpose(2, 1, 0).reshape(-1, 2) for shape in shapes]
        return [_placed(some[: len(those)], those) for some, those in zip(patches, places, strict=True)]
    if "image_position_ids" in found:
        return [_placed(np.asarray(found["pixel_values"][0]), np.asarray(found["image_position_ids"][0]))]
    values = [np.asarray(value) for value in found["pixel_values"]]
    values = [tile for value in values for tile in (value if value.ndim == 4 else value[None])]
    return [np.rint(tile).astype(np.uint8).transpose(1, 2, 0) for tile in values]


def _unfolded(patches: np.ndarray, grid: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Picture of patches in groups of neighbours, each of two equal frames."""
    (_, rows, columns), side, merge = grid, options["patch_size"], options["merge_size"]
    shape = (rows // merge, columns // merge, merge, merge, 3, 2, side, side)
    folded = patches.reshape(shape)[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
    return np.rint(folded.reshape(rows * side, columns * side, 3)).astype(np.uint8)


def _placed(patches: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Picture of patches by their columns and rows; others fill up."""
    used = places[:, 0] >= 0
    side, (columns, rows) = math.isqrt(patches.shape[1] // 3), places[used].max(axis=0) + 1
    out = np.zeros((rows, side, columns, side, 3), np.uint8)
    for patch, (x, y) in zip(patches[used], places[used], strict=True):
        out[y, :, x] = np.rint(patch.reshape(side, side, 3))
    return out.reshape(rows * side, columns * side, 3)


def main() -> None:
    """Record all cases."""
    from transformers.image_utils import load_image

    arrays: dict[str, np.ndarray] = {}
    for name, make_file in FILES.items():
        source = make_file()
        arrays[f"file {name}"] = np.frombuffer(source, np.uint8)
        image = load_image(f"data:image/png;base64,{base64.b64encode(source).decode()}")
        arrays[f"pixels {name}"] = np.asarray(image.convert("RGB"))
    for case in PROCESSORS:
        for name, make in PICTURES.items():
            try:
                found = tiles(case, make())
            except ValueError as error:
                print(case, name, "refused:", error)
                continue
            for i, tile in enumerate(found):
                arrays[f"{case} {name} {i} shape"] = np.array(tile.shape)
                arrays |= {f"{case} {name} {i}": tile} if tile.size < MAX_SIZE else {}
    np.savez_compressed(PATH, **arrays)  # type: ignore[arg-type]  # it takes arrays by name


if __name__ == "__main__":
    main()
