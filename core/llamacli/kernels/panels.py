"""Matrix products of float weights in panels of columns.

The weights of a panel are widened to float32 once for all tokens of a chunk, and then multiplied by register tiles, in
which nothing but multiplications is left. Sums are kept in memory from one panel to the next; their order is that of
a single token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, types
from llamacli.kernels.isa import AVX512, isa
from llamacli.kernels.layout import BLOCK_BYTES, LINEAR, RUN
from llamacli.kernels.packing_formats import ROWS, FloatPacking
from llamacli.kernels.work import part_of

_LINE = 64
"""Bytes of a column of weights in float32, or of two columns in bfloat16."""

_COLUMNS, _TILES, CHUNK = 256, 8, 192
"""Columns, tiles of weights and tokens of a panel, whose parts stay in the second-level cache."""

_WIDENED_BYTES, _SUM_BYTES = _COLUMNS * _LINE, _LINE * CHUNK
"""Bytes of a tile of widened weights, and of its sums."""

_TURN = 2
"""Blocks of a panel between prefetches, which among the multiplications would cost LLVM registers."""

_NARROW, _PAIR = 4, 2
"""Tokens of a register tile for those that are left."""

_i64 = types.int64


def _sizes() -> tuple[int, int]:
    """Tokens and tiles of weights of a register tile.

    AVX-512 has 32 registers: two tiles share what is loaded of a token. AVX2 has 16, two for a vector.
    """
    return (12, 2) if isa() in AVX512 else (6, 1)


def emit_widened(b: ir.Builder, packing: FloatPacking, weight: ir.Value, out: ir.Value) -> None:
    """Widen a block of weights to float32."""
    for i, columns in enumerate(packing.load(b, weight)):
        for place, column in enumerate(columns):
            ir.store(b, ir.offset(b, out, _LINE * (i * len(columns) + place)), column)


def emit_panel(
    b: ir.Builder, packing: FloatPacking, n_tokens: int, n_tiles: int, panel: ir.Value, stride: ir.Value,
    n_blocks: ir.Value, x: ir.Value, x_stride: ir.Value, sums: ir.Value, following: ir.Value, tile_bytes: ir.Value,
) -> None:  # fmt: skip
    """Add the products of a panel with n tokens.

    The panel's tiles of weights are `stride` bytes apart. Of adjacent columns, the last is the first to be added, as
    AVX512-BF16 does. The tiles of weights at `following`, `tile_bytes` apart, are prefetched.
    """
    in_pairs = packing.activation == "bf16_pairs"
    n = packing.block // packing.adjacent if in_pairs else packing.block
    adjacent = 1 if in_pairs else packing.adjacent
    order = [i + place for i in range(0, n, adjacent) for place in reversed(range(adjacent))]
    kind, broadcast = ir.F32X16, ir.broadcast_f32
    multiply: Callable[..., ir.Value] = ir.fma
    if in_pairs:
        kind, broadcast = ir.I32X16, ir.broadcast_i32

        def multiply_pairs(b: ir.Builder, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
            return ir.dot_bf16(b, total, x, y)

        multiply = multiply_pairs

    tiles = [b.add(panel, b.mul(stride, ir.I64(i))) for i in range(n_tiles)]
    rows = [b.add(x, b.mul(x_stride, ir.I64(token))) for token in range(n_tokens)]
    next_tiles = [b.add(following, b.mul(tile_bytes, ir.I64(i))) for i in range(n_tiles)]
    places = [ir.offset(b, sums, i * _SUM_BYTES + token * _LINE) for token in range(n_tokens) for i in range(n_tiles)]

    def body(k: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        column, at = b.mul(k, ir.I64(n * _LINE)), b.mul(k, ir.I64(4 * n))
        for i in order:
            weights = [ir.load(b, ir.offset(b, b.add(tile, column), _LINE * i), kind) for tile in tiles]
            for token, row in enumerate(rows):
                number = broadcast(b, ir.offset(b, b.add(row, at), 4 * i))
                for j, weight in enumerate(weights, start=token * n_tiles):
                    totals[j] = multiply(b, weight, number, totals[j])
        return totals

    def turn(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        first = b.mul(i, ir.I64(_TURN))
        for next_tile in next_tiles:
            ahead = b.add(next_tile, b.mul(first, ir.I64(packing.n_bytes)))
            ir.prefetch(b, ahead, _TURN * packing.n_bytes, level=2)
        left = b.sub(n_blocks, first)
        n_left = b.select(b.icmp_signed("<", left, ir.I64(_TURN)), left, ir.I64(_TURN))
        return ir.loop(b, n_left, totals, lambda k, totals: body(b.add(first, k), totals))

    n_turns = b.sdiv(b.add(n_blocks, ir.I64(_TURN - 1)), ir.I64(_TURN))
    totals = ir.loop(b, n_turns, [ir.load(b, place, ir.F32X16) for place in places], turn)
    for place, total in zip(places, totals, strict=True):
        ir.store(b, place, total)


def _panel(packing: FloatPacking, n_tokens: int, n_tiles: int) -> Any:
    def panel(
        b: ir.Builder, panel: Any, stride: Any, n_blocks: Any, x: Any, x_stride: Any, sums: Any, following: Any,
        tile_bytes: Any,
    ) -> None:  # fmt: skip
        emit_panel(b, packing, n_tokens, n_tiles, panel, stride, n_blocks, x, x_stride, sums, following, tile_bytes)

    return ir.expose(types.void, *[_i64] * 8)(panel)


def _widened(packing: FloatPacking) -> Any:
    def widened(b: ir.Builder, weight: Any, out: Any) -> None:
        emit_widened(b, packing, weight, out)

    return ir.expose(types.void, _i64, _i64)(widened)


@ir.expose(_i64)
def sums_memory(b: ir.Builder) -> ir.Value:
    """Memory on the stack for the sums of a chunk."""
    return ir.stack(b, _TILES * _SUM_BYTES)


@ir.expose(_i64)
def widened_memory(b: ir.Builder) -> ir.Value:
    """Memory on the stack for a panel of widened weights."""
    return ir.stack(b, 2 * _WIDENED_BYTES)


def panel_product(packing: FloatPacking, tile: Any) -> Callable[..., None]:
    """Function of a matrix product of floats, to be compiled.

    `tile` multiplies a whole tile of weights by fewer tokens than a register tile has.
    """
    wide, abreast = _sizes()
    panel_1, panel_2, widened = _panel(packing, wide, 1), _panel(packing, wide, abreast), _widened(packing)
    widens = packing.activation in ("f16", "bf16")
    n_bytes, in_panel = packing.n_bytes, _COLUMNS // packing.block
    x_bytes, column_bytes = BLOCK_BYTES[packing.activation] * packing.block // 32, _LINE * packing.block

    def linear(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, LINEAR)[0], carray(simd.pointer(run), 1, RUN)[0]
        ahead, x_stride, tile_bytes = r.ahead, a.x_stride, a.tile_bytes
        sums, scratch, zero = sums_memory(), widened_memory(), simd.splat(0)
        for group in range(a.n_groups):
            row, end, first, last = part_of(a, r, group, thread, n_threads)
            while row < end and first < last:
                n_chunks = (end - row + CHUNK - 1) // CHUNK
                n = min(end - row, ((end - row) // n_chunks + wide - 1) // wide * wide) if n_chunks > 1 else end - row
                whole = n // wide * wide
                x = a.x + group * a.x_group + row * x_stride
                for t in range(first, last, _TILES):
                    weight = a.weight + (group * a.n_tiles + t) * tile_bytes
                    n_tiles = min(_TILES, last - t)
                    place = group * a.out_group + row * a.out_stride + 4 * ROWS * t
                    bias = a.bias + group * a.bias_stride + 4 * ROWS * t
                    if whole:
                        for i in range(n_tiles):
                            for token in range(whole):
                                simd.store(sums + i * _SUM_BYTES + token * _LINE, zero)
                        for block in range(0, a.n_blocks, in_panel):
                            n_blocks = min(in_panel, a.n_blocks - block)
                            i = 0
                            while i < n_tiles:
                                n_abreast = min(abreast, n_tiles - i)
                                panel, stride = weight + i * tile_bytes + block * n_bytes, tile_bytes
                                following = panel + n_abreast * tile_bytes
                                if i + n_abreast == n_tiles:
                                    following = weight + (block + in_panel) * n_bytes
                                if widens:
                                    for j in range(n_abreast):
                                        for k in range(n_blocks):
                                            widened(
                                                panel + j * stride + k * n_bytes,
                                                scratch + j * _WIDENED_BYTES + k * column_bytes,
                                            )
                                    panel, stride = scratch, _WIDENED_BYTES
                                for token in range(0, whole, wide):
                                    at = x + token * x_stride + block * x_bytes
                                    sums_at = sums + i * _SUM_BYTES + token * _LINE
                                    if n_abreast == abreast:
                                        panel_2(panel, stride, n_blocks, at, x_stride, sums_at, following, tile_bytes)
                                    else:
                                        panel_1(panel, stride, n_blocks, at, x_stride, sums_at, following, tile_bytes)
                                i += n_abreast
                        for i in range(n_tiles):
                            biases = simd.load(bias + 4 * ROWS * i)
                            for token in range(whole):
                                total = simd.add(simd.load(sums + i * _SUM_BYTES + token * _LINE), biases)
                                to = place + token * a.out_stride + 4 * ROWS * i
                                if a.residual:
                                    total = simd.add(simd.load(a.residual + to), total)
                                simd.store(a.out + to, total)
                    for i in range(n_tiles):
                        token = whole
                        while token < n:
                            rest, to = n - token, place + token * a.out_stride + 4 * ROWS * i
                            out, residual = a.out + to, 0
                            if a.residual:
                                residual = a.residual + to
                            at, own, here = x + token * x_stride, bias + 4 * ROWS * i, weight + i * tile_bytes
                            if rest >= _NARROW:
                                tile(_NARROW, here, a.n_blocks, at, x_stride, out, a.out_stride, own, residual, ahead)
                                token += _NARROW
                            elif rest >= _PAIR:
                                tile(_PAIR, here, a.n_blocks, at, x_stride, out, a.out_stride, own, residual, ahead)
                                token += _PAIR
                            else:
                                tile(1, here, a.n_blocks, at, x_stride, out, a.out_stride, own, residual, ahead)
                                token += 1
                row += n

    return linear
