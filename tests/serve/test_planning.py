"""Planning of steps over a fake program: bounded time, turns of prompts."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_serving import FakeProgram, Simulation, alone, kinds, last, prompt_of, request
from llamacli.generation.costs import MIN_CHUNK
from llamacli.serve.errors import QueueFullError
from llamacli.serve.planning import BACKGROUND_SHARE, LAST_CHUNK, OLDEST_EVERY
from llamacli.serve.requests import Done, EmbeddingRequest
from llamacli.tools.embedding import Pooling
from suite import examples


def test_steps_stay_within_their_time_while_texts_run() -> None:
    simulation = Simulation(step_ms=150, max_running=8)
    for i in range(4):
        simulation.submit(request(f"stream {i}", seed=i, max_tokens=200, ignore_eos=True))
    simulation.run(until=lambda: all(len(simulation.events[f"stream {i}"]) > 5 for i in range(4)))
    started, n_steps = simulation.clock.now, len(simulation.step_seconds)
    simulation.submit(request("long", 480, seed=9, max_tokens=1))
    simulation.run(until=lambda: Done in kinds(simulation, "long"))
    assert max(simulation.step_seconds[n_steps:]) <= 0.15
    assert all(call[:4] == [1] * 4 for call in simulation.program.calls[n_steps:])
    whole = 0.025 + 0.002 * 480
    assert simulation.clock.now - started <= 2 * whole


@pytest.mark.parametrize(("n_prompt", "pieces"), [(56, [56]), (57, [57]), (68, [68]), (69, [56, 13])])
def test_step_that_ends_a_prompt_may_take_a_little_longer(n_prompt: int, pieces: list[int]) -> None:
    simulation = Simulation(step_ms=150, max_running=8)
    for i in range(4):
        simulation.submit(request(f"stream {i}", seed=i, max_tokens=200, ignore_eos=True))
    simulation.run(until=lambda: all(len(simulation.events[f"stream {i}"]) > 5 for i in range(4)))
    n_steps = len(simulation.step_seconds)
    simulation.submit(request("last", n_prompt, seed=9, max_tokens=1))
    simulation.run(until=lambda: Done in kinds(simulation, "last"))
    assert [call[4:] for call in simulation.program.calls[n_steps:]] == [[n] for n in pieces]
    assert max(simulation.step_seconds[n_steps:]) <= LAST_CHUNK * 0.15


def test_prompt_alone_takes_whole_batches() -> None:
    simulation = Simulation(step_ms=50)
    simulation.submit(request("a", 500, max_tokens=1))
    simulation.run()
    assert simulation.program.calls == [[64], [436]]
    slow = Simulation(step_ms=50, costs={"base": 0.5, "per_row": 0.02})
    slow.submit(request("a", 500, max_tokens=1))
    slow.run()
    assert max(slow.step_seconds) <= 2.0


@pytest.mark.medium
@pytest.mark.parametrize(
    ("step_ms", "base", "per_row", "most"),
    [
        (150, 0.005, 0.0005, 32),
        (150, 0.045, 0.002, 15),  # so many take half of a step
        (150, 0.070, 0.002, 8),
        (0, 0.070, 0.002, 32),
    ],
)
def test_more_texts_run_while_their_steps_are_short(step_ms: int, base: float, per_row: float, most: int) -> None:
    costs = {"base": base, "per_row": per_row}
    simulation = Simulation(step_ms=step_ms, costs=costs, max_running=8, extra_running=24, max_queue=100)
    for i, n in enumerate((1, 40, 300)):  # the time of steps is learned
        simulation.submit(request(f"before {i}", n, seed=i, max_tokens=3))
        simulation.run()
    for i in range(50):
        simulation.submit(request(str(i), 3, seed=i, max_tokens=80, ignore_eos=True))
    simulation.run()
    assert abs(max(map(len, simulation.program.calls)) - most) <= (most not in (8, 32))
    assert all(Done in kinds(simulation, str(i)) for i in range(50))
    assert simulation.result("7") == alone(request("7", 3, seed=7, max_tokens=80, ignore_eos=True))


def test_extra_texts_have_memory_for_whole_contexts() -> None:
    simulation = Simulation(max_running=2, extra_running=6, max_queue=100, n_ctx=64)
    for i, n in enumerate((1, 40)):  # the time of steps is learned
        simulation.submit(request(f"before {i}", n, seed=i, max_tokens=3))
        simulation.run()
    for i in range(12):
        simulation.submit(request(str(i), 32, seed=i, max_tokens=32, ignore_eos=True))
    simulation.run()
    assert max(map(len, simulation.program.calls)) == 8
    assert simulation.scheduler.stats().preemptions == 0


def test_extra_texts_wait_until_the_time_of_steps_is_known() -> None:
    simulation = Simulation(max_running=2, extra_running=20, max_queue=10)
    for i in range(12):  # two of them have a place
        simulation.submit(request(str(i), seed=i))
    with pytest.raises(QueueFullError):
        simulation.submit(request("one more"))
    simulation.step()
    assert simulation.scheduler.n_running == 2


def test_choices_to_come_take_slots_too() -> None:
    simulation = Simulation(max_running=4)
    simulation.submit(request("three", 300, n=3, max_tokens=5, ignore_eos=True))
    simulation.step()
    assert (len(simulation.scheduler.running), simulation.scheduler.running.n_slots) == (1, 3)
    simulation.run(until=lambda: len(simulation.scheduler.running) == 3)
    assert simulation.scheduler.running.n_slots == 3


def test_rows_of_background_requests_beside_prompts_alone() -> None:
    simulation = Simulation(step_ms=50)
    simulation.submit(request("long", 500, max_tokens=1))
    simulation.step()
    planner = simulation.scheduler._planner
    assert planner._background_rows(0) == int(BACKGROUND_SHARE * 0.05 / planner._cost.per_row) == 2


def test_time_outside_of_evaluation_is_a_mean() -> None:
    planner = Simulation().scheduler._planner
    for _ in range(100):
        planner.observe(0.01)
    assert planner._other_s == pytest.approx(0.01, rel=1e-3)


def test_rows_of_logits_of_a_prompt_fit_their_memory() -> None:
    simulation = Simulation(step_ms=0)
    with patch("llamacli.serve.planning._ROW_BYTES", 4 * simulation.model.config.n_vocab * 10):
        simulation.submit(request("a", 45, max_tokens=1, prompt_logprobs=1))
        simulation.run()
    assert simulation.program.calls == [[10]] * 4 + [[5]]


def test_drafts_of_clients_beside_background_requests() -> None:
    simulation = Simulation(step_ms=0, draft_max=4, max_running=2)
    simulation.submit(request("later", 20, background=True, max_tokens=200, ignore_eos=True))
    simulation.submit(request("client", 20, seed=1, max_tokens=100, ignore_eos=True))
    simulation.run(until=lambda: Done in kinds(simulation, "client"))
    both = [call for call in simulation.program.calls[4:] if len(call) == 2]
    assert max(call[0] for call in both) > 1
    assert max(call[1] for call in both) == 1


def test_time_for_pictures_is_what_texts_leave() -> None:
    simulation = Simulation(step_ms=150)
    for i in range(8):
        simulation.submit(request(str(i), 20, seed=i, max_tokens=60, ignore_eos=True))
    simulation.run(until=lambda: [1] * 8 in simulation.program.calls[-20:-10])
    assert simulation.scheduler._planner.picture_s == pytest.approx(0.15 - (0.025 + 8 * 0.002), abs=0.01)


def test_prompts_go_on_when_texts_alone_exceed_the_time() -> None:
    simulation = Simulation(step_ms=20, max_running=8)
    for i in range(4):
        simulation.submit(request(f"stream {i}", seed=i, max_tokens=300, ignore_eos=True))
    simulation.run(until=lambda: all(len(simulation.events[f"stream {i}"]) > 9 for i in range(4)))
    simulation.submit(request("long", 320, seed=9, max_tokens=1))
    before = len(simulation.program.calls)
    simulation.run(until=lambda: Done in kinds(simulation, "long"))
    calls = simulation.program.calls[before:]
    assert len(calls) <= 2 * (320 // MIN_CHUNK) + 2
    assert max(map(max, calls)) == MIN_CHUNK


def test_short_prompts_pass_a_long_one_which_is_not_starved() -> None:
    simulation = Simulation(step_ms=60, max_running=8, max_queue=1000)
    simulation.submit(request("stream", max_tokens=400, ignore_eos=True))
    simulation.run(until=lambda: len(simulation.events["stream"]) > 9)
    simulation.submit(request("long", 500, seed=1, max_tokens=1))
    simulation.step()
    finished: list[int] = []
    for i in range(60):
        simulation.submit(request(f"short {i}", 30, seed=100 + i, max_tokens=1))
        simulation.run(until=lambda i=i: Done in kinds(simulation, f"short {i}"))
        if Done in kinds(simulation, "long"):
            finished.append(i)
            break
    assert finished, "the long prompt made no progress beside new short ones"
    assert Done in kinds(simulation, "short 0")


def test_prompt_with_least_missing_comes_first() -> None:
    simulation = Simulation(step_ms=60, max_running=8)
    simulation.submit(request("stream", max_tokens=400, ignore_eos=True))
    simulation.run(until=lambda: len(simulation.events["stream"]) > 9)
    for i, n in enumerate((400, 300, 60)):
        simulation.submit(request(str(n), n, seed=i + 1, max_tokens=1))
    ends: list[int] = []
    while len(ends) < 3:
        simulation.step()
        ends += [n for n in (400, 300, 60) if n not in ends and Done in kinds(simulation, str(n))]
    assert ends == [60, 300, 400]


@examples(50)
@given(st.lists(st.tuples(st.integers(1, 120), st.integers(0, 3)), max_size=120), st.sampled_from([20, 40, 150]))
def test_no_arrivals_starve_a_prompt(arrivals: list[tuple[int, int]], step_ms: int) -> None:
    """Prompts of any length come at any rate beside a long one."""
    simulation = Simulation(step_ms=step_ms, max_running=12, max_queue=1000, n_ctx=512)
    simulation.submit(request("stream", 1, max_tokens=500, ignore_eos=True))
    simulation.step()
    simulation.submit(request("long", 500, seed=1, max_tokens=1))
    left, n_steps = [*arrivals], 0
    while Done not in kinds(simulation, "long"):
        for _ in range(left[0][1] if left else 0):
            simulation.submit(request(f"short {len(simulation.events)}", left[0][0], seed=len(simulation.events)))
        left = left[1:]
        simulation.step()
        n_steps += 1
        assert n_steps <= 2 * OLDEST_EVERY * -(-500 // MIN_CHUNK) + 12


def test_pairs_of_short_prompts_do_not_starve_a_long_one() -> None:
    """Two chunks in most steps with prompts."""
    simulation = Simulation(step_ms=20, max_running=12, max_queue=1000, n_ctx=512)
    simulation.submit(request("stream", 1, max_tokens=500, ignore_eos=True))
    simulation.step()
    simulation.submit(request("long", 500, seed=1, max_tokens=1))
    n_steps = n_short = 0
    while Done not in kinds(simulation, "long"):
        while sum(Done not in kinds(simulation, f"short {i}") for i in range(n_short)) < 2:
            simulation.submit(request(f"short {n_short}", (25, 15)[n_short % 2], seed=n_short + 2, max_tokens=1))
            n_short += 1
        simulation.step()
        n_steps += 1
        assert n_steps <= 2 * OLDEST_EVERY * -(-500 // MIN_CHUNK) + 12


def test_prompts_that_begin_alike_are_evaluated_once() -> None:
    simulation = Simulation()
    begin = prompt_of(5, 300)
    for i in range(6):
        simulation.submit(request(str(i), prompts=((*begin, 301 + i, 305),), max_tokens=5))
    simulation.run()
    assert sum(map(sum, simulation.program.calls)) < 300 + 6 * (16 + 2 + 5)
    assert sum(last(simulation, str(i)).usage.cached for i in range(6)) >= 5 * 299
    for i in range(6):
        expected = alone(request(str(i), prompts=((*begin, 301 + i, 305),), max_tokens=5))
        assert simulation.result(str(i)) == expected


@given(st.lists(st.integers(1, 512), min_size=1, max_size=12), st.sampled_from([0, 1, 150]), st.floats(1e-4, 0.1))
def test_inputs_of_encoders_are_evaluated_whole_and_all_end(lengths: list[int], step_ms: int, per_row: float) -> None:
    with patch.object(FakeProgram, "needs_whole_input", True):
        costs = {"base": 0.01, "per_row": per_row}
        simulation = Simulation(step_ms=step_ms, pooling=Pooling.MEAN, costs=costs, max_running=4)
        for i, n in enumerate(lengths):
            simulation.submit(EmbeddingRequest(id=str(i), model="m", prompts=(prompt_of(i, n),)))
        for _ in lengths:
            simulation.step()
        assert all(Done in kinds(simulation, str(i)) for i in range(len(lengths)))
        assert sorted(n for call in simulation.program.calls for n in call) == sorted(lengths)
