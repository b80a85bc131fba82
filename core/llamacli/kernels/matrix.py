"""Packed matrix, as matrix kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels.packing_formats import Packing


class Stack(Protocol):
    """Stack of matrices that lies on disk, or a matrix."""

    def fetch(self, numbers: Sequence[int]) -> None:
        """Read some matrices ahead, and check new ones."""


@attrs.frozen(eq=False)
class Matrix:
    """Packed matrix, or stack of one matrix an expert.

    `packed` is uint8 [n_group, n_tiles, n_blocks, block bytes] of type `kind`. `shape` is that of one matrix, (n_out,
    n_in), without padding; `packing` is how `packed` is laid out. `stack` reads matrices of a mapped file,
    None elsewhere.
    """

    kind: IntEnum
    packed: npt.NDArray[np.uint8]
    shape: tuple[int, int]
    packing: Packing
    stack: Stack | None = None
