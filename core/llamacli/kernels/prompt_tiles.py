"""Matrix products of prompts: integer weights decoded for AMX.

Some columns of two tiles of weights are decoded to bfloat16 once for all tokens of a chunk, and multiplied by two tiles
of tokens at a time. A weight is rounded to the nearest bfloat16, a tie away from 0, after one multiplication and
addition of float32; activations are rounded to the nearest bfloat16, a tie to even. Each token's sum runs along the
columns as `tiles` says, so that it depends on no other token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, types
from llamacli.kernels.layout import BLOCK_BYTES, LINEAR, RUN
from llamacli.kernels.packing_formats import ROWS, IntegerPacking, TiledPacking
from llamacli.kernels.tiles import LINE, TILE, TOKENS, emit_shapes, load_tile, release, store_tile, tile_instruction
from llamacli.kernels.work import part_of

CHUNK, _PANEL, _TILES = 512, 16, 16
"""Tokens, blocks of 32 columns and tiles of weights that share what is loaded."""

_ABREAST = 2
"""Tiles of weights, and of tokens, that are multiplied by one another."""

_PANEL_BYTES, _SUM_BYTES = _PANEL * TILE, LINE * CHUNK
"""Bytes of the decoded columns of a tile of weights, and of its sums."""

_WEIGHTS, _FACTORS = (4, 5), (6, 7)
"""Tiles of weights and of activations; sums have the first ones."""

_i64 = types.int64


def emit_decoded(b: ir.Builder, packing: IntegerPacking, weight: ir.Value, out: ir.Value, following: ir.Value) -> None:
    """Decode a block of weights to bfloat16, a tile for 32 columns.

    The block that `following` points to is prefetched.
    """
    ir.prefetch(b, following, packing.n_bytes)
    block = packing.load(b, weight)
    bias = ir.constant(ir.F32X16, 0 if block.bias_bits is None else -(2**block.bias_bits))
    for g, group in enumerate(block.groups):
        n = len(group.codes) // len(group.terms)
        for part, (scale, shift) in enumerate(group.terms):
            step = _product(b, block.factor, scale)
            start = ir.constant(ir.F32X16, 0.0)
            if shift is not None or block.shift_factor is not None:
                start = _product(b, block.factor if block.shift_factor is None else block.shift_factor, shift)
            if block.bias_bits is not None:
                start = ir.fma(b, step, bias, start)
            for i in range(part * n, (part + 1) * n):
                codes = b.bitcast(group.codes[i], ir.I32X16)
                columns = [_nearest(b, ir.fma(b, step, _column(b, codes, j), start)) for j in range(4)]
                for j in (0, 1):
                    even = b.lshr(columns[2 * j], ir.constant(ir.I32X16, 16))
                    odd = b.and_(columns[2 * j + 1], ir.constant(ir.I32X16, -65536))
                    ir.store(b, ir.offset(b, out, g * TILE + (2 * i + j) * LINE), b.or_(even, odd))
        ir.keep_order(b)


def _product(b: ir.Builder, x: ir.Value | None, y: ir.Value | None) -> ir.Value:
    """Product, where None means 1."""
    if x is None or y is None:
        return x or y or ir.constant(ir.F32X16, 1.0)
    return b.fmul(x, y)


def _column(b: ir.Builder, codes: ir.Value, j: int) -> ir.Value:
    """Byte j of each lane as float32."""
    byte = b.lshr(codes, ir.constant(ir.I32X16, 8 * j)) if j else codes
    return b.sitofp(byte if j == 3 else b.and_(byte, ir.constant(ir.I32X16, 255)), ir.F32X16)


def _nearest(b: ir.Builder, x: ir.Value) -> ir.Value:
    """The nearest bfloat16, in the upper half of each lane."""
    return b.add(b.bitcast(x, ir.I32X16), ir.constant(ir.I32X16, 0x8000))


def emit_product(
    b: ir.Builder, n_x: int, n_weights: int, panel: ir.Value, n_blocks: ir.Value, x: ir.Value, x_stride: ir.Value,
    sums: ir.Value, is_first: ir.Value,
) -> None:  # fmt: skip
    """Add the products of decoded weights with tiles of tokens.

    The sums begin with 0 if these are the first columns.
    """
    line, pairs = ir.I64(LINE), [(j, i) for j in range(n_x) for i in range(n_weights)]
    xs = [b.add(x, b.mul(x_stride, ir.I64(TOKENS * j))) for j in range(n_x)]
    places = [ir.offset(b, sums, i * _SUM_BYTES + j * TOKENS * LINE) for j, i in pairs]
    numbers = [_ABREAST * j + i for j, i in pairs]
    with b.if_else(b.icmp_signed("!=", is_first, ir.I64(0))) as (first, later):
        with first:
            for number in numbers:
                tile_instruction(b, "tilezero", number)
        with later:
            for number, place in zip(numbers, places, strict=True):
                load_tile(b, number, place, line)

    def body(k: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        weight = b.add(panel, b.mul(k, ir.I64(TILE)))
        at = b.mul(k, ir.I64(BLOCK_BYTES["bf16_pairs"]))
        for i in range(n_weights):
            load_tile(b, _WEIGHTS[i], ir.offset(b, weight, i * _PANEL_BYTES), line)
        for j, row in enumerate(xs):
            load_tile(b, _FACTORS[j], b.add(row, at), x_stride)
            for i in range(n_weights):
                tile_instruction(b, "tdpbf16ps", _ABREAST * j + i, _FACTORS[j], _WEIGHTS[i])
        return []

    ir.loop(b, n_blocks, [], body)
    for number, place in zip(numbers, places, strict=True):
        store_tile(b, number, place, line)


def _multiplier(n_x: int, n_weights: int) -> Any:
    def multiply(b: ir.Builder, panel: Any, n_blocks: Any, x: Any, x_stride: Any, sums: Any, is_first: Any) -> None:
        emit_product(b, n_x, n_weights, panel, n_blocks, x, x_stride, sums, is_first)

    return ir.expose(types.void, *[_i64] * 6)(multiply)


def _decoder(packing: IntegerPacking) -> Any:
    def decode(b: ir.Builder, weight: Any, out: Any, following: Any) -> None:
        emit_decoded(b, packing, weight, out, following)

    return ir.expose(types.void, _i64, _i64, _i64)(decode)


@ir.expose(types.void, _i64, _i64)
def shape_tiles(b: ir.Builder, first: ir.Value, second: ir.Value) -> None:
    """Set the numbers of tokens of the two tiles of activations."""
    rows = [b.trunc(n, ir.I8) for n in (first, second)]
    sums = [row for row in rows for _ in range(_ABREAST)]
    emit_shapes(b, [*sums, *[ir.I8(ROWS)] * len(_WEIGHTS), *rows])


@ir.expose(_i64)
def sums_memory(b: ir.Builder) -> ir.Value:
    """Memory on the stack for the sums of a chunk."""
    return ir.stack(b, _TILES * _SUM_BYTES)


@ir.expose(_i64)
def panel_memory(b: ir.Builder) -> ir.Value:
    """Memory on the stack for decoded weights."""
    return ir.stack(b, _ABREAST * _PANEL_BYTES)


def decoded_product(packing: TiledPacking) -> Callable[..., None]:
    """Function of a matrix product of decoded integers, to be compiled."""
    decode, n_bytes, groups = _decoder(packing.integers), packing.n_bytes, packing.integers.groups
    product_1_1, product_1_2, product_2_1, product_2_2 = (_multiplier(j, i) for j in (1, 2) for i in (1, 2))
    in_panel, pair = _PANEL // groups, 2 * TOKENS

    def linear(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, LINEAR)[0], carray(simd.pointer(run), 1, RUN)[0]
        ahead = _ABREAST * a.tile_bytes
        sums, panel, shape = sums_memory(), panel_memory(), 0
        for group in range(a.n_groups):
            row, end, first, last = part_of(a, r, group, thread, n_threads)
            while row < end and first < last:
                n = min(CHUNK, end - row)
                x = a.x + group * a.x_group + row * a.x_stride
                for t in range(first, last, _TILES):
                    n_tiles = min(_TILES, last - t)
                    for block in range(0, a.n_blocks, in_panel):
                        n_blocks = min(in_panel, a.n_blocks - block)
                        columns = x + block * groups * LINE
                        for i in range(0, n_tiles, _ABREAST):
                            n_abreast = min(_ABREAST, n_tiles - i)
                            for j in range(n_abreast):
                                weight = a.weight + (group * a.n_tiles + t + i + j) * a.tile_bytes
                                for k in range(n_blocks):
                                    at = weight + (block + k) * n_bytes
                                    decode(at, panel + j * _PANEL_BYTES + k * groups * TILE, at + ahead)
                            for token in range(0, n, pair):
                                rows = min(pair, n - token)
                                if shape != rows:
                                    shape_tiles(min(TOKENS, rows), max(0, rows - TOKENS))
                                    shape = rows
                                at, total = columns + token * a.x_stride, sums + i * _SUM_BYTES + token * LINE
                                count, begins = n_blocks * groups, block == 0
                                if rows > TOKENS:
                                    if n_abreast == _ABREAST:
                                        product_2_2(panel, count, at, a.x_stride, total, begins)
                                    else:
                                        product_2_1(panel, count, at, a.x_stride, total, begins)
                                elif n_abreast == _ABREAST:
                                    product_1_2(panel, count, at, a.x_stride, total, begins)
                                else:
                                    product_1_1(panel, count, at, a.x_stride, total, begins)
                    place = group * a.out_group + row * a.out_stride + 4 * ROWS * t
                    bias = a.bias + group * a.bias_stride + 4 * ROWS * t
                    for token in range(n):
                        to = place + token * a.out_stride
                        for i in range(n_tiles):
                            result = simd.load(sums + i * _SUM_BYTES + token * LINE)
                            result = simd.add(result, simd.load(bias + 4 * ROWS * i))
                            if a.residual:
                                result = simd.add(simd.load(a.residual + to + 4 * ROWS * i), result)
                            simd.store(a.out + to + 4 * ROWS * i, result)
                row += n
        if shape:
            release()

    return linear
