"""The types that keys and values are kept as, and how NumPy writes and reads them.

A part is what a page holds of one head: the keys or the values of PAGE cells. Floats lie in it as they are: keys with
the cells of each dimension side by side, [head_dim, PAGE], so that the scores of a query against a page need no sum
across lanes; values [PAGE, head_dim].

Integers lie in units of 16 dimensions, two of them to a block with scales of its own: GGML's 32, or what is left of a
smaller head. A block is the float16 scale of each cell, then the float16 offset of each where the type has one, then
its units. A unit is, where codes have 5 bits, a word for each cell with the highest bits of its 16 dimensions, then the
codes: of keys [16 dimensions, PAGE] bytes, of values [PAGE, 16 dimensions]. Codes of 4 bits share bytes: dimension i
has the lower half, i + 8 the upper one.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError

PAGE = 16
"""Cells of a page: one vector register's lanes."""

UNIT, BLOCK = 16, 32
"""Dimensions of a unit and of a block."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class CellType(Protocol):
    """One type of cache."""

    def part_bytes(self, head_dim: int) -> int:
        """Bytes of a part."""

    def write(self, parts: Bytes, lanes: slice, x: Floats, *, is_key: bool) -> None:
        """Put float32 [n, n_head, head_dim] into n cells of parts [n_head, part_bytes]."""

    def read(self, parts: Bytes, head_dim: int, *, is_key: bool) -> Floats:
        """All cells of parts, float32 [n_head, PAGE, head_dim]."""

    def copy(self, parts: Bytes, source: Bytes, lanes: slice, head_dim: int, *, is_key: bool) -> None:
        """Take cells over from the same places of other parts, bit by bit."""


@attrs.frozen
class FloatType(CellType):
    """Floats of one width. bfloat16, which NumPy has not, is the upper half of a float32, kept as an integer."""

    item: np.dtype[Any]

    @property
    def is_bf16(self) -> bool:
        """Whether it is bfloat16."""
        return self.item == np.uint16

    def part_bytes(self, head_dim: int) -> int:
        """See CellType."""
        return PAGE * head_dim * self.item.itemsize

    def write(self, parts: Bytes, lanes: slice, x: Floats, *, is_key: bool) -> None:
        """See CellType."""
        self._cells(parts, x.shape[-1], is_key)[:, lanes] = (_to_bf16(x) if self.is_bf16 else x).swapaxes(0, 1)

    def read(self, parts: Bytes, head_dim: int, *, is_key: bool) -> Floats:
        """See CellType."""
        cells = self._cells(parts, head_dim, is_key)
        if self.is_bf16:
            return (cells.astype(np.uint32) << 16).view(np.float32)
        return cells.astype(np.float32)

    def copy(self, parts: Bytes, source: Bytes, lanes: slice, head_dim: int, *, is_key: bool) -> None:
        """See CellType."""
        self._cells(parts, head_dim, is_key)[:, lanes] = self._cells(source, head_dim, is_key)[:, lanes]

    def _cells(self, parts: Bytes, head_dim: int, is_key: bool) -> npt.NDArray[Any]:
        """A view [n_head, PAGE, head_dim]."""
        stored = parts.view(self.item)
        if is_key:
            return stored.reshape(len(parts), head_dim, PAGE).swapaxes(1, 2)
        return stored.reshape(len(parts), PAGE, head_dim)


@attrs.frozen
class IntegerType(CellType):
    """Codes of some bits: number = scale * (code - bias) + offset, or scale * table[code].

    With `has_offset` the smallest number of a block has code 0 and the largest the last one; without, the number of
    largest magnitude is `extreme` times the scale.
    """

    bits: int
    bias: int = 0
    extreme: int = 0
    has_offset: bool = False
    table: tuple[int, ...] = ()

    @property
    def last_code(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    @property
    def header_bytes(self) -> int:
        """Bytes of a block's scales and offsets."""
        return 2 * PAGE * (1 + self.has_offset)

    @property
    def high_bytes(self) -> int:
        """Bytes of a unit's fifth bits."""
        return 2 * PAGE if self.bits == 5 else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.high_bytes + PAGE * (16 if self.bits == 8 else 8)

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.header_bytes + 2 * self.unit_bytes

    @property
    def midpoints(self) -> tuple[float, ...]:
        """Where the nearest entry of the table changes."""
        return tuple((low + high) / 2 for low, high in zip(self.table, self.table[1:], strict=False))

    def part_bytes(self, head_dim: int) -> int:
        """See CellType."""
        return -(-head_dim // BLOCK) * self.header_bytes + -(-head_dim // UNIT) * self.unit_bytes

    def write(self, parts: Bytes, lanes: slice, x: Floats, *, is_key: bool) -> None:
        """See CellType. The least squares of a table are GGML's, weighted with the square of each number."""
        for start in range(0, x.shape[-1], BLOCK):
            some = np.ascontiguousarray(x[..., start : start + BLOCK].swapaxes(0, 1))  # [n_head, n, dimensions]
            low, high = some.min(-1, keepdims=True), some.max(-1, keepdims=True)
            offset = low if self.has_offset else np.zeros_like(low)
            if self.has_offset:
                scale = (high - low) / np.float32(self.last_code)
            else:
                scale = np.where(-low >= high, low, high) / np.float32(self.extreme)
            inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
            steps = (some - offset) * inverse
            if self.table:
                codes = np.searchsorted(np.array(self.midpoints, np.float32), steps).astype(np.uint8)
                entries, weights = np.array(self.table, np.float64)[codes], np.square(some, dtype=np.float64)
                square = (weights * entries**2).sum(-1, keepdims=True)
                product = (weights * entries * some).sum(-1, keepdims=True)
                scale = np.divide(product, square, out=np.zeros_like(square), where=square > 0)
            else:
                codes = np.clip(np.floor(steps + np.float32(self.bias + 0.5)), 0, self.last_code).astype(np.uint8)
            block = start // BLOCK * self.block_bytes
            for i, field in enumerate([scale, offset][: 1 + self.has_offset]):
                words = parts[:, block + 2 * PAGE * i : block + 2 * PAGE * (i + 1)].view(np.float16)
                with np.errstate(over="ignore"):
                    words[:, lanes] = field[..., 0]
            for at in range(0, some.shape[-1], UNIT):
                unit = codes[..., at : at + UNIT]
                unit = np.pad(unit, ((0, 0), (0, 0), (0, UNIT - unit.shape[-1])))
                self._write_unit(parts, block + self.header_bytes + at // UNIT * self.unit_bytes, lanes, unit, is_key)

    def _write_unit(self, parts: Bytes, at: int, lanes: slice, codes: Bytes, is_key: bool) -> None:
        """Put codes [n_head, n, UNIT] into the unit at a byte of each part."""
        if self.bits == 5:
            bits = (codes >> 4).astype(np.uint16) << np.arange(UNIT, dtype=np.uint16)
            parts[:, at : at + 2 * PAGE].view(np.uint16)[:, lanes] = bits.sum(-1, dtype=np.uint16)
        packed = codes if self.bits == 8 else codes[..., :8] & 15 | codes[..., 8:] << 4
        self._codes(parts, at, is_key)[:, lanes] = packed

    def _codes(self, parts: Bytes, at: int, is_key: bool) -> Bytes:
        """The bytes of codes of a unit, a view [n_head, PAGE, 8 or 16]."""
        stored = parts[:, at + self.high_bytes : at + self.unit_bytes]
        if is_key:
            return stored.reshape(len(parts), -1, PAGE).swapaxes(1, 2)
        return stored.reshape(len(parts), PAGE, -1)

    def read(self, parts: Bytes, head_dim: int, *, is_key: bool) -> Floats:
        """See CellType."""
        out = np.empty((len(parts), PAGE, head_dim), np.float32)
        for start in range(0, head_dim, UNIT):
            block = start // BLOCK * self.block_bytes
            scale = parts[:, block : block + 2 * PAGE].view(np.float16).astype(np.float32)[..., None]
            at = block + self.header_bytes + start % BLOCK // UNIT * self.unit_bytes
            codes = self._codes(parts, at, is_key)
            if self.bits < 8:
                codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
            if self.bits == 5:
                high = parts[:, at : at + 2 * PAGE].view(np.uint16)[..., None]
                codes = codes | ((high >> np.arange(UNIT, dtype=np.uint16) & 1) << 4).astype(np.uint8)
            numbers = np.array(self.table, np.int32)[codes] if self.table else codes.astype(np.int32) - self.bias
            values = numbers.astype(np.float32) * scale
            if self.has_offset:
                words = parts[:, block + 2 * PAGE : block + 4 * PAGE]
                values += words.view(np.float16).astype(np.float32)[..., None]
            out[..., start : start + UNIT] = values[..., : head_dim - start]
        return out

    def copy(self, parts: Bytes, source: Bytes, lanes: slice, head_dim: int, *, is_key: bool) -> None:
        """See CellType."""
        for start in range(0, head_dim, UNIT):
            block = start // BLOCK * self.block_bytes
            at = block + self.header_bytes + start % BLOCK // UNIT * self.unit_bytes
            words = [block + 2 * PAGE * i for i in range(1 + self.has_offset)] + ([at] if self.high_bytes else [])
            for word in words:
                mine, theirs = (part[:, word : word + 2 * PAGE].view(np.uint16) for part in (parts, source))
                mine[:, lanes] = theirs[:, lanes]
            self._codes(parts, at, is_key)[:, lanes] = self._codes(source, at, is_key)[:, lanes]


IQ4_NL_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

KV_TYPES: dict[str, FloatType | IntegerType] = {
    "f32": FloatType(np.dtype(np.float32)),
    "f16": FloatType(np.dtype(np.float16)),
    "bf16": FloatType(np.dtype(np.uint16)),
    "q8_0": IntegerType(8, bias=128, extreme=-127),
    "q4_0": IntegerType(4, bias=8, extreme=-8),
    "q4_1": IntegerType(4, has_offset=True),
    "iq4_nl": IntegerType(4, extreme=-127, table=IQ4_NL_TABLE),
    "q5_0": IntegerType(5, bias=16, extreme=-16),
    "q5_1": IntegerType(5, has_offset=True),
}
"""The cache types by their GGML names."""


@attrs.frozen
class KVType:
    """The types of keys and of values, by their names."""

    k: str
    v: str

    @classmethod
    def of(cls, value: KVType | str | tuple[str, str]) -> KVType:
        """From one name for both, or a pair. Raises InvalidRequestError for an unknown one."""
        if isinstance(value, KVType):
            return value
        names = (value, value) if isinstance(value, str) else tuple(value) if isinstance(value, (tuple, list)) else ()
        if len(names) != 2 or any(name not in KV_TYPES for name in names):
            raise InvalidRequestError(f"kv_type {value!r} is not one of {', '.join(KV_TYPES)}, or a pair of them")
        return cls(*names)

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"{self.k}-{self.v}"


def _to_bf16(x: Floats) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | 64, rounded).astype(np.uint16)
