"""Sampling kernels against plain NumPy."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llamacli.kernels import sampling as kernels

FLOATS = st.one_of(st.sampled_from([np.inf, -np.inf, 0.0, -0.0, 1.0]), st.floats(width=32, allow_nan=False))
ARRAYS = hnp.arrays(np.float32, st.integers(1, 300), elements=FLOATS)
FINITE_ARRAYS = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-50, 50, width=32))


@given(ARRAYS, st.integers(1, 300))
def test_kth_largest(x: np.ndarray, k: int) -> None:
    k = min(k, len(x))
    assert kernels.kth_largest(x, np.empty(k, np.float32)) == np.sort(x)[-k]


@given(ARRAYS, FLOATS, st.booleans())
def test_keep_from(x: np.ndarray, threshold: float, in_place: bool) -> None:
    ids = np.arange(len(x), dtype=np.int32)
    expected = x[x >= np.float32(threshold)], ids[x >= np.float32(threshold)]
    into = (x, ids) if in_place else (np.empty_like(x), np.empty_like(ids))
    n = kernels.keep_from(x, ids, np.float32(threshold), *into)
    np.testing.assert_array_equal(into[0][:n], expected[0])
    np.testing.assert_array_equal(into[1][:n], expected[1])


@given(ARRAYS, st.integers(0, 2**32 - 1), st.booleans())
def test_keep_where(x: np.ndarray, seed: int, in_place: bool) -> None:
    ids = np.arange(len(x), dtype=np.int32)
    mask = np.random.default_rng(seed).random(len(x)) < 0.5
    expected = x[mask], ids[mask]
    into = (x, ids) if in_place else (np.empty_like(x), np.empty_like(ids))
    n = kernels.keep_where(x, ids, mask, *into)
    np.testing.assert_array_equal(into[0][:n], expected[0])
    np.testing.assert_array_equal(into[1][:n], expected[1])


@given(ARRAYS, st.booleans())
def test_falling_order(x: np.ndarray, many: bool) -> None:
    if many:
        x = np.tile(x, kernels._FEW // len(x) + 1)
    assert kernels.falling_order(x).tolist() == np.argsort(-x, kind="stable").tolist()


@given(FINITE_ARRAYS)
def test_exponentials(x: np.ndarray) -> None:
    largest = float(x.max())
    e = np.exp(x.astype(np.float64) - largest)
    log_total = kernels.log_sum_exp(x, largest)
    assert log_total == pytest.approx(np.log(e.sum()), abs=1e-12)
    out = np.empty(len(x))
    kernels.softmax(x, largest, log_total, out)
    np.testing.assert_allclose(out, e / e.sum(), rtol=1e-12)
    kernels.running_sums(x, largest, out)
    np.testing.assert_allclose(out, np.cumsum(e), rtol=1e-12)
    p = e / e.sum()
    assert kernels.entropy(x, largest, log_total) == pytest.approx(-np.sum(p * np.log(p)), abs=1e-12)


@given(FINITE_ARRAYS, st.booleans())
def test_deviation(x: np.ndarray, more: bool) -> None:
    expected = x.std(dtype=np.float64)
    if more:
        x = np.append(x, np.float32([-np.inf, np.inf]))
    assert kernels.deviation(x) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_repeat_lengths(text: list[int]) -> None:
    lengths = np.zeros(len(text), np.int64)
    kernels.repeat_lengths(np.array(text, np.int32), lengths)
    for i in range(1, len(text)):
        n = next((n for n in range(len(text) - i) if text[n] != text[i + n]), len(text) - i)
        assert lengths[i] == n


@pytest.mark.medium
def test_compiled_kernels_are_reused_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path))
    for name in ("NUMBA_DISABLE_JIT", "NUMBA_BOUNDSCHECK"):  # code that checks bounds is compiled by each process
        monkeypatch.delenv(name, raising=False)
    code = """
import numpy as np
from llamacli.kernels import jit
from llamacli.kernels.sampling import log_sum_exp
jit.listeners.append(print)
print(log_sum_exp(np.zeros(4, np.float32), 0.0))
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout for run in runs] == [f"log_sum_exp\n{np.log(4)}\n", f"{np.log(4)}\n"]
