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


def applied(x: np.ndarray, *pairs: tuple[int, float], uniform: float = 0.5, kept: bool = False) -> tuple:
    """Ids and logits that steps leave, and the index drawn."""
    n, numbers = len(x), np.zeros(kernels.STEPS + 2 * len(pairs))
    numbers[: kernels.STEPS] = n, kept, uniform, len(pairs)
    numbers[kernels.STEPS :] = np.ravel(pairs)
    ids, kept_logits, kept_ids = np.arange(n, dtype=np.int32), np.empty_like(x), np.empty(n, np.int32)
    if kept:
        kept_logits[:], kept_ids[:] = x, ids
    kernels.apply_steps(
        numbers, x.copy() if kept else x, ids, kept_logits, kept_ids, np.empty(n, np.float32), np.empty(n, np.int32),
        np.empty(n),
    )  # fmt: skip
    left = int(numbers[kernels.N])
    found = (kept_ids, kept_logits) if numbers[kernels.KEPT] else (ids, x)
    return found[0][:left], found[1][:left], int(numbers[kernels.UNIFORM])


@given(ARRAYS, FLOATS, st.booleans())
def test_keep_from(x: np.ndarray, threshold: float, kept: bool) -> None:
    finite = np.clip(threshold, -kernels.LARGEST, kernels.LARGEST)
    mask = np.full(len(x), True) if threshold == -np.inf else x >= np.float32(finite)
    ids, logits, _ = applied(x.copy(), (kernels.KEEP_FROM, threshold), kept=kept)
    np.testing.assert_array_equal(ids, np.flatnonzero(mask))
    np.testing.assert_array_equal(logits, x[mask])


@given(FINITE_ARRAYS, st.integers(1, 9), st.booleans())
def test_thresholds_between_floats_are_rounded_up(x: np.ndarray, place: int, kept: bool) -> None:
    threshold = np.float64(x[place % len(x)]) * (1 + 1e-9) + 1e-12
    ids, _, _ = applied(x.copy(), (kernels.KEEP_FROM, threshold), kept=kept)
    np.testing.assert_array_equal(ids, np.flatnonzero(x.astype(np.float64) >= threshold))


@given(FINITE_ARRAYS, st.integers(1, 8), st.floats(0.01, 0.99), st.booleans())
def test_nucleus(x: np.ndarray, times: int, p: float, kept: bool) -> None:
    x = np.round(np.tile(x, times), 1)  # many, some of them equal
    wide = np.exp(x.astype(np.float64) - x.max())
    order = np.argsort(-x, kind="stable")
    sums = np.cumsum(wide[order]) / wide.sum()
    ids, logits, _ = applied(x.copy(), (kernels.TOP_P, p), kept=kept)
    assert set(order[: int(np.searchsorted(sums, p - 1e-6))].tolist()) <= set(ids.tolist())
    assert len(ids) <= np.searchsorted(sums, p + 1e-6) + 1
    assert set(ids.tolist()) == set(order[: len(ids)].tolist())
    np.testing.assert_array_equal(logits, x[ids])


@pytest.mark.parametrize(
    ("x", "step", "left"),
    [
        ([0, 0], (kernels.TOP_P, 0.5), [0]),  # the first reaches p exactly
        ([3, 1, 2.5], (kernels.NEAR_LARGEST, -1), [0, 2]),
        ([kernels.LARGEST, 0], (kernels.TEMPERATURE, 0.5), [0]),  # it overflows
        ([-kernels.LARGEST, 0], (kernels.TEMPERATURE, 0.5), [0, 1]),
    ],
)
def test_edges(x: list[float], step: tuple[int, float], left: list[int]) -> None:
    assert applied(np.array(x, np.float32), step)[0].tolist() == left


@given(FINITE_ARRAYS, st.floats(0, 1, exclude_max=True))
def test_draws_by_running_sums(x: np.ndarray, uniform: float) -> None:
    sums = np.cumsum(np.exp(x.astype(np.float64) - x.max()))
    _, _, index = applied(x.copy(), (kernels.DRAW, 0), uniform=uniform)
    aim = uniform * sums[-1]
    assert sums[index] >= aim * (1 - 1e-12)
    assert index == 0 or sums[index - 1] <= aim * (1 + 1e-12)


@given(ARRAYS, st.sampled_from([0.0, -1.0, 1e-45, 0.7, 3.0, np.inf]))
def test_temperature_then_the_largest(x: np.ndarray, temperature: float) -> None:
    x[x == np.inf] = kernels.LARGEST
    ids, logits, index = applied(x.copy(), (kernels.TEMPERATURE, temperature), (kernels.GREEDY, 0))
    with np.errstate(all="ignore"):
        scaled = x / np.float32(min(temperature, kernels.LARGEST))
    overflows = abs(x.max()) <= kernels.LARGEST < abs(scaled[np.argmax(x)])
    if temperature > 0 and not overflows:
        np.testing.assert_array_equal(logits, scaled)
        assert index == np.argmax(scaled)
    else:
        assert (ids[index], logits[index]) == (np.argmax(x), x.max())


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
