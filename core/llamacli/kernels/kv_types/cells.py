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
_I8X32 = ir.ir.VectorType(ir.I8, 2 * ir.LANES)


def dims_at_once(number: int) -> int:
    """Dimensions that one `load_keys` returns: a unit of integers, one of floats."""
    return 1 if isinstance(_TYPES[number], FloatType) else UNIT


def float_type(number: int) -> FloatType:
    """Type of floats, by its number."""
    kind = _TYPES[number]
    assert isinstance(kind, FloatType)
    return kind


def integer_type(number: int) -> IntegerType:
    """Quantized type, by its number."""
    kind = _TYPES[number]
    assert isinstance(kind, IntegerType)
    return kind


def load_keys(b: ir.Builder, number: int, part: ir.Value, i: ir.Value) -> list[ir.Value]:
    """Load a part's 16 keys, one vector a dimension.

    These are the dimensions from i * `dims_at_once` on.
    """
    kind = _TYPES[number]
    if isinstance(kind, FloatType):
        return [_load_float(b, kind, b.add(part, b.mul(i, ir.I64(PAGE * kind.item.itemsize))))]
    block, unit = _unit(b, kind, part, i)
    scale, offset = load_scales(b, kind, block)
    codes = itertools.chain(*(_halves(b, pair) for pair in key_codes(b, kind, unit)))
    return [_number(b, code, scale, offset) for code in codes]


def load_scales(b: ir.Builder, kind: IntegerType, block: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Load a block's scale and offset of each cell.

    A number is scale * code + offset.
    """
    rounding = kind.rounding
    words = [ir.load(b, ir.offset(b, block, 2 * PAGE * i), _I16X16) for i in range(1 + rounding.has_offset)]
    if rounding.has_offset:
        return _half(b, words[0]), _half(b, words[1])
    if not rounding.has_zero:
        return _half(b, words[0]), None
    mask = ir.constant(_I16X16, rounding.last_code)
    scale = _half(b, b.and_(words[0], b.not_(mask)))
    zero = ir.to_f32(b, b.zext(b.and_(words[0], mask), ir.I32X16))
    return scale, b.fmul(scale, b.fneg(zero))


def key_codes(b: ir.Builder, kind: IntegerType, unit: ir.Value) -> list[ir.Value]:
    """Load a unit's codes of 16 keys.

    One int16x32 for each pair of dimensions; the two of a cell are side by side.
    """
    n_rows = UNIT // 2 if kind.bits == 8 else UNIT // 4
    rows = [ir.load(b, ir.offset(b, unit, kind.high_bytes + 2 * PAGE * row), _I8X32) for row in range(n_rows)]
    if kind.bits < 8:
        rows = [part for half in (0, 1) for part in (_nibbles(b, row)[half] for row in rows)]
    fifth: list[ir.Value | None] = [None] * len(rows)
    if kind.bits == 5:
        words = ir.load(b, unit, _I16X16)
        words = b.shuffle_vector(words, words, ir.lane_numbers(*(cell for cell in range(PAGE) for _ in range(2))))
        fifth = [_fifth_bits(b, words, [2 * pair, 2 * pair + 1] * PAGE) for pair in range(UNIT // 2)]
    return [_widened(b, kind, row, bits) for row, bits in zip(rows, fifth, strict=True)]


def value_codes(b: ir.Builder, kind: IntegerType, unit: ir.Value, pair: ir.Value) -> ir.Value:
    """Load a unit's codes of two values, int16x32.

    The two of a dimension are side by side.
    """
    codes = ir.offset(b, unit, kind.high_bytes)
    if kind.bits == 8:
        return _widened(b, kind, ir.load(b, b.add(codes, b.mul(pair, ir.I64(2 * UNIT))), _I8X32), None)
    packed = ir.load(b, b.add(codes, b.mul(pair, ir.I64(UNIT))), ir.I8X16)
    row, bits = b.shuffle_vector(*_nibbles(b, packed), ir.lane_numbers(*range(2 * UNIT))), None
    if kind.bits == 5:
        words = b.bitcast(ir.splat(b, ir.load(b, b.add(unit, b.mul(pair, ir.I64(4))), ir.I32)), ir.I16X32)
        bits = _fifth_bits(b, words, [dim for dim in range(UNIT) for _ in range(2)])
    return _widened(b, kind, row, bits)


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
) -> Callable[[ir.Value], list[ir.Value]]:
    """Return an emitter that loads 16 dimensions of two cells.

    They begin at `column`, a multiple of 16; the emitter's argument is the number of the pair of cells.
    """
    kind = _TYPES[number]
    if isinstance(kind, FloatType):
        size = ir.I64(kind.item.itemsize)
        start, row_bytes = b.add(part, b.mul(column, size)), b.mul(head_dim, size)

        def load_floats(pair: ir.Value) -> list[ir.Value]:
            first = b.add(start, b.mul(pair, b.mul(row_bytes, ir.I64(2))))
            return [_load_float(b, kind, place) for place in (first, b.add(first, row_bytes))]

        return load_floats
    block, unit = _unit(b, kind, part, b.lshr(column, ir.I64(4)))

    # A page's scales are converted at once, and read from the stack.
    factors = load_scales(b, kind, block)
    places = [factor and ir.stack(b, 4 * PAGE) for factor in factors]
    for place, factor in zip(places, factors, strict=True):
        if place:
            ir.store(b, place, factor)

    def load(pair: ir.Value) -> list[ir.Value]:
        numbers, codes = [], _halves(b, value_codes(b, kind, unit, pair))
        for cell, code in enumerate(codes):
            at = ir.offset(b, b.mul(pair, ir.I64(8)), 4 * cell)
            numbers.append(_number(b, code, *(place and ir.broadcast_f32(b, b.add(place, at)) for place in places)))
        return numbers

    return load


def load_value(b: ir.Builder, number: int, place: ir.Value) -> ir.Value:
    """Load 16 dimensions of a value of floats."""
    return _load_float(b, float_type(number), place)


def _load_float(b: ir.Builder, kind: FloatType, address: ir.Value) -> ir.Value:
    if kind.is_bf16:
        return ir.load_bf16(b, address)
    return ir.load_f16(b, address) if kind.item == np.float16 else ir.load(b, address, ir.F32X16)


def _unit(b: ir.Builder, kind: IntegerType, part: ir.Value, unit: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Addresses of a unit's block and of the unit."""
    block = b.add(part, b.mul(b.lshr(unit, ir.I64(1)), ir.I64(kind.block_bytes)))
    within = b.mul(b.and_(unit, ir.I64(1)), ir.I64(kind.unit_bytes))
    return block, b.add(ir.offset(b, block, kind.header_bytes), within)


def _half(b: ir.Builder, words: ir.Value) -> ir.Value:
    return b.fpext(b.bitcast(words, ir.ir.VectorType(ir.HALF, ir.LANES)), ir.F32X16)


def _nibbles(b: ir.Builder, codes: ir.Value) -> list[ir.Value]:
    """Low and high halves of bytes."""
    return [b.and_(codes, ir.constant(codes.type, 15)), b.lshr(codes, ir.constant(codes.type, 4))]


def _fifth_bits(b: ir.Builder, words: ir.Value, places: list[int]) -> ir.Value:
    """16 in each lane whose bit at its place is set."""
    bits = ir.ir.Constant(ir.I16X32, [1 << place if place < 15 else -(1 << 15) for place in places])
    is_set = b.icmp_signed("==", b.and_(words, bits), bits)
    return b.select(is_set, ir.constant(ir.I16X32, 16), ir.constant(ir.I16X32, 0))


def _widened(b: ir.Builder, kind: IntegerType, codes: ir.Value, fifth: ir.Value | None) -> ir.Value:
    """Codes as int16, with their fifth bits, or numbers of a table."""
    if kind.rounding.table:
        return b.sext(ir.look_up(b, kind.rounding.table, codes), ir.I16X32)
    if kind.bits == 8:
        return b.sext(codes, ir.I16X32)
    wide = b.zext(codes, ir.I16X32)
    return wide if fifth is None else b.or_(wide, fifth)


def _halves(b: ir.Builder, pairs: ir.Value) -> list[ir.Value]:
    """Even and odd lanes of int16x32, each int32x16."""
    words, bits = b.bitcast(pairs, ir.I32X16), ir.constant(ir.I32X16, 16)
    return [b.ashr(b.shl(words, bits), bits), b.ashr(words, bits)]


def _number(b: ir.Builder, code: ir.Value, scale: ir.Value, offset: ir.Value | None) -> ir.Value:
    number = ir.to_f32(b, code)
    return b.fmul(number, scale) if offset is None else ir.fma(b, number, scale, offset)


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

    store = {"f32": simd.store, "f16": simd.store_f16}.get(name)

    @njit(error_model="numpy")
    def write(x: Any, head_dim: Any, part: Any, lane: Any, scratch: Any) -> None:
        place, step, n_done = part + size * (lane if is_key else lane * head_dim), size * (PAGE if is_key else 1), 0
        if store is not None and not is_key:
            n_done = head_dim // PAGE * PAGE
            for d in range(0, n_done, PAGE):
                store(place + d * step, simd.load(x + 4 * d))
        for d in range(n_done, head_dim):
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
    step, within = (2 * PAGE, 1) if is_key else (4, 2)  # bytes from a pair of codes to the next, and in a pair
    sign = 128 if bits == 8 else 0

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
        unit, own = part, 2 * lane if is_key else lane // 2 * 2 * row + lane % 2
        for start in range(0, head_dim, BLOCK):
            n = min(BLOCK, head_dim - start)
            write_block(scratch + 4 * start, n, unit, lane, codes)
            unit += header
            for some in range(codes, codes + 4 * n, 4 * UNIT):
                place = unit + high + own
                word = 0
                for i in range(row):
                    byte = int(simd.read_f32(some + 4 * i))
                    if bits < 8:
                        other = int(simd.read_f32(some + 4 * (i + row)))
                        word |= (byte >> 4) << i | (other >> 4) << (i + row)
                        byte = byte & 15 | (other & 15) << 4
                    simd.write_u8(place + i // 2 * step + i % 2 * within, byte ^ sign)
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
