"""Ends of requests over a fake program: time, errors, cancellation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_serving import NAN, POISON, Simulation, alone, kinds, last, prompt_of, request
from llamacli.chat.messages import Piece
from llamacli.chat.syntax import Reader
from llamacli.serve.errors import (
    InternalError,
    QueueTimeoutError,
)
from llamacli.serve.requests import (
    Done,
    EmbeddingRequest,
    Failed,
    Finished,
    ReplyFormat,
)


def test_waiting_too_long_fails() -> None:
    simulation = Simulation(max_running=1, queue_timeout=0.5)
    simulation.submit(request("a", max_tokens=100, ignore_eos=True))
    simulation.step()
    simulation.submit(request("b"))
    simulation.run()
    (failed,) = simulation.events["b"]
    assert isinstance(failed.error, QueueTimeoutError)
    assert failed.error.retry_after >= 1
    assert Done in kinds(simulation, "a")


def test_running_too_long_ends_the_text() -> None:
    simulation = Simulation(request_timeout=1.0)
    simulation.submit(request("a", max_tokens=400, ignore_eos=True, n=2))
    simulation.run()
    ends = [event for event in simulation.events["a"] if isinstance(event, Finished)]
    assert [(end.reason, end.timed_out) for end in ends] == [("length", True)] * 2
    assert isinstance(last(simulation, "a"), Done)
    slow = Simulation(request_timeout=0.01, step_ms=100)
    slow.submit(request("running", max_tokens=5, ignore_eos=True))
    slow.submit(request("long", 400, seed=1, n=2))
    slow.submit(EmbeddingRequest(id="vector", model="m", prompts=(prompt_of(1, 300),)))
    slow.run()
    assert kinds(slow, "long")[-3:] == [Finished, Finished, Done]
    assert isinstance(last(slow, "vector"), Failed)


def test_time_of_a_text_ends_it_once_it_has_a_newline() -> None:
    simulation = Simulation()
    for name in ("line", "none"):
        simulation.submit(request(name, max_tokens=200, ignore_eos=True, max_seconds=1.0))
    running = simulation.scheduler.running
    simulation.run(lambda: len(running) == 2 and all(sequence.text for sequence in running))
    (sequence,) = (one for one in running if one.request.message.id == "line")
    sequence.text.has_newline = True
    simulation.run()
    line, none = (last(simulation, name).usage.generated for name in ("line", "none"))
    assert (simulation.events["line"][-2].reason, simulation.events["line"][-2].timed_out) == ("length", True)
    assert 0 < line < none == 200


class _AllReasoning(Reader):
    """Reader of replies that are reasoning, known at their end."""

    def _read(self, *, final: bool) -> Iterator[Piece]:
        if final and self._held:
            yield Piece(self._held, reasoning=True)


class _Late:
    """Syntax of `_AllReasoning`."""

    markers = ()

    def reader(self, prompt: str, *, tools: bool) -> Reader:
        return _AllReasoning()

    def reasoning_markers(self, prompt: str) -> tuple[str, ...]:
        return ()


def test_usage_counts_reasoning_that_a_time_limit_ends() -> None:
    simulation = Simulation(request_timeout=1.0)
    simulation.submit(request("a", max_tokens=400, ignore_eos=True, reply=ReplyFormat(syntax=_Late())))
    simulation.run()
    usage = last(simulation, "a").usage
    assert usage.reasoning == usage.generated > 0


@pytest.mark.parametrize("token", [POISON, NAN])
def test_one_bad_request_does_not_fail_others(token: int, caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation()
    for i in range(3):
        simulation.submit(request(f"good {i}", seed=i + 1, n=2))
    simulation.submit(request("bad", prompts=((*prompt_of(9, 5), token),), n=2))
    for i in range(3, 5):
        simulation.submit(request(f"good {i}", seed=i + 1))
    simulation.run()
    assert isinstance(last(simulation, "bad").error, InternalError)
    assert "request bad failed" in caplog.text
    for i in range(5):
        assert simulation.result(f"good {i}") == alone(request(f"good {i}", seed=i + 1, n=2 if i < 3 else 1))
    simulation.scheduler.memory.prefixes.clear()
    assert simulation.pool.n_used_bytes == 0


def test_fail_ends_all_requests_or_those_that_wait() -> None:
    simulation = Simulation(max_running=1)
    for name in "abc":
        simulation.submit(request(name, seed=ord(name)))
    simulation.step()
    error = QueueTimeoutError("over")
    assert [state.message.id for state, _ in simulation.scheduler.fail(error, waiting_only=True)] == ["b", "c"]
    assert [(state.message.id, event) for state, event in simulation.scheduler.fail(error)] == [("a", Failed(error))]
    assert not simulation.scheduler.busy
    simulation.scheduler.close()
    assert simulation.pool.n_used_bytes == 0


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "preempted"])
def test_cancelled_in_any_phase(phase: str) -> None:
    simulation = Simulation(max_running=2)
    if phase == "prefill":
        simulation.submit(request("other", seed=4, max_tokens=30, ignore_eos=True))
        simulation.step()
    state = simulation.submit(request("a", 400 if phase == "prefill" else 20, max_tokens=50, ignore_eos=True))
    if phase == "prefill":
        simulation.step()
        assert 0 < state.n_processed < 400
    elif phase != "waiting":
        simulation.run(until=lambda: state.n_generated > 3)
    if phase == "preempted":
        simulation.scheduler.running.preempt(simulation.scheduler.running.sequences[0])
    n_events = len(simulation.events["a"])
    simulation.scheduler.cancel(state)
    simulation.step()
    assert simulation.scheduler.stats().cancelled == {phase: 1}
    simulation.run()
    assert len(simulation.events["a"]) == n_events
    simulation.scheduler.memory.prefixes.clear()
    assert simulation.pool.n_used_bytes == 0
