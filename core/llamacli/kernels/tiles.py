"""Matrix products by AMX: tiles of bfloat16.

A tile of AMX has 16 rows of 64 bytes. Weights in bfloat16 are packed in such tiles: 32 columns of 16 rows, two columns
side by side in each row's lane, as the instruction takes them. It multiplies them by a tile of 16 tokens, and adds for
each token and row the sum of 32 products: the even columns' and the odd ones' are summed apart, from 0, then added to
one another.

A float16 is the sum of two bfloat16, exactly. So float16 weights and activations take four products of tiles, and no
digit of a product is lost.

A prompt is multiplied in panels of columns: the activations of a panel stay in the second-level cache while some rows
of weights are read, and float16 weights are split once for all tokens of a chunk. Up to 16 tokens are multiplied by
several tiles of weights in turn, since an instruction waits for the sum of the one before it. The sums are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import carray, njit, types
from llamacli.kernels.layout import BLOCK_BYTES, LINEAR, RUN
from llamacli.kernels.packing_formats import ROWS, FloatPacking
from llamacli.kernels.work import part_of

TOKENS, ABREAST = 16, 4
"""Tokens of a tile, and sums in tiles at once: as many as leave registers for factors."""

LINE, TILE = 64, 1024
"""Bytes of a row of a tile, and of a tile."""

_AHEAD = 4096
"""Prefetch distance in bytes of weights."""

CHUNK, _PANEL, _TILES = 256, 32, 8
"""Tokens, blocks of 32 columns and tiles of weights of a panel."""

_PANEL_BYTES, _SUM_BYTES = 2 * _PANEL * TILE, 4 * ROWS * CHUNK
"""Bytes of a panel of split weights, and of the sums of a chunk with a tile of weights."""

_i64 = types.int64
_void, _pointer = ir.ir.VoidType(), ir.I8.as_pointer()


# --- instructions ----------------------------------------------------------------------------------------------------
def tile_instruction(b: ir.Builder, name: str, *args: Any) -> None:
    """Emit an instruction: integers are numbers of tiles."""
    ir.call(b, f"llvm.x86.{name}", _void, *(ir.I8(arg) if isinstance(arg, int) else arg for arg in args))


def load_tile(b: ir.Builder, tile: int, address: ir.Value, stride: ir.Value) -> None:
    """Load the rows of a tile, `stride` bytes apart."""
    tile_instruction(b, "tileloadd64", tile, b.inttoptr(address, _pointer), stride)


def store_tile(b: ir.Builder, tile: int, address: ir.Value, stride: ir.Value) -> None:
    """Store the rows of a tile, `stride` bytes apart."""
    tile_instruction(b, "tilestored64", tile, b.inttoptr(address, _pointer), stride)


def emit_shapes(b: ir.Builder, rows: Sequence[ir.Value]) -> None:
    """Set the numbers of rows of the tiles, int8.

    Each row has 64 bytes. Tiles of no rows are not to be used.
    """
    settings = ir.stack(b, LINE)
    ir.store(b, settings, ir.constant(ir.I32X16, 0))
    ir.store(b, settings, ir.I8(1))
    for tile, n_rows in enumerate(rows):
        has_rows = b.icmp_unsigned("!=", n_rows, ir.I8(0))
        ir.store(b, ir.offset(b, settings, 16 + 2 * tile), b.select(has_rows, ir.I16(LINE), ir.I16(0)))
        ir.store(b, ir.offset(b, settings, 48 + tile), n_rows)
    tile_instruction(b, "ldtilecfg", b.inttoptr(settings, _pointer))


def emit_configuration(b: ir.Builder, n_tokens: ir.Value) -> None:
    """Set the shapes of all tiles: 16 rows, or those of tokens."""
    rows = b.trunc(n_tokens, ir.I8)
    emit_shapes(b, [ir.I8(ROWS) if tile in _WEIGHTS else rows for tile in range(8)])


configure = ir.expose(types.void, _i64)(emit_configuration)


@ir.expose(types.void)
def release(b: ir.Builder) -> None:
    """Free the tiles, so that no change of threads saves them."""
    tile_instruction(b, "tilerelease")


# --- products --------------------------------------------------------------------------------------------------------
_WEIGHTS, _FACTORS = (4, 5), (6, 7)
"""Tiles of weights and of activations; sums have the first ones."""


def _parts(packing: FloatPacking) -> int:
    """Number of bfloat16 that make up a weight."""
    return 2 if packing.activation == "f16_split" else 1


def emit_split(b: ir.Builder, weight: ir.Value, halves: ir.Value, lines: range = range(0, TILE, LINE)) -> None:
    """Split 32 columns of float16 into two tiles of bfloat16."""
    for start in lines:
        columns = (ir.load_f16(b, ir.offset(b, weight, start + column * LINE // 2)) for column in (0, 1))
        large, small = ir.split_bf16(b, *columns)
        ir.store(b, ir.offset(b, halves, start), large)
        ir.store(b, ir.offset(b, halves, TILE + start), small)


def _load_weights(b: ir.Builder, part: int, weight: ir.Value) -> None:
    load_tile(b, _WEIGHTS[part], ir.offset(b, weight, part * TILE), ir.I64(LINE))


def emit_few(
    b: ir.Builder, packing: FloatPacking, n: int, weight: ir.Value, tile_bytes: ir.Value, n_blocks: ir.Value,
    x: ir.Value, x_stride: ir.Value, sums: ir.Value,
) -> None:  # fmt: skip
    """Emit n tiles of weights times tokens; sums lie _SUM_BYTES apart."""
    parts = _parts(packing)
    weights = [b.add(weight, b.mul(tile_bytes, ir.I64(i))) for i in range(n)]
    size = n * parts * TILE
    halves = ir.stack(b, 2 * size) if parts == 2 else ir.I64(0)
    for i in range(n):
        tile_instruction(b, "tilezero", i)
        if parts == 2:
            emit_split(b, weights[i], ir.offset(b, halves, i * parts * TILE))

    def body(k: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        row = b.add(x, b.mul(k, ir.I64(BLOCK_BYTES[packing.activation])))
        places = [b.add(address, b.mul(k, ir.I64(packing.n_bytes))) for address in weights]
        following, targets = places, places
        if parts == 2:  # while a block is multiplied, the next one is split; the last one once more, to no effect
            last = b.icmp_signed("<", b.add(k, ir.I64(1)), n_blocks)
            step = b.select(last, ir.I64(packing.n_bytes), ir.I64(0))
            following = [b.add(place, step) for place in places]
            odd = b.mul(b.and_(k, ir.I64(1)), ir.I64(size))
            current, other = b.add(halves, odd), b.sub(ir.offset(b, halves, size), odd)
            places, targets = ([ir.offset(b, half, i * parts * TILE) for i in range(n)] for half in (current, other))
        for part in range(parts):
            load_tile(b, _FACTORS[part], ir.offset(b, row, part * LINE), x_stride)
        for part in range(parts):
            for i in range(n):
                ir.prefetch(b, ir.offset(b, following[i], _AHEAD + part * TILE // parts), packing.n_bytes // parts)
                _load_weights(b, part, places[i])
                for factor in _FACTORS[:parts]:
                    tile_instruction(b, "tdpbf16ps", i, factor, _WEIGHTS[part])
                if parts == 2:
                    half = range(part * TILE // 2, (part + 1) * TILE // 2, LINE)
                    emit_split(b, following[i], targets[i], half)
        return []

    ir.loop(b, n_blocks, [], body)
    for i in range(n):
        store_tile(b, i, ir.offset(b, sums, i * _SUM_BYTES), ir.I64(LINE))


def emit_panel(
    b: ir.Builder, packing: FloatPacking, n: int, panel: ir.Value, n_blocks: ir.Value, x: ir.Value,
    x_stride: ir.Value, sums: ir.Value, n_tokens: ir.Value, is_first: ir.Value,
) -> None:  # fmt: skip
    """Emit the product of a panel with n tiles of tokens.

    The panel is part of one tile of weights. A tile has n_tokens tokens. The product is added to `sums`, unless this is
    the first panel.
    """
    parts, line = _parts(packing), ir.I64(LINE)
    rows = [b.add(x, b.mul(x_stride, b.mul(n_tokens, ir.I64(j)))) for j in range(n)]
    places = [b.add(sums, b.mul(n_tokens, ir.I64(j * LINE))) for j in range(n)]
    with b.if_else(b.icmp_signed("!=", is_first, ir.I64(0))) as (first, later):
        with first:
            for j in range(n):
                tile_instruction(b, "tilezero", j)
        with later:
            for j, place in enumerate(places):
                load_tile(b, j, place, line)

    def body(k: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        at = b.mul(k, ir.I64(BLOCK_BYTES[packing.activation]))
        weight = b.add(panel, b.mul(k, ir.I64(parts * TILE)))
        for part in range(parts):
            _load_weights(b, part, weight)
        for j, row in enumerate(rows):
            factors = _FACTORS if parts == 2 else _FACTORS[j % 2 : j % 2 + 1]
            for part, factor in enumerate(factors):
                load_tile(b, factor, ir.offset(b, b.add(row, at), part * LINE), x_stride)
            for part in range(parts):
                for factor in factors:
                    tile_instruction(b, "tdpbf16ps", j, factor, _WEIGHTS[part])
        return []

    ir.loop(b, n_blocks, [], body)
    for j, place in enumerate(places):
        store_tile(b, j, place, line)


# --- kernel ----------------------------------------------------------------------------------------------------------
def _few(packing: FloatPacking, n: int) -> Any:
    def few(b: ir.Builder, weight: Any, tile_bytes: Any, n_blocks: Any, x: Any, x_stride: Any, sums: Any) -> None:
        emit_few(b, packing, n, weight, tile_bytes, n_blocks, x, x_stride, sums)

    return ir.expose(types.void, *[_i64] * 6)(few)


def _panel(packing: FloatPacking, n: int) -> Any:
    def panel(
        b: ir.Builder, panel: Any, n_blocks: Any, x: Any, x_stride: Any, sums: Any, n_tokens: Any, is_first: Any
    ) -> None:
        emit_panel(b, packing, n, panel, n_blocks, x, x_stride, sums, n_tokens, is_first)

    return ir.expose(types.void, *[_i64] * 7)(panel)


@ir.expose(types.void, _i64, _i64)
def split_tile(b: ir.Builder, weight: ir.Value, halves: ir.Value) -> None:
    """See `emit_split`."""
    emit_split(b, weight, halves)


@ir.expose(_i64)
def sums_memory(b: ir.Builder) -> ir.Value:
    """Memory on the stack for the sums of a chunk."""
    return ir.stack(b, _TILES * _SUM_BYTES)


@ir.expose(_i64)
def panel_memory(b: ir.Builder) -> ir.Value:
    """Memory on the stack for a panel of split weights."""
    return ir.stack(b, _PANEL_BYTES)


def tiled_product(packing: FloatPacking) -> Callable[..., None]:
    """Function of a matrix product by AMX, to be compiled."""
    few_1, few_4 = (_few(packing, n) for n in (1, ABREAST))
    panel_1, panel_2, panel_3, panel_4 = (_panel(packing, n) for n in range(1, ABREAST + 1))
    is_split, unit, n_bytes = _parts(packing) == 2, BLOCK_BYTES[packing.activation], packing.n_bytes

    @njit(inline="always")
    def multiply_few(t: Any, last: Any, weight: Any, a: Any, x: Any, sums: Any) -> Any:
        """Multiply some tiles of weights by tokens; returns their number."""
        if last - t >= ABREAST:
            few_4(weight, a.tile_bytes, a.n_blocks, x, a.x_stride, sums)
            return ABREAST
        few_1(weight, a.tile_bytes, a.n_blocks, x, a.x_stride, sums)
        return 1

    @njit(inline="always")
    def multiply_panel(
        n: Any, panel: Any, n_blocks: Any, x: Any, x_stride: Any, sums: Any, size: Any, first: Any
    ) -> Any:
        """Multiply a panel by some tiles of tokens; returns their number."""
        if n >= 4:
            panel_4(panel, n_blocks, x, x_stride, sums, size, first)
            return 4
        if n == 3:
            panel_3(panel, n_blocks, x, x_stride, sums, size, first)
        elif n == 2:
            panel_2(panel, n_blocks, x, x_stride, sums, size, first)
        else:
            panel_1(panel, n_blocks, x, x_stride, sums, size, first)
        return n

    def linear(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(simd.pointer(args), 1, LINEAR)[0], carray(simd.pointer(run), 1, RUN)[0]
        sums, halves, configured = sums_memory(), panel_memory(), 0
        for group in range(a.n_groups):
            row, end, first, last = part_of(a, r, group, thread, n_threads)
            while row < end and first < last:
                n = min(CHUNK, end - row)
                x = a.x + group * a.x_group + row * a.x_stride
                t = first
                while t < last:
                    weight = a.weight + (group * a.n_tiles + t) * a.tile_bytes
                    n_tiles = min(_TILES, last - t)
                    if n <= TOKENS:
                        if configured != n:
                            configure(n)
                            configured = n
                        n_tiles = multiply_few(t, last, weight, a, x, sums)
                    else:
                        for block in range(0, a.n_blocks, _PANEL):
                            n_blocks = min(_PANEL, a.n_blocks - block)
                            for i in range(n_tiles):
                                panel = weight + i * a.tile_bytes + block * n_bytes
                                if is_split:
                                    for k in range(n_blocks):
                                        split_tile(panel + k * n_bytes, halves + 2 * k * TILE)
                                    panel = halves
                                token = 0
                                while token < n:
                                    size = min(TOKENS, n - token)
                                    if configured != size:
                                        configure(size)
                                        configured = size
                                    token += size * multiply_panel(
                                        (n - token) // size, panel, n_blocks, x + token * a.x_stride + block * unit,
                                        a.x_stride, sums + i * _SUM_BYTES + token * LINE, size, block == 0,
                                    )  # fmt: skip
                    for i in range(n_tiles):
                        lanes = 4 * ROWS * (t + i)
                        bias = simd.load(a.bias + group * a.bias_stride + lanes)
                        for token in range(n):
                            total = simd.add(simd.load(sums + i * _SUM_BYTES + token * LINE), bias)
                            place = group * a.out_group + (row + token) * a.out_stride + lanes
                            if a.residual:
                                total = simd.add(simd.load(a.residual + place), total)
                            simd.store(a.out + place, total)
                    t += n_tiles
                row += n
        if configured:
            release()

    return linear
