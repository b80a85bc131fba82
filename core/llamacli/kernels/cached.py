"""Kernels of verbs that read rows of the KV cache.

Pages lie as `llamacli.kernels.kv_types.types` describes. A reader dequantizes the page that it is asked for last into
memory of the calling thread, to the same bits as `KVSequence.read`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.kernels import ir, simd
from llamacli.kernels.attention import first_seen, padded, part_bytes
from llamacli.kernels.deferred import carray, intrinsic, njit, types
from llamacli.kernels.jit import Kernel
from llamacli.kernels.kv_types import cells as loading
from llamacli.kernels.kv_types.types import KV_TYPES, PAGE, IntegerType, KVType
from llamacli.kernels.layout import RECURRENT_ENTRY, ROW, RUN, record
from llamacli.kernels.work import share

CELLS = record(
    "first", "own", "last", "memory", "head_dim", "value_dim", "values_in_keys", "pages", "keys", "values", "key_page",
    "value_page", "key_rows", "value_rows",
)  # fmt: skip
"""Cells that a token sees: `first` to `last` - 1, its own is `own`. `memory`: address of the op's own memory. The other
fields are of the readers: the page table, the offsets of a head's keys and values in a page, the pages that are
dequantized, -1 for none, and the addresses of their rows."""


def cells_bytes(head_dim: int, value_dim: int, n_numbers: int) -> int:
    """Bytes of each thread.

    CELLS, a page of keys, one of values, and `n_numbers` float32 of the op.
    """
    return CELLS.itemsize + 4 * (PAGE * (padded(head_dim) + padded(value_dim)) + padded(n_numbers))


@intrinsic(prefer_literal=True)
def _read_keys(typingctx: Any, kind: Any, part: Any, head_dim: Any, out: Any, out_stride: Any) -> Any:
    """Read a part's keys to PAGE rows, rotated as stored."""
    number = kind.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, part, head_dim, out, out_stride = args
        step = loading.dims_at_once(number)

        def body(i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            at = b.add(out, b.mul(i, ir.I64(4 * step)))
            for d, stored in enumerate(loading.load_keys(b, number, part, i)):
                keys = loading.absolute_scores(b, number, stored)
                for cell in range(PAGE):
                    place = ir.offset(b, b.add(at, b.mul(out_stride, ir.I64(cell))), 4 * d)
                    ir.store(b, place, b.extract_element(keys, ir.ir.Constant(ir.I32, cell)))
            return carried

        ir.loop(b, b.sdiv(b.add(head_dim, ir.I64(step - 1)), ir.I64(step)), [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(kind, i64, i64, i64, i64), codegen


@intrinsic(prefer_literal=True)
def _read_values(typingctx: Any, kind: Any, part: Any, column: Any, value_dim: Any, out: Any, out_stride: Any) -> Any:
    """Read 16 columns of a part's values, rotated as stored."""
    number = kind.literal_value

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        _, part, column, value_dim, out, out_stride = args
        load = loading.value_loader(b, number, part, column, value_dim)
        at = b.add(out, b.mul(column, ir.I64(4)))

        def body(pair: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            for i, loaded in enumerate(load(pair)):
                cell = b.add(b.mul(pair, ir.I64(2)), ir.I64(i))
                ir.store(b, b.add(at, b.mul(cell, out_stride)), loaded)
            return carried

        ir.loop(b, ir.I64(PAGE // 2), [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(kind, *[i64] * 5), codegen


@njit
def _finish(rows: Any, width: Any, stride: Any, rotates: Any) -> None:
    """Rotate back PAGE rows, and set their padding to zeros."""
    for row in range(rows, rows + PAGE * stride, stride):
        if rotates:
            loading.rotate(row, width, width)
        for at in range(row + 4 * width, row + stride, 4):
            simd.write_f32(at, np.float32(0))


@functools.cache
def _readers(kv_type: KVType) -> tuple[Any, Any]:
    """Compiled functions that return the address of a row."""
    k_type, v_type = loading.NUMBERS[kv_type.k], loading.NUMBERS[kv_type.v]
    rotates_k, rotates_v = (isinstance(KV_TYPES[name], IntegerType) for name in (kv_type.k, kv_type.v))

    @njit
    def key(cells: Any, cell: Any) -> Any:
        stride = 4 * (-(-cells.head_dim // PAGE) * PAGE)
        if cells.key_page != cell // PAGE:
            cells.key_page = cell // PAGE
            part = simd.read_i64(cells.pages + 8 * cells.key_page) + cells.keys
            _read_keys(k_type, part, cells.head_dim, cells.key_rows, stride)
            _finish(cells.key_rows, cells.head_dim, stride, rotates_k)
        return cells.key_rows + cell % PAGE * stride

    @njit
    def value(cells: Any, cell: Any) -> Any:
        if cells.values_in_keys:
            return key(cells, cell)
        stride = 4 * (-(-cells.value_dim // PAGE) * PAGE)
        if cells.value_page != cell // PAGE:
            cells.value_page = cell // PAGE
            part = simd.read_i64(cells.pages + 8 * cells.value_page) + cells.values
            for column in range(0, cells.value_dim, PAGE):
                _read_values(v_type, part, column, cells.value_dim, cells.value_rows, stride)
            _finish(cells.value_rows, cells.value_dim, stride, rotates_v)
        return cells.value_rows + cell % PAGE * stride

    return key, value


def cache_kernel(
    name: str, fields: np.dtype[np.void], attend: Callable[..., Any], variant: str = ""
) -> Callable[[KVType], Kernel]:
    """Make the kernels of a verb that reads the KV cache.

    There is one for each pair of cache types.

    - `name` and `variant` make up their names; `fields` is the record of their parameters `a`, with CACHE_FIELDS.
    - `attend(a, row, head, cells, key, value)` computes one head of one row. It sees cells `cells.first` to
      `cells.last` - 1; its own is `cells.own`. `key(cells, i)` and `value(cells, i)` return the address of the key and
      of the value of cell i, float32 [head_dim] and [value_dim], valid until one of another page of 16 cells is asked
      for. They are padded with zeros to a multiple of 16, but for values that are the beginnings of keys.
      `cells.memory` is the address of the float32 numbers that `CacheOp.cache_params` was asked for.

    It is a plain function in Numba's dialect, and is compiled here.
    """
    attend_row, n_bytes = njit(attend), CELLS.itemsize

    @functools.cache
    def kernel_of(kv_type: KVType) -> Kernel:
        key, value = _readers(kv_type)
        key_bytes, value_bytes = part_bytes(kv_type.k), part_bytes(kv_type.v)

        def cached(args: int, run: int, thread: int, n_threads: int) -> None:
            a, r = carray(simd.pointer(args), 1, fields)[0], carray(simd.pointer(run), 1, RUN)[0]
            rows = carray(simd.pointer(r.rows), r.n_rows, ROW)
            cells = carray(simd.pointer(a.cells + thread * a.cells_stride), 1, CELLS)[0]
            cells.head_dim, cells.value_dim = a.head_dim, a.value_dim
            cells.values_in_keys = a.values_in_keys
            cells.key_rows = a.cells + thread * a.cells_stride + n_bytes
            cells.value_rows = cells.key_rows + 4 * PAGE * (-(-a.head_dim // PAGE) * PAGE)
            cells.memory = cells.value_rows + 4 * PAGE * (-(-a.value_dim // PAGE) * PAGE)
            group = a.n_head // a.n_head_kv
            first, last = share((r.n_rows - r.first_row) * a.n_head, thread, n_threads)
            for unit in range(first, last):
                row, head = r.first_row + unit // a.n_head, unit % a.n_head
                token = rows[row]
                entry = token.kv + RECURRENT_ENTRY * a.layer
                cells.pages, cells.key_page, cells.value_page = simd.read_i64(entry), -1, -1
                cells.keys = simd.read_i64(entry + 8) + head // group * key_bytes(a.head_dim)
                cells.values = simd.read_i64(entry + 16) + head // group * value_bytes(a.value_dim)
                cells.own = token.cell
                cells.first = first_seen(token.cell, a.window, a.chunk, token.n_encoded)
                cells.last = min(token.end, token.cell + 1 + token.n_ahead)
                attend_row(a, row, head, cells, key, value)

        return Kernel(cached, f"_{name}{variant}_{kv_type}", attend.__module__, (attend,))

    return kernel_of
