"""Packed matrix, as matrix kernels read it."""

from __future__ import annotations

from enum import IntEnum

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels.packing_formats import Packing


@attrs.frozen(eq=False)
class Matrix:
    """Packed matrix, or stack of one matrix an expert.

    `packed` is uint8 [n_group, n_tiles, n_blocks, block bytes] of type `kind`. `shape` is that of one matrix, (n_out,
    n_in), without padding; `packing` is how `packed` is laid out.
    """

    kind: IntEnum
    packed: npt.NDArray[np.uint8]
    shape: tuple[int, int]
    packing: Packing
