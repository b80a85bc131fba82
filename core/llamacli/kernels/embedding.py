"""Embedding look-up: rows of a packed matrix, dequantized to float32."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import ROW, RUN, record
from llamacli.kernels.packing_formats import ROWS, Block, FloatPacking, Packing
from llamacli.kernels.registry import packing_of
from llamacli.kernels.team import Team, run_kernel
from llamacli.kernels.work import share
from llamacli.quantization import TensorType

EMBED = record(
    "weight", "tile_bytes", "n_blocks", "out", "out_stride", "width", "placeholder", "copies", "ids", scale=np.float32
)
"""Row `token` of the matrix, times `scale`; row `ids[token]` (int32) where `ids` is not 0. For a row with `given`: that
row of embeddings if `copies`, else row `placeholder`, or zeros where that is negative. `width`: float32 numbers of
`out`."""


def look_up(
    team: Team, kind: IntEnum, packed: npt.NDArray[np.uint8], tokens: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Rows of a packed matrix, float32 [len(tokens), padded width]."""
    packing = packing_of(kind)
    assert packing, f"{kind.name} has no kernels"
    width = packed.shape[1] * packing.block
    rows, out = np.zeros(len(tokens), ROW), np.empty((len(tokens), width), np.float32)
    rows["token"] = tokens
    run_kernel(
        team, embedding(kind), EMBED, n_rows=len(rows), rows=rows, weight=packed, tile_bytes=packed[0].nbytes,
        n_blocks=packed.shape[1], out=out, out_stride=out.strides[0], width=width, scale=1,
    )  # fmt: skip
    return out


def embedding(kind: IntEnum) -> Kernel:
    """Kernel that looks up a token per row (unit) in packed weights."""
    packing = packing_of(kind)
    assert packing, f"{kind.name} has no kernels"
    return _embedding(packing)  # type: ignore[arg-type]  # mypy takes no protocol for hashable


@functools.cache
def _embedding(packing: Packing) -> Kernel:
    n_bytes, block, write = packing.n_bytes, packing.block, _block_writer(packing)

    def embedding(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, EMBED)[0], carray(simd.pointer(run), 1, RUN)[0]
        rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            token, out, given = rows[row].token, a.out + row * a.out_stride, rows[row].given
            if a.ids and not given:
                token = carray(simd.pointer(a.ids + 4 * token), 1, np.int32)[0]
            if given and not a.copies:
                token, given = a.placeholder, 0
            if given or token < 0:
                for i in range(0, 4 * a.width, 4):
                    simd.write_f32(out + i, simd.read_f32(given + i) if given else np.float32(0))
            else:
                tile, lane = a.weight + token // ROWS * a.tile_bytes, token % ROWS
                for i in range(a.n_blocks):
                    write(tile + i * n_bytes, lane, out + 4 * block * i, a.scale)

    return Kernel(embedding, f"_{packing.name}", __name__)


def _block_writer(packing: Packing) -> Any:
    """Intrinsic that writes one row of a block, times a scale."""

    @ir.expose(simd.void, simd.i64, simd.i64, simd.i64, simd.f32)
    def write(b: ir.Builder, address: ir.Value, lane: ir.Value, out: ir.Value, scale: ir.Value) -> None:
        if isinstance(packing, FloatPacking):
            _write_floats(b, packing, address, lane, out, scale)
        else:
            _write_integers(b, packing.load(b, address), b.trunc(lane, ir.I32), out, ir.splat(b, scale))

    return write


def _write_floats(
    b: ir.Builder, packing: FloatPacking, address: ir.Value, lane: ir.Value, out: ir.Value, scale: ir.Value
) -> None:
    size = packing.n_bytes // packing.block // ROWS
    adjacent = size * packing.adjacent
    place = b.add(address, b.mul(lane, ir.I64(adjacent)))
    for column in range(packing.block):
        at = ir.offset(b, place, column // packing.adjacent * ROWS * adjacent + column % packing.adjacent * size)
        ir.store(b, ir.offset(b, out, 4 * column), b.fmul(_number(b, packing.kind, at), scale))


def _number(b: ir.Builder, kind: TensorType, address: ir.Value) -> ir.Value:
    if kind is TensorType.F32:
        return ir.load(b, address, ir.F32)
    bits = ir.load(b, address, ir.I16)
    if kind is TensorType.F16:
        return b.fpext(b.bitcast(bits, ir.HALF), ir.F32)
    return b.bitcast(b.shl(b.zext(bits, ir.I32), ir.I32(16)), ir.F32)


def _write_integers(b: ir.Builder, block: Block, lane: ir.Value, out: ir.Value, scale: ir.Value) -> None:
    bias = 0 if block.bias_bits is None else 2**block.bias_bits
    for number, group in enumerate(block.groups):
        fours = ir.ir.Constant(ir.ir.VectorType(ir.I32, 8), ir.ir.Undefined)
        for i, codes in enumerate(group.codes):
            fours = b.insert_element(fours, b.extract_element(b.bitcast(codes, ir.I32X16), lane), ir.I32(i))
        both = b.bitcast(fours, ir.ir.VectorType(ir.I8, 32))
        for half in range(2):
            part = b.shuffle_vector(both, both, ir.lane_numbers(*range(16 * half, 16 * half + 16)))
            integers = b.sub(b.zext(part, ir.I32X16), ir.constant(ir.I32X16, bias))
            factor, shift = group.terms[half * len(group.terms) // 2]
            values = _scaled(b, block, ir.to_f32(b, integers), factor, shift, lane)
            ir.store(b, ir.offset(b, out, 128 * number + 64 * half), b.fmul(values, scale))


def _scaled(
    b: ir.Builder, block: Block, values: ir.Value, scale: ir.Value | None, shift: ir.Value | None, lane: ir.Value
) -> ir.Value:
    """Scaled numbers of the row in a lane, rounded as `Block` says."""

    def of_lane(vector: ir.Value) -> ir.Value:
        return ir.splat(b, b.extract_element(vector, lane))

    def product(x: ir.Value | None, y: ir.Value | None) -> ir.Value | None:
        return y if x is None else x if y is None else b.fmul(x, y)

    deferred = shift is not None and block.shift_factor is None  # the factor multiplies the shift too
    first = scale if deferred else product(block.factor, scale)
    if first is not None:
        values = b.fmul(values, of_lane(first))
    second = shift if deferred else product(block.shift_factor, shift)
    if second is not None:
        values = b.fadd(values, of_lane(second))
    if deferred and block.factor is not None:
        values = b.fmul(values, of_lane(block.factor))
    return values
