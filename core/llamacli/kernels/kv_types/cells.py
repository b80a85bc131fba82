"""KV cache kernels: load keys and values, write a token's cells.

Loads are LLVM IR builders, writers are Numba functions. The memory layout and the NumPy reference are in
`llamacli.kernels.kv_types.types`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.kernels import ir, simd
from llamacli.kernels.deferred import intrinsic, njit, types
from llamacli.kernels.kv_types.rounding import BLOCK, Rounding
from llamacli.kernels.kv_types.types import KV_TYPES, MEAN_PREFIXES, MEAN_WEIGHTS, PAGE, UNIT, FloatType, IntegerType

NUMBERS = {name: number for number, name in enumerate(KV_TYPES)}
"""Type numbers by name: Numba literals can be integers."""

_TYPES = list(KV_TYPES.values())
_I16X16 = ir.ir.VectorType(ir.I16, ir.LANES)
_I8X8 = ir.ir.VectorType(ir.I8, 8)


def dims_at_once(number: int) -> int:
    """Dimensions that one `load_keys` returns: a unit of integers, one of floats."""
    return 1 if isinstance(_TYPES[number], FloatType) else UNIT


def key_bytes_at_once(number: int) -> int:
    """Bytes of a part that one `load_keys` reads, scales included."""
    kind = _TYPES[number]
    return PAGE * kind.item.itemsize if isinstance(kind, FloatType) else kind.block_bytes // 2


def value_bytes_at_once(number: int) -> int:
    """Bytes that a `value_loader` reads for each cell, without scales."""
    kind = _TYPES[number]
    return UNIT * kind.item.itemsize if isinstance(kind, FloatType) else kind.unit_bytes // PAGE


def load_keys(b: ir.Builder, number: int, part: ir.Value, i: ir.Value) -> list[ir.Value]:
    """Load a part's 16 keys, one vector a dimension.

    These are the dimensions from i * `dims_at_once` on.
    """
    kind = _TYPES[number]
    if isinstance(kind, FloatType):
        return [_load_float(b, kind, b.add(part, b.mul(i, ir.I64(PAGE * kind.item.itemsize))))]
    block, unit = _unit(b, kind, part, i)
    scale, offset = _scale(b, kind.rounding, lambda i: ir.load(b, ir.offset(b, block, 2 * PAGE * i), _I16X16))
    rows = [
        ir.load(b, ir.offset(b, unit, kind.high_bytes + PAGE * row), ir.I8X16)
        for row in range(UNIT if kind.bits == 8 else UNIT // 2)
    ]
    if kind.bits < 8:
        low, high = ir.constant(ir.I8X16, 15), ir.constant(ir.I8X16, 4)
        rows = [b.and_(row, low) for row in rows] + [b.lshr(row, high) for row in rows]
    fifth: list[ir.Value | None] = [None] * UNIT
    if kind.bits == 5:
        words = b.zext(ir.load(b, unit, _I16X16), ir.I32X16)
        fifth = [_fifth_bit(b, words, ir.constant(ir.I32X16, dim)) for dim in range(UNIT)]
    return [_number(b, kind, row, bit, scale, offset) for row, bit in zip(rows, fifth, strict=True)]


def absolute_scores(b: ir.Builder, number: int, scores: ir.Value) -> ir.Value:
    """Convert scores of stored (delta-coded) keys to scores of keys.

    Both are float32x16, one lane for each key of a page.
    """
    if isinstance(_TYPES[number], FloatType):
        return scores
    # The first lanes of `sums` are weighted sums over 1, 2, 4 and 8 keys: the means that were subtracted from the keys
    # of lanes 1, 2, 4 and 8 on. No lane reads later lanes, which may hold no keys yet.
    sums = [b.fmul(scores, ir.ir.Constant(ir.F32X16, MEAN_WEIGHTS.tolist()))]
    for half in (1, 2, 4):
        sums.append(b.fadd(sums[-1], ir.exchange_lanes(b, sums[-1], half)))
    first = ir.shuffle(b, sums[0], sums[1], [0, 0, PAGE, PAGE, *[0] * 12])
    last = ir.shuffle(b, sums[2], sums[3], [0] * 8 + [PAGE] * 8)
    means = ir.shuffle(b, first, last, [*range(4), *range(PAGE + 4, 2 * PAGE)])
    means = ir.shuffle(b, ir.constant(ir.F32X16, 0.0), means, [0, *range(PAGE + 1, 2 * PAGE)])
    return b.fadd(scores, means)


def relative_weights(b: ir.Builder, number: int, p: ir.Value) -> ir.Value:
    """Convert weights of a page's keys to weights of stored (delta-coded) keys.

    The weighted sum of both is the same; `absolute_scores` is the transposed map. float32x16, one lane a key.
    """
    if isinstance(_TYPES[number], FloatType):
        return p
    none, result = ir.constant(ir.F32X16, 0.0), p
    for first, stop in itertools.pairwise(MEAN_PREFIXES[:-1]):
        # The keys of lanes `stop` on are stored minus a mean in which those of lanes `first` to `stop` - 1 count.
        later = ir.ir.Constant(ir.ir.VectorType(ir.ir.IntType(1), PAGE), [lane >= stop for lane in range(PAGE)])
        total = ir.sum_f32(b, b.select(later, p, none))
        weights = [float(weight) * (first <= lane < stop) for lane, weight in enumerate(MEAN_WEIGHTS)]
        result = ir.fma(b, ir.splat(b, total), ir.ir.Constant(ir.F32X16, weights), result)
    return result


def value_loader(
    b: ir.Builder, number: int, part: ir.Value, column: ir.Value, head_dim: ir.Value
) -> Callable[[ir.Value], ir.Value]:
    """Return an emitter that loads 16 dimensions of a cell.

    They begin at `column`, a multiple of 16; the emitter's argument is the cell.
    """
    kind = _TYPES[number]
    if isinstance(kind, FloatType):
        size = ir.I64(kind.item.itemsize)
        start, row_bytes = b.add(part, b.mul(column, size)), b.mul(head_dim, size)
        return lambda cell: _load_float(b, kind, b.add(start, b.mul(cell, row_bytes)))
    block, unit = _unit(b, kind, part, b.lshr(column, ir.I64(4)))
    codes = ir.offset(b, unit, kind.high_bytes)

    # A page's scales are converted at once, and read from the stack.
    factors = _scale(b, kind.rounding, lambda i: ir.load(b, ir.offset(b, block, 2 * PAGE * i), _I16X16))
    places = [factor and ir.stack(b, 4 * PAGE) for factor in factors]
    for place, factor in zip(places, factors, strict=True):
        if place:
            ir.store(b, place, factor)

    def load(cell: ir.Value) -> ir.Value:
        words, floats = b.mul(cell, ir.I64(2)), b.mul(cell, ir.I64(4))
        scale, offset = (place and ir.broadcast_f32(b, b.add(place, floats)) for place in places)
        if kind.bits == 8:
            row = ir.load(b, b.add(codes, b.mul(cell, ir.I64(UNIT))), ir.I8X16)
            return _number(b, kind, row, None, scale, offset)
        packed = ir.load(b, b.add(codes, b.mul(cell, ir.I64(UNIT // 2))), _I8X8)
        low, high = b.and_(packed, ir.constant(_I8X8, 15)), b.lshr(packed, ir.constant(_I8X8, 4))
        row = b.shuffle_vector(low, high, ir.ir.Constant(ir.I32X16, list(range(UNIT))))
        bit = None
        if kind.bits == 5:
            word = ir.splat(b, b.zext(ir.load(b, b.add(unit, words), ir.I16), ir.I32))
            bit = _fifth_bit(b, word, ir.ir.Constant(ir.I32X16, list(range(UNIT))))
        return _number(b, kind, row, bit, scale, offset)

    return load


def _load_float(b: ir.Builder, kind: FloatType, address: ir.Value) -> ir.Value:
    if kind.is_bf16:
        return ir.load_bf16(b, address)
    return ir.load_f16(b, address) if kind.item == np.float16 else ir.load(b, address, ir.F32X16)


def _unit(b: ir.Builder, kind: IntegerType, part: ir.Value, unit: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Addresses of a unit's block and of the unit."""
    block = b.add(part, b.mul(b.lshr(unit, ir.I64(1)), ir.I64(kind.block_bytes)))
    within = b.mul(b.and_(unit, ir.I64(1)), ir.I64(kind.unit_bytes))
    return block, b.add(ir.offset(b, block, kind.header_bytes), within)


def _scale(b: ir.Builder, rounding: Rounding, word: Callable[[int], ir.Value]) -> tuple[ir.Value, ir.Value | None]:
    """Scale and addend for number = scale * code + addend.

    The addend is the offset, or exactly -scale * zero point. `word(0)` loads the stored scales, `word(1)` the offsets,
    int16x16.
    """
    if rounding.table:
        return _half(b, word(0)), None
    if rounding.has_offset:
        return _half(b, word(0)), _half(b, word(1))
    if not rounding.has_zero:
        scale = _half(b, word(0))
        return scale, b.fmul(scale, ir.constant(ir.F32X16, -rounding.middle))
    mask = ir.constant(_I16X16, rounding.last_code)
    scale = _half(b, b.and_(word(0), b.not_(mask)))
    zero = ir.to_f32(b, b.zext(b.and_(word(0), mask), ir.I32X16))
    return scale, b.fmul(scale, b.fneg(zero))


def _half(b: ir.Builder, words: ir.Value) -> ir.Value:
    return b.fpext(b.bitcast(words, ir.ir.VectorType(ir.HALF, ir.LANES)), ir.F32X16)


def _number(
    b: ir.Builder, kind: IntegerType, codes: ir.Value, fifth: ir.Value | None, scale: ir.Value, offset: ir.Value | None
) -> ir.Value:
    if kind.rounding.table:
        return b.fmul(b.sitofp(ir.look_up(b, kind.rounding.table, codes), ir.F32X16), scale)
    wide = b.zext(codes, ir.I32X16)
    if fifth is not None:
        wide = b.or_(wide, fifth)
    return ir.fma(b, ir.to_f32(b, wide), scale, offset)


def _fifth_bit(b: ir.Builder, words: ir.Value, places: ir.Value) -> ir.Value:
    bit = b.and_(b.lshr(words, places), ir.constant(ir.I32X16, 1))
    return b.shl(bit, ir.constant(ir.I32X16, 4))


@njit(error_model="numpy")
def rotate(row: Any, n: Any, head_dim: Any) -> None:
    """Rotate the first n of float32 [head_dim] in place, as `rounding.rotated` does.

    n is a multiple of the largest power of two in `head_dim`, or `head_dim`. The row is padded to a multiple of 16.
    """
    size = head_dim & -head_dim
    for at in range(row, row + 4 * n, 64):
        simd.store(at, simd.butterfly(simd.load(at), size))
    half = 64
    while half < 4 * size:
        for pair in range(row, row + 4 * n, 2 * half):
            for at in range(pair, pair + half, 64):
                low, high = simd.load(at), simd.load(at + half)
                simd.store(at, simd.add(low, high))
                simd.store(at + half, simd.sub(low, high))
        half *= 2
    norm = simd.splat(np.float32(1 / np.sqrt(size)))
    for at in range(row, row + 4 * n, 64):
        simd.store(at, simd.mul(simd.load(at), norm))


# --- writing ---------------------------------------------------------------------------------------------------------


@functools.cache
def writer(name: str, is_key: bool) -> Callable[..., None]:
    """Compiled function that writes float32 [head_dim] into a cell.

    Its arguments are `(x, head_dim, part, lane, scratch)`. Keys must be written in the order of a page's cells.
    `scratch` is memory of the calling thread, see `attention.scratch_bytes`.
    """
    kind = KV_TYPES[name]
    return _float_writer(name, kind, is_key) if isinstance(kind, FloatType) else _integer_writer(kind, is_key)


@intrinsic(prefer_literal=True)
def _subtract_prefix_mean(typingctx: Any, number: Any, part: Any, head_dim: Any, n: Any, row: Any) -> Any:
    """Subtract the mean of a part's first n keys from a row.

    The row is float32 [head_dim], padded to a multiple of 16.
    """
    kind = number.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, part, head_dim, n, row = args
        weights = ir.ir.Constant(ir.F32X16, MEAN_WEIGHTS.tolist())
        lanes = ir.ir.Constant(ir.I32X16, list(range(PAGE)))
        before = b.icmp_signed("<", lanes, ir.splat(b, b.trunc(n, ir.I32)))

        def body(i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            for d, key in enumerate(load_keys(b, kind, part, i)):
                place = b.add(row, b.mul(b.add(b.mul(i, ir.I64(UNIT)), ir.I64(d)), ir.I64(4)))
                mean = ir.sum_f32(b, b.select(before, b.fmul(key, weights), ir.constant(ir.F32X16, 0.0)))
                ir.store(b, place, b.fsub(ir.load(b, place, ir.F32), mean))
            return carried

        ir.loop(b, b.sdiv(b.add(head_dim, ir.I64(UNIT - 1)), ir.I64(UNIT)), [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(number, i64, i64, i64, i64), codegen


def _float_writer(name: str, kind: FloatType, is_key: bool) -> Callable[..., None]:
    size = kind.item.itemsize
    write_one = {"f32": simd.write_f32, "f16": simd.write_f16, "bf16": simd.write_bf16}[name]

    @njit(error_model="numpy")
    def write(x: Any, head_dim: Any, part: Any, lane: Any, scratch: Any) -> None:
        place, step = part + size * (lane if is_key else lane * head_dim), size * (PAGE if is_key else 1)
        for d in range(head_dim):
            write_one(place + d * step, simd.read_f32(x + 4 * d))

    return write


def _integer_writer(kind: IntegerType, is_key: bool) -> Callable[..., None]:
    rounding, number = kind.rounding, _TYPES.index(kind)
    bits, has_offset, has_zero = kind.bits, rounding.has_offset, rounding.has_zero
    header, unit_bytes, high = kind.header_bytes, kind.unit_bytes, kind.high_bytes
    last, middle = np.float32(rounding.last_code), np.float32(rounding.middle)
    has_extremes, trials = bool(rounding.extremes), tuple(map(np.float32, rounding.trials))
    mask, half = rounding.last_code, (rounding.last_code + 1) // 2
    codes_of, numbers_of = _nearest(rounding)
    row = UNIT if bits == 8 else UNIT // 2
    step, own = (PAGE, 1) if is_key else (1, row)

    @njit(error_model="numpy")
    def write_block(x: Any, n: Any, block: Any, lane: Any, codes: Any) -> None:
        """Quantize n numbers as Rounding.fit does.

        Their codes go to scratch, float32 [32]. a and b are the halves of the block, c and d their codes as numbers in
        steps of the scale.
        """
        zeros = simd.splat(np.float32(0))
        a, b, first = simd.load(x), simd.load(x + 64), simd.splat(simd.read_f32(x))
        a, b = simd.first_lanes(a, n, first), simd.first_lanes(b, n - UNIT, first)
        low, top = simd.min_f32(simd.minimum(a, b)), simd.max_f32(simd.maximum(a, b))
        if has_zero:
            low, top = min(low, np.float32(0)), max(top, np.float32(0))
        a, b = simd.first_lanes(a, n, zeros), simd.first_lanes(b, n - UNIT, zeros)
        total = simd.sum_f32(simd.add(a, b))
        best, scale, zero = np.float32(-1), total, middle
        offset = inverse = origin = np.float32(0)
        for trial in trials:
            if has_extremes:
                size, start = (low if -low >= top else top) / trial, np.float32(0)
            else:
                size = (top - low) / last * trial
                start = low + (top - low) * ((np.float32(1) - trial) / np.float32(2))
            per_step = np.float32(1) / size if size != 0 else np.float32(0)
            code_of_zero = middle
            if has_zero:
                code_of_zero = np.rint(-start * per_step)
                code_of_zero = min(code_of_zero, last) if code_of_zero > 0 else np.float32(0)
                start = np.float32(0)
            steps, starts, zero_lanes = simd.splat(per_step), simd.splat(start), simd.splat(code_of_zero)
            c = simd.first_lanes(numbers_of(simd.mul(simd.sub(a, starts), steps), zero_lanes), n, zeros)
            d = simd.first_lanes(numbers_of(simd.mul(simd.sub(b, starts), steps), zero_lanes), n - UNIT, zeros)
            product = simd.sum_f32(simd.add(simd.mul(a, c), simd.mul(b, d)))
            square = simd.sum_f32(simd.add(simd.mul(c, c), simd.mul(d, d)))
            sum_of_numbers = np.float32(0)
            if has_offset:
                sum_of_numbers = simd.sum_f32(simd.add(c, d))
                product -= total * sum_of_numbers / np.float32(n)
                square -= sum_of_numbers * sum_of_numbers / np.float32(n)
            fit = product / square if square > 0 else np.float32(0)
            if fit * product > best:
                if has_offset:
                    offset = (total - fit * sum_of_numbers) / np.float32(n)
                best, scale, inverse, origin, zero = fit * product, fit, per_step, start, code_of_zero
        word = simd.f16_bits(scale)
        if has_zero:
            word = (word + half) & ~mask | int(zero)
        simd.write_u16(block + 2 * lane, word)
        if has_offset:
            simd.write_f16(block + 2 * PAGE + 2 * lane, offset)
        steps, starts, zero_lanes = simd.splat(inverse), simd.splat(origin), simd.splat(zero)
        simd.store(codes, codes_of(simd.mul(simd.sub(a, starts), steps), zero_lanes))
        simd.store(codes + 64, codes_of(simd.mul(simd.sub(b, starts), steps), zero_lanes))

    @njit(error_model="numpy")
    def write(x: Any, head_dim: Any, part: Any, lane: Any, scratch: Any) -> None:
        codes = scratch + 4 * -(-head_dim // BLOCK) * BLOCK
        for i in range(head_dim):
            simd.write_f32(scratch + 4 * i, simd.read_f32(x + 4 * i))
        rotate(scratch, head_dim, head_dim)
        if is_key and lane:
            n_before = 0
            for first in MEAN_PREFIXES:
                if first <= lane:
                    n_before = first
            _subtract_prefix_mean(number, part, head_dim, n_before, scratch)
        unit = part
        for start in range(0, head_dim, BLOCK):
            n = min(BLOCK, head_dim - start)
            write_block(scratch + 4 * start, n, unit, lane, codes)
            unit += header
            for some in range(codes, codes + 4 * n, 4 * UNIT):
                place = unit + high + lane * own
                word = 0
                for i in range(row):
                    byte = int(simd.read_f32(some + 4 * i))
                    if bits < 8:
                        other = int(simd.read_f32(some + 4 * (i + row)))
                        word |= (byte >> 4) << i | (other >> 4) << (i + row)
                        byte = byte & 15 | (other & 15) << 4
                    simd.write_u8(place + i * step, byte)
                if bits == 5:
                    simd.write_u16(unit + 2 * lane, word)
                unit += unit_bytes

    return write


def _nearest(rounding: Rounding) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiled rounding functions (codes_of, numbers_of).

    Their arguments are numbers in steps of the scale, and the zero point.
    """
    last = np.float32(rounding.last_code)
    entries, midpoints = (tuple(map(np.float32, some)) for some in (rounding.table, rounding.midpoints))

    @njit
    def numbers_of(steps: Any, zero: Any) -> Any:
        low = simd.sub(simd.splat(np.float32(0)), zero)
        return simd.minimum(simd.maximum(simd.rint(steps), low), simd.sub(simd.splat(last), zero))

    @njit
    def codes_of(steps: Any, zero: Any) -> Any:
        return simd.add(numbers_of(steps, zero), zero)

    @njit
    def entries_of(steps: Any, zero: Any) -> Any:
        entry = simd.splat(entries[0])
        for i in range(15):
            entry = simd.where_less(simd.splat(midpoints[i]), steps, simd.splat(entries[i + 1]), entry)
        return entry

    @njit
    def entry_codes_of(steps: Any, zero: Any) -> Any:
        code = simd.splat(np.float32(0))
        for i in range(15):
            code = simd.where_less(simd.splat(midpoints[i]), steps, simd.splat(np.float32(i + 1)), code)
        return code

    return (entry_codes_of, entries_of) if rounding.table else (codes_of, numbers_of)
