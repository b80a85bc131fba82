"""How weights lie in memory for the matrix kernels, one descriptor a format.

A matrix (n_out, n_in) is packed in tiles of 16 rows; a tile is a sequence of blocks along the columns. Within a
block, 16 rows lie side by side, one a vector lane, so that neither a matrix-vector nor a matrix-matrix product ever
sums across lanes. Rows and columns that do not fill a tile or a block are zero.

Formats of small integers are multiplied with activations in int8 (`ACTIVATION`). Their integers are kept unsigned,
biased where the format is signed, since the dot product of x86 multiplies unsigned by signed bytes; the bias is taken
out again by way of the sum of the activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels import ir
from llamacli.quantization import TensorType, dequantize

ROWS = 16

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

ACTIVATION_BLOCK = 32
ACTIVATION = np.dtype([("q", np.int8, ACTIVATION_BLOCK), ("scale", np.float32), ("minus_sum", np.int32)])
"""A block of 32 activations: integers q, so that x = scale * q, and minus their sum."""

_Q, _SCALE, _MINUS_SUM = (ACTIVATION.fields[name][1] for name in ("q", "scale", "minus_sum"))  # type: ignore[index]


@attrs.frozen
class Group:
    """32 columns of 16 rows in registers: 8 vectors of [16 rows][4 columns] unsigned bytes u.

    The weight is `scale * (u - 2^bias_bits)`, or without bias `scale * u + shift`; scale and shift are float32x16.
    """

    bytes: list[ir.Value]
    scale: ir.Value
    bias_bits: int | None = None
    shift: ir.Value | None = None


@attrs.frozen
class Packing:
    """A packed format.

    - `block`: columns a block; `n_bytes`: bytes of a block of 16 rows.
    - `pack`: the bytes of 16n rows in a file's format, uint8 [16n, row_bytes], to uint8 [n, n_blocks, n_bytes].
    - `unpack`: the inverse, for some rows: (packed, row numbers) to float32 [n_rows, n_columns], exact.
    - `load`: emits the loads of the block at an address: floats, one vector a column, or groups of 32 columns.
    - `integer`: whether products are taken with int8 activations.
    """

    block: int
    n_bytes: int
    integer: bool
    pack: Callable[[Bytes], Bytes]
    unpack: Callable[[Bytes, npt.NDArray[np.intp]], Floats]
    load: Callable[[ir.Builder, ir.Value], list[Group] | list[ir.Value]]


# --- floats: 4 columns a block, each [16 rows] -----------------------------------------------------------------------
_FLOAT_BLOCK = 4


def _pack_floats(raw: Bytes, item: type[np.generic]) -> Bytes:
    values = raw.view(item)
    n_rows, n_columns = values.shape
    values = np.pad(values, ((0, 0), (0, -n_columns % _FLOAT_BLOCK)))
    tiles = values.reshape(n_rows // ROWS, ROWS, -1, _FLOAT_BLOCK).transpose(0, 2, 3, 1)
    packed = np.ascontiguousarray(tiles)
    return packed.view(np.uint8).reshape(*packed.shape[:2], -1)


def _unpack_floats(packed: Bytes, rows: npt.NDArray[np.intp], kind: TensorType, item: type[np.generic]) -> Floats:
    tile, lane = np.divmod(rows, ROWS)
    values = packed.view(item).reshape(len(packed), -1, ROWS)[tile, :, lane]
    return dequantize(np.ascontiguousarray(values).view(np.uint8), kind)


def _float_packing(
    kind: TensorType, item: type[np.generic], load: Callable[[ir.Builder, ir.Value], ir.Value]
) -> Packing:
    size = np.dtype(item).itemsize

    def load_block(b: ir.Builder, address: ir.Value) -> list[ir.Value]:
        return [load(b, ir.offset(b, address, column * ROWS * size)) for column in range(_FLOAT_BLOCK)]

    return Packing(
        block=_FLOAT_BLOCK,
        n_bytes=_FLOAT_BLOCK * ROWS * size,
        integer=False,
        pack=functools.partial(_pack_floats, item=item),
        unpack=functools.partial(_unpack_floats, kind=kind, item=item),
        load=load_block,
    )


# --- integers: helpers -----------------------------------------------------------------------------------------------
def _interleave(columns: Bytes) -> Bytes:
    """[16n rows, n_blocks, 32] to [n, n_blocks, 8, 16 rows, 4], a vector of 64 bytes after another."""
    n_rows, n_blocks, _ = columns.shape
    return columns.reshape(n_rows // ROWS, ROWS, n_blocks, 8, 4).transpose(0, 2, 3, 1, 4)


def _lanes(values: npt.NDArray[np.generic]) -> Bytes:
    """[16n rows, n_blocks, k] to bytes [n, n_blocks, k * 16 * itemsize], each of the k as a vector of 16 rows."""
    n_rows, n_blocks = values.shape[:2]
    vectors = np.ascontiguousarray(values.reshape(n_rows // ROWS, ROWS, n_blocks, -1).transpose(0, 2, 3, 1))
    return vectors.view(np.uint8).reshape(n_rows // ROWS, n_blocks, -1)


def _nibbles(u: Bytes) -> Bytes:
    """[16n rows, n_blocks, 32] of 4 bits to [n, n_blocks, 256]: columns c and c + 16 share a byte."""
    vectors = _interleave(u)
    pairs = vectors[:, :, :4] | (vectors[:, :, 4:] << 4)
    return np.ascontiguousarray(pairs).reshape(*pairs.shape[:2], 256)


def _rows_of(
    field: Bytes, tile: npt.NDArray[np.intp], lane: npt.NDArray[np.intp], item: type
) -> npt.NDArray[np.generic]:
    """The entries of some rows from a field of vectors of 16: [n_rows, n_blocks, k]."""
    vectors = np.ascontiguousarray(field[tile]).view(item).reshape(len(tile), field.shape[1], -1, ROWS)
    return vectors[np.arange(len(tile)), :, :, lane]


def _bytes_of(field: Bytes, tile: npt.NDArray[np.intp], lane: npt.NDArray[np.intp]) -> Bytes:
    """Columns in order of some rows from a field of vectors [16 rows][4 columns]: [n_rows, n_blocks, columns]."""
    vectors = field[tile].reshape(len(tile), field.shape[1], -1, ROWS, 4)
    return vectors[np.arange(len(tile)), :, :, lane].reshape(len(tile), field.shape[1], -1)


def _load_bytes(b: ir.Builder, address: ir.Value, n: int) -> list[ir.Value]:
    return [ir.load(b, ir.offset(b, address, 64 * i), ir.I8X64) for i in range(n)]


def _load_nibbles(b: ir.Builder, address: ir.Value) -> list[ir.Value]:
    """8 vectors of values below 16 from 256 bytes."""
    packed = _load_bytes(b, address, 4)
    low = [b.and_(v, ir.constant(ir.I8X64, 15)) for v in packed]
    return low + [b.lshr(v, ir.constant(ir.I8X64, 4)) for v in packed]


# --- Q8_0 ------------------------------------------------------------------------------------------------------------
_Q8_0 = np.dtype([("d", np.float16), ("q", np.int8, 32)])


def _pack_q8_0(raw: Bytes) -> Bytes:
    blocks = raw.view(_Q8_0)
    u = _interleave(blocks["q"].view(np.uint8) ^ 0x80)
    return np.concatenate([u.reshape(*u.shape[:2], 512), _lanes(blocks["d"][..., None])], axis=2)


def _unpack_q8_0(packed: Bytes, rows: npt.NDArray[np.intp]) -> Floats:
    tile, lane = np.divmod(rows, ROWS)
    q = (_bytes_of(packed[..., :512], tile, lane) ^ 0x80).view(np.int8)
    d = _rows_of(packed[..., 512:], tile, lane, np.float16).astype(np.float32)
    return (q * d).reshape(len(rows), -1)


def _load_q8_0(b: ir.Builder, address: ir.Value) -> list[Group]:
    scale = ir.load_f16(b, ir.offset(b, address, 512))
    return [Group(_load_bytes(b, address, 8), scale, bias_bits=7)]


# --- Q4_0 ------------------------------------------------------------------------------------------------------------
_Q4_0 = np.dtype([("d", np.float16), ("q", np.uint8, 16)])


def _pack_q4_0(raw: Bytes) -> Bytes:
    blocks = raw.view(_Q4_0)
    u = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=2)
    return np.concatenate([_nibbles(u), _lanes(blocks["d"][..., None])], axis=2)


def _unpack_q4_0(packed: Bytes, rows: npt.NDArray[np.intp]) -> Floats:
    tile, lane = np.divmod(rows, ROWS)
    pairs = _bytes_of(packed[..., :256], tile, lane)
    q = np.concatenate([pairs & 15, pairs >> 4], axis=2).view(np.int8) - np.int8(8)
    d = _rows_of(packed[..., 256:], tile, lane, np.float16).astype(np.float32)
    return (q * d).reshape(len(rows), -1)


def _load_q4_0(b: ir.Builder, address: ir.Value) -> list[Group]:
    return [Group(_load_nibbles(b, address), ir.load_f16(b, ir.offset(b, address, 256)), bias_bits=3)]


PACKINGS: dict[TensorType, Packing] = {
    TensorType.F32: _float_packing(TensorType.F32, np.float32, lambda b, address: ir.load(b, address, ir.F32X16)),
    TensorType.F16: _float_packing(TensorType.F16, np.uint16, ir.load_f16),
    TensorType.BF16: _float_packing(TensorType.BF16, np.uint16, ir.load_bf16),
    TensorType.Q8_0: Packing(32, 544, True, _pack_q8_0, _unpack_q8_0, _load_q8_0),
    TensorType.Q4_0: Packing(32, 288, True, _pack_q4_0, _unpack_q4_0, _load_q4_0),
}
"""The formats that have kernels. Weights of any other are repacked to one of these."""
