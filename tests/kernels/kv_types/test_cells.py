"""Cells that kernels write and read: the bits of the NumPy types."""

import functools
from typing import Any

import numpy as np
import pytest

from llamacli.kernels import ir
from llamacli.kernels.attention import scratch_bytes
from llamacli.kernels.cached import _readers
from llamacli.kernels.deferred import carray, intrinsic, types
from llamacli.kernels.jit import Compiled
from llamacli.kernels.kv_types import cells
from llamacli.kernels.kv_types.types import KV_TYPES, MEAN_PREFIXES, MEAN_WEIGHTS, PAGE, KVType
from llamacli.kernels.layout import record
from llamacli.kernels.simd import pointer

CALL = record("x", "n", "head_dim", "keys", "values", "scratch", "cells", "key_rows", "value_rows")


@functools.cache
def copied(name: str) -> Compiled:
    """Kernel that writes rows as keys and values, and reads both."""
    from llamacli.kernels.cached import CELLS

    write_key, write_value = cells.writer(name, True), cells.writer(name, False)
    key, value = _readers(KVType.of(name))

    def copy(address):
        a = carray(pointer(address), 1, CALL)[0]
        stride = 4 * (-(-a.head_dim // PAGE) * PAGE)
        for lane in range(a.n):
            write_key(a.x + 4 * lane * a.head_dim, a.head_dim, a.keys, lane, a.scratch)
            write_value(a.x + 4 * lane * a.head_dim, a.head_dim, a.values, lane, a.scratch)
        found = carray(pointer(a.cells), 1, CELLS)[0]
        for cell in range(a.n):
            source = carray(pointer(key(found, cell)), a.head_dim, np.float32)
            other = carray(pointer(value(found, cell)), a.head_dim, np.float32)
            carray(pointer(a.key_rows + cell * stride), a.head_dim, np.float32)[:] = source
            carray(pointer(a.value_rows + cell * stride), a.head_dim, np.float32)[:] = other
        return 0

    return Compiled(copy, "int64(int64)", f"_{name}", "llamacli.kernels.cached")


def rows(n: int, head_dim: int, seed: int) -> np.ndarray:
    """Rows with a common part, an outlier, and one of zeros."""
    random = np.random.default_rng(seed)
    x = (random.normal(0, 1, (n, head_dim)) + random.normal(0, 2, head_dim)).astype(np.float32)
    x[:, head_dim // 3] *= 9
    x[n // 2] = 0
    return x


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_bits_are_those_of_the_numpy_types(kv_type: str) -> None:
    from llamacli.kernels.cached import CELLS

    kind = KV_TYPES[kv_type]
    for n, head_dim in ((PAGE, 96), (PAGE, 40), (11, 16), (1, 8)):
        x = rows(n, head_dim, head_dim)
        size, width = kind.part_bytes(head_dim), -(-head_dim // PAGE) * PAGE
        pages, expected = np.zeros((2, size), np.uint8), np.zeros((2, size), np.uint8)
        scratch = np.zeros(scratch_bytes(head_dim, head_dim), np.uint8)
        memory, out = np.zeros((2, PAGE, width), np.float32), np.zeros((2, PAGE, width), np.float32)
        table, found, call = np.array([pages.ctypes.data]), np.zeros(1, CELLS), np.zeros(1, CALL)
        fields = {
            "head_dim": head_dim, "value_dim": head_dim, "pages": table.ctypes.data, "values": size, "key_page": -1,
            "value_page": -1, "key_rows": memory[0].ctypes.data, "value_rows": memory[1].ctypes.data,
        }  # fmt: skip
        for field, number in fields.items():
            found[field] = number
        given = {
            "x": x, "keys": pages[0], "values": pages[1], "scratch": scratch, "cells": found, "key_rows": out[0],
            "value_rows": out[1],
        }  # fmt: skip
        for field, array in given.items():
            call[field] = array.ctypes.data
        call["n"], call["head_dim"] = n, head_dim
        copied(kv_type).call(call.ctypes.data)
        for i, is_key in enumerate((True, False)):
            kind.write(expected[i : i + 1], slice(0, n), x[:, None], is_key=is_key)
            np.testing.assert_array_equal(pages[i], expected[i])
            stored = kind.read(expected[i : i + 1], head_dim, is_key=is_key)[0]
            np.testing.assert_array_equal(out[i, :n, :head_dim], stored[:n])
            assert np.square(stored[:n] - x).sum() <= 0.05 * np.square(x).sum()


@intrinsic
def _mapped(typingctx: Any, p: Any, scores: Any) -> Any:
    number = cells.NUMBERS["q8_0"]

    def codegen(context: Any, b: ir.Builder, signature: Any, args: Any) -> Any:
        for address, change in zip(args, (cells.relative_weights, cells.absolute_scores), strict=True):
            ir.store(b, address, change(b, number, ir.load(b, address, ir.F32X16)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def test_weights_and_scores_of_stored_keys() -> None:
    """A key is a stored one plus the mean of earlier ones."""

    def both(p, scores):
        _mapped(p, scores)
        return 0

    keys_of = np.eye(PAGE)
    for lane in range(1, PAGE):
        first = max(prefix for prefix in MEAN_PREFIXES if prefix <= lane)
        keys_of[lane, :first] += MEAN_WEIGHTS[:first]
    compiled = Compiled(both, "int64(int64, int64)", "", "llamacli.kernels.cached")
    for seed in range(3):
        p, scores = given = np.random.default_rng(seed).uniform(0.1, 1, (2, PAGE)).astype(np.float32)
        expected = keys_of.T @ p, keys_of @ scores
        compiled.call(given[0].ctypes.data, given[1].ctypes.data)
        np.testing.assert_allclose(given, expected, rtol=1e-6)
