"""Cost of steps: the fit, and the rows of a chunk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.generation.costs import _FORGOTTEN, ALONE_S, FIRST_CHUNK, MIN_CHUNK, TILE, StepCost, chunk_rows

rates = st.tuples(st.floats(1e-4, 0.5), st.floats(1e-6, 0.05))


@given(rates, st.lists(st.integers(1, 512), min_size=30, max_size=60), st.randoms())
def test_fit_finds_a_line(rate: tuple[float, float], sizes: list[int], random) -> None:
    base, per_row = rate
    cost = StepCost()
    for rows in (1, 500, *sizes):
        cost.observe(rows, base + per_row * rows)
    assert cost.per_row > 0
    for rows in (1, 8, 100, 512):
        # A bucket's means of rows and of seconds lie on the line, so the fit is exact but for a negative base.
        assert cost.seconds(rows) == pytest.approx(base + per_row * rows, rel=1e-6)


def test_long_runs_of_equal_steps_do_not_spoil_the_fit() -> None:
    cost = StepCost()
    cost.observe(400, 0.025 + 0.8)
    for _ in range(10_000):
        cost.observe(4, 0.025 + 0.008)
    assert cost.per_row == pytest.approx(0.002)
    assert cost.base == pytest.approx(0.025)


def test_sizes_are_forgotten_after_some_steps() -> None:
    cost = StepCost()
    cost.observe(400, 4.0)
    assert cost.per_row == pytest.approx(0.01)
    for _ in range(_FORGOTTEN):
        cost.observe(4, 0.01)
    assert cost.likely_seconds(400) == pytest.approx(4.0)
    for _ in range(_FORGOTTEN):
        cost.observe(8, 0.5)
    assert cost.likely_seconds(400) == pytest.approx(0.5 * cost.seconds(400) / cost.seconds(8))


def test_small_steps_are_not_slower_where_time_grows_faster_than_rows() -> None:
    cost = StepCost()
    cost.observe(10, 0.01)
    cost.observe(1000, 10.0)
    assert cost.base == 0
    assert cost.seconds(10) == pytest.approx(0.01, rel=0.01)


def test_all_time_is_that_of_rows_where_steps_of_all_sizes_take_as_long() -> None:
    cost = StepCost()
    for rows in (1, 512):
        cost.observe(rows, 0.5)
    assert (cost.base, cost.per_row > 0) == (0, True)


def test_changed_speed_is_followed() -> None:
    cost = StepCost()
    for factor in (1, 3):
        for _ in range(60):
            cost.observe(4, factor * 0.033)
            cost.observe(256, factor * 0.537)
    assert cost.seconds(100) == pytest.approx(3 * 0.225, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-5, 10)), min_size=1, max_size=40), st.floats(0.001, 2))
def test_any_times_give_usable_numbers(steps: list[tuple[int, float]], step_s: float) -> None:
    cost = StepCost()
    for rows, seconds in steps:
        cost.observe(rows, seconds)
    assert cost.per_row > 0
    assert cost.base >= 0
    for n_decode in (1, 7, 512):
        assert 0 <= chunk_rows(cost, n_decode, step_s) <= 512 - n_decode


def test_chunks_fill_the_time_with_whole_tiles() -> None:
    cost = StepCost()
    for rows in (1, 500):
        cost.observe(rows, 0.025 + 0.002 * rows)
    n = chunk_rows(cost, 4, 0.15)
    assert (n + 4) % TILE == 0
    assert cost.seconds(n + 4) <= 0.15 < cost.seconds(n + 4 + TILE)
    assert chunk_rows(cost, 4, 0.15, passes=2) < n
    assert chunk_rows(cost, 100, 0.15) == MIN_CHUNK
    assert chunk_rows(cost, 0, 0.15) == 512
    assert chunk_rows(cost, 0, 3.0) == 512
    assert chunk_rows(cost, 10, 0.0) == 502
    assert chunk_rows(cost, 500, 0.0) == 12


def test_first_chunk_is_small_beside_running_texts() -> None:
    cost = StepCost()
    cost.observe(1, 0.027)
    assert chunk_rows(cost, 1, 0.15) == MIN_CHUNK


def test_prompts_alone_take_bounded_time_too() -> None:
    cost = StepCost()
    assert chunk_rows(cost, 0, 0.15) == FIRST_CHUNK
    assert chunk_rows(cost, 0, 0.0) == 512
    for rows in (1, 64):
        cost.observe(rows, 0.5 + 0.02 * rows)
    n = chunk_rows(cost, 0, 0.15)
    assert cost.seconds(n) <= ALONE_S < cost.seconds(n + TILE)
    assert chunk_rows(cost, 0, 4.0) > n


def test_likely_times_are_the_usual_ones_of_the_size() -> None:
    cost = StepCost()
    cost.observe(1, 0.01)
    assert cost.likely_seconds(1) == 0.0
    cost.observe(64, 0.05)
    for _ in range(20):
        cost.observe(1, 0.01)
    assert cost.likely_seconds(1) == pytest.approx(0.01)
    for _ in range(20):
        cost.observe(4, 0.03)
    assert cost.likely_seconds(4) == pytest.approx(0.03, rel=0.01)
    assert cost.likely_seconds(4) > cost.seconds(4)


def test_a_pause_of_the_machine_hardly_changes_likely_times() -> None:
    cost = StepCost()
    cost.observe(64, 0.05)
    for _ in range(50):
        cost.observe(1, 0.01)
    cost.observe(1, 0.1)
    assert cost.likely_seconds(1) < 0.013
    assert cost.likely_seconds(4) < 2 * cost.likely_seconds(1)


def test_likely_times_of_another_size_are_learned_anew() -> None:
    cost = StepCost()
    cost.observe(64, 0.05)
    cost.observe(1, 0.01)
    cost.observe(4, 1.0)
    assert cost.likely_seconds(4) == pytest.approx(1.0)
    for _ in range(250):
        cost.observe(1, 0.01)
    assert cost.likely_seconds(4) < 0.03
    cost.observe(4, 0.012)
    assert cost.likely_seconds(4) == pytest.approx(0.012, rel=0.05)
