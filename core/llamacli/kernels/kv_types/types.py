"""KV cache types: memory layout and NumPy reference.

A part holds the keys or the values of one head in one page, that is of PAGE cells. Floats are stored as they are: keys
as [head_dim, PAGE], so that the scores of a query against a page need no sum across lanes; values as [PAGE, head_dim].

Integers are stored in units of 16 dimensions, two units to a block with its own scales: GGML's 32 dimensions, or the
rest of a smaller head. A block is the float16 scale of each cell, then the float16 offset of each cell if the type has
offsets, then its units. A unit of 5-bit codes begins with one 16-bit word a cell, the high bits of its 16 dimensions.
Codes follow in pairs, whose products one instruction adds up: keys as [8 pairs of dimensions, PAGE, 2] bytes, values as
[8 pairs of cells, 16 dimensions, 2]. 8-bit codes are signed there, less 128. 4-bit codes share bytes: dimension i is
the low half, dimension i + 8 the high half.

A block takes as many bytes as GGML's and has a smaller error. `rounding` quantizes it: heads are rotated by a Hadamard
matrix first, and so are queries and attention outputs. Keys of one head have a large common part (KIVI, Liu et al.
2024), so they are delta-coded: every key of a page but the first is stored minus the mean of earlier keys in the page.
Scores are linear in keys, so attention adds up scores of stored keys instead of rebuilding the keys.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.kernels.kv_types.rounding import BLOCK, Bytes, Floats, Rounding, Words, pairwise_sum, rotated
from llamacli.quantization.tensor_types import IQ4_NL_VALUES, from_bf16, to_bf16
from llamacli.util.settings import KVTypeName

PAGE = 16
"""Cells in a page: the lanes of one vector register."""

UNIT = 16
"""Dimensions in a unit."""

CODE_LAYOUT = "pairs"
"""Order of codes, for saved states: another order needs another name."""

MEAN_PREFIXES = (0, 1, 2, 4, 8, PAGE)
"""Keys MEAN_PREFIXES[i] to MEAN_PREFIXES[i + 1] - 1 of a page are stored minus the mean of its first
MEAN_PREFIXES[i] keys."""

MEAN_WEIGHTS = np.array([1, 1 / 2, *[1 / 4] * 2, *[1 / 8] * 4, *[0] * 8], np.float32)
"""Weights by which stored (delta-coded) keys sum to the prefix means: mean of n keys = sum of weight x stored key
over the first n cells."""


class CellType(Protocol):
    """Storage type of cached keys or values."""

    def part_bytes(self, head_dim: int) -> int:
        """Size of a part in bytes."""

    def write(self, parts: Bytes, lanes: slice, x: Floats, *, is_key: bool) -> None:
        """Write float32 [n, n_head, head_dim] into cells `lanes` of uint8 [n_head, part_bytes]."""

    def read(self, parts: Bytes, head_dim: int, *, is_key: bool) -> Floats:
        """Read all cells of parts, float32 [n_head, PAGE, head_dim]."""

    def copy(self, parts: Bytes, source: Bytes, lanes: slice, head_dim: int, *, is_key: bool) -> None:
        """Copy the cells `lanes` of other parts, bit for bit."""


@attrs.frozen
class FloatType(CellType):
    """Float type: f32, f16, or bf16.

    bf16 is stored as uint16, the upper half of a float32, since NumPy has no bfloat16.
    """

    item: np.dtype[Any]

    @property
    def is_bf16(self) -> bool:
        """True for bf16."""
        return self.item == np.uint16

    def part_bytes(self, head_dim: int) -> int:
        return PAGE * head_dim * self.item.itemsize

    def write(self, parts: Bytes, lanes: slice, x: Floats, *, is_key: bool) -> None:
        self._cells(parts, x.shape[-1], is_key)[:, lanes] = (to_bf16(x) if self.is_bf16 else x).swapaxes(0, 1)

    def read(self, parts: Bytes, head_dim: int, *, is_key: bool) -> Floats:
        cells = self._cells(parts, head_dim, is_key)
        if self.is_bf16:
            return from_bf16(cells)
        return cells.astype(np.float32)

    def copy(self, parts: Bytes, source: Bytes, lanes: slice, head_dim: int, *, is_key: bool) -> None:
        self._cells(parts, head_dim, is_key)[:, lanes] = self._cells(source, head_dim, is_key)[:, lanes]

    def _cells(self, parts: Bytes, head_dim: int, is_key: bool) -> npt.NDArray[Any]:
        """A view [n_head, PAGE, head_dim]."""
        stored = parts.view(self.item)
        if is_key:
            return stored.reshape(len(parts), head_dim, PAGE).swapaxes(1, 2)
        return stored.reshape(len(parts), PAGE, head_dim)


@attrs.frozen
class IntegerType(CellType):
    """Quantized type: codes of 4, 5 or 8 bits, scales by block."""

    rounding: Rounding

    @property
    def bits(self) -> int:
        """Bits per code."""
        return self.rounding.bits

    @property
    def header_bytes(self) -> int:
        """Size of a block's scales and offsets in bytes."""
        return 2 * PAGE * (1 + self.rounding.has_offset)

    @property
    def high_bytes(self) -> int:
        """Size of a unit's fifth bits in bytes."""
        return 2 * PAGE if self.bits == 5 else 0

    @property
    def unit_bytes(self) -> int:
        """Size of a unit in bytes."""
        return self.high_bytes + PAGE * (16 if self.bits == 8 else 8)

    @property
    def block_bytes(self) -> int:
        """Size of a whole block in bytes."""
        return self.header_bytes + 2 * self.unit_bytes

    def part_bytes(self, head_dim: int) -> int:
        return -(-head_dim // BLOCK) * self.header_bytes + -(-head_dim // UNIT) * self.unit_bytes

    @np.errstate(invalid="ignore", over="ignore")  # NaN and infinity stay non-finite
    def write(self, parts: Bytes, lanes: slice, x: Floats, *, is_key: bool) -> None:
        x = rotated(x.swapaxes(0, 1))  # [n_head, n, head_dim]
        if not is_key:
            self._write(parts, lanes, x, is_key)
            return
        for first, stop in itertools.pairwise(MEAN_PREFIXES):
            some = slice(max(first, lanes.start), min(stop, lanes.stop))
            if some.start < some.stop:
                new = x[:, some.start - lanes.start : some.stop - lanes.start]
                self._write(parts, some, new - self._prefix_mean(parts, first, x.shape[-1]), is_key)

    def _write(self, parts: Bytes, lanes: slice, x: Floats, is_key: bool) -> None:
        """Quantize [n_head, n, head_dim] into cells."""
        for start in range(0, x.shape[-1], BLOCK):
            codes, words = self.rounding.fit(x[..., start : start + BLOCK])
            for mine, word in zip(self._words(parts, start), words, strict=True):
                mine[:, lanes] = word[..., 0]
            for at in range(0, min(BLOCK, x.shape[-1] - start), UNIT):
                self._write_unit(parts, self._unit(start + at), lanes, codes[..., at : at + UNIT], is_key)

    def _words(self, parts: Bytes, dimension: int) -> list[Words]:
        """Scales and offsets of a dimension's block, views [n_head, PAGE]."""
        block = dimension // BLOCK * self.block_bytes
        return [
            parts[:, at : at + 2 * PAGE].view(np.uint16) for at in range(block, block + self.header_bytes, 2 * PAGE)
        ]

    def _unit(self, dimension: int) -> int:
        """Byte offset of the unit that holds a dimension."""
        block, within = divmod(dimension, BLOCK)
        return block * self.block_bytes + self.header_bytes + within // UNIT * self.unit_bytes

    def _write_unit(self, parts: Bytes, at: int, lanes: slice, codes: Bytes, is_key: bool) -> None:
        """Write codes [n_head, n, UNIT] into the unit at a byte offset."""
        if self.bits == 5:
            bits = (codes >> 4).astype(np.uint16) << np.arange(UNIT, dtype=np.uint16)
            parts[:, at : at + 2 * PAGE].view(np.uint16)[:, lanes] = bits.sum(-1, dtype=np.uint16)
        packed = codes ^ 128 if self.bits == 8 else codes[..., :8] & 15 | codes[..., 8:] << 4
        parts[:, self._places(at, is_key)[lanes]] = packed

    def _places(self, at: int, is_key: bool) -> npt.NDArray[np.intp]:
        """Byte offsets of a unit's codes, [PAGE, 8 or 16]."""
        n = UNIT if self.bits == 8 else UNIT // 2
        cell, dim = np.indices((PAGE, n))
        pair, rest, other, size = (dim, dim % 2, cell, PAGE) if is_key else (cell, cell % 2, dim, n)
        return at + self.high_bytes + (pair // 2 * size + other) * 2 + rest

    @np.errstate(invalid="ignore", over="ignore")
    def read(self, parts: Bytes, head_dim: int, *, is_key: bool) -> Floats:
        x = self._read(parts, head_dim, is_key)
        if is_key:
            means = [self._prefix_mean(parts, first, head_dim) for first in MEAN_PREFIXES[:-1]]
            for mean, (first, stop) in zip(means, itertools.pairwise(MEAN_PREFIXES), strict=True):
                x[:, first:stop] += mean
        return rotated(x)

    def _prefix_mean(self, parts: Bytes, n: int, head_dim: int) -> Floats:
        """Mean of a page's first n keys, [n_head, 1, head_dim], or 0."""
        cells = self._read(parts, head_dim, is_key=True).swapaxes(1, 2) * MEAN_WEIGHTS
        cells[..., n:] = 0
        return pairwise_sum(cells).swapaxes(1, 2)

    def _read(self, parts: Bytes, head_dim: int, is_key: bool) -> Floats:
        """Dequantized cells before the prefix means are added, float32 [n_head, PAGE, head_dim]."""
        out = np.empty((len(parts), PAGE, head_dim), np.float32)
        for start in range(0, head_dim, UNIT):
            at = self._unit(start)
            packed = parts[:, self._places(at, is_key)]
            codes = packed ^ np.uint8(128) if self.bits == 8 else np.concatenate([packed & 15, packed >> 4], axis=-1)
            if self.bits == 5:
                high = parts[:, at : at + 2 * PAGE].view(np.uint16)[..., None]
                codes = codes | ((high >> np.arange(UNIT, dtype=np.uint16) & 1) << 4).astype(np.uint8)
            values = self.rounding.values(codes, [words[..., None] for words in self._words(parts, start)])
            out[..., start : start + UNIT] = values[..., : head_dim - start]
        return out

    def copy(self, parts: Bytes, source: Bytes, lanes: slice, head_dim: int, *, is_key: bool) -> None:
        """See CellType.

        Copied keys decode to the same values only after the same earlier cells in the page.
        """
        for start in range(0, head_dim, UNIT):
            at = self._unit(start)
            for mine, theirs in zip(self._words(parts, start), self._words(source, start), strict=True):
                mine[:, lanes] = theirs[:, lanes]
            if self.high_bytes:
                mine, theirs = (part[:, at : at + 2 * PAGE].view(np.uint16) for part in (parts, source))
                mine[:, lanes] = theirs[:, lanes]
            places = self._places(at, is_key)[lanes]
            parts[:, places] = source[:, places]


KV_TYPES: dict[str, FloatType | IntegerType] = {
    KVTypeName.F32: FloatType(np.dtype(np.float32)),
    KVTypeName.F16: FloatType(np.dtype(np.float16)),
    KVTypeName.BF16: FloatType(np.dtype(np.uint16)),
    KVTypeName.Q8_0: IntegerType(Rounding(8, extremes=(-127,))),
    KVTypeName.Q4_0: IntegerType(Rounding(4, has_zero=True)),
    KVTypeName.Q4_1: IntegerType(Rounding(4, has_offset=True)),
    KVTypeName.IQ4_NL: IntegerType(Rounding(4, extremes=(-140, -125, -110, 110, 125, 140), table=IQ4_NL_VALUES)),
    KVTypeName.Q5_0: IntegerType(Rounding(5, has_zero=True)),
    KVTypeName.Q5_1: IntegerType(Rounding(5, has_offset=True)),
}
"""KV cache types by GGML name."""


@attrs.frozen
class KVType:
    """Types of cached keys and values (llama.cpp: -ctk, -ctv), by name."""

    k: str
    v: str

    @classmethod
    def of(cls, value: KVType | str | tuple[str, str]) -> KVType:
        """Parse a name for both, or a pair (k, v); raises InvalidRequestError."""
        if isinstance(value, KVType):
            return value
        names = (value, value) if isinstance(value, str) else tuple(value) if isinstance(value, (tuple, list)) else ()
        if len(names) != 2 or any(name not in KV_TYPES for name in names):
            raise InvalidRequestError(f"kv_type {value!r} is not one of {', '.join(KV_TYPES)}, or a pair of them")
        return cls(*names)

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"{self.k}-{self.v}"
