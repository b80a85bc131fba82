"""`carray` of kernels: arrays of records and numbers at an address."""

import numpy as np

from llamacli.kernels.deferred import carray
from llamacli.kernels.jit import Compiled
from llamacli.kernels.layout import record
from llamacli.kernels.simd import pointer

PART = record("x", "n", scale=np.float32)


def test_arrays_have_the_type_and_shape_that_are_given(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))

    def double_last(address, n):
        part = carray(pointer(address), n, PART)[n - 1]
        rows = carray(pointer(part.x), (2, part.n), np.float32)
        for i in range(part.n):
            rows[1, i] *= part.scale
        return rows.size

    x, parts = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(2, PART)
    parts[1] = (x.ctypes.data, 3, 2.0)
    assert Compiled(double_last, "int64(int64, int64)").call(parts.ctypes.data, 2) == 6
    assert x.tolist() == [[0, 1, 2], [6, 8, 10]]
