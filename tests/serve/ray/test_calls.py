"""Calls of fake replicas: full queues, deaths, silence, updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import attrs
import pytest

from llamacli.serve.errors import InternalError, PromptTooLongError, QueueFullError, ShuttingDownError
from llamacli.serve.ray import calls
from llamacli.serve.ray.calls import MAX_REFUSALS, Answers, Caller, Faults, OpenCall
from llamacli.serve.ray.messages import Hello, Route
from llamacli.serve.ray.policy import Fleet
from llamacli.serve.requests import (
    Admitted,
    Done,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    TextDelta,
    Timings,
    Usage,
)
from llamacli.serve.settings import MAX_LOST
from llamacli.serve.streams import EventStream

TEXT = "once upon a time"
WHOLE: list[Event] = [Admitted(0.0), *(TextDelta(0, letter) for letter in TEXT), Finished(0, "stop")]
END: Event = Done(Usage(1), Timings(0, 0, 0))


class DiedError(Exception):
    pass


class BusyError(Exception):
    pass


class MissingError(Exception):
    pass


SILENT = "silent"
Script = Sequence[list[Event] | Exception | str]
"""Answers after the name; an exception is raised, SILENT waits for ever."""


@attrs.define
class FakeAnswers:
    replica: str
    script: Script
    greets: bool = True
    cancelled: bool = False

    async def __aiter__(self) -> AsyncIterator[Hello | list[Event]]:
        if self.greets:
            yield Hello(self.replica)
        for answer in self.script:
            await asyncio.sleep(0)
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, str):
                await asyncio.sleep(60)
            else:
                yield answer

    def cancel(self) -> None:
        self.cancelled = True


class FakeCluster:
    """Replicas that play a script for each call, in alphabetical order."""

    def __init__(self, scripts: dict[str, Callable[[int], Script]], greets: bool = True):
        self.fleet = Fleet()
        self.fleet.keep(scripts)
        self.scripts, self.greets = scripts, greets
        self.answers: list[FakeAnswers] = []

    def send(self, request: Any, route: Route) -> Answers:
        order = sorted(self.fleet.replicas, key=lambda name: (name in route.avoid, name))
        self.fleet.route(route.call, order[0], route.hashes, route.n_tokens)
        made = FakeAnswers(order[0], self.scripts[order[0]](len(self.answers)), self.greets)
        self.answers.append(made)
        return made

    def run(self, **options: Any) -> list[Event]:
        """Events that the client gets of one request."""

        async def run() -> list[Event]:
            one = OpenCall(GenerationRequest(id="x", model="m", prompts=((1,),)), EventStream("x"))
            faults = Faults((DiedError,), (BusyError,), (MissingError,))
            await asyncio.wait_for(Caller(self.send, self.fleet, faults, 0.05, **options).run("i/1", one), 10)
            return await one.stream.take(1.0)

        found = asyncio.run(run())
        assert all(answers.cancelled for answers in self.answers), "no call is left open"
        return found

    @property
    def called(self) -> list[str]:
        return [answers.replica for answers in self.answers]


def good(_: int) -> Script:
    return [[event] for event in [*WHOLE, END]]


def texts(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def refused(seconds: int) -> Callable[[int], Script]:
    return lambda _: [[Failed(QueueFullError("full", retry_after=seconds))]]


def error_of(events: list[Event]) -> Any:
    (failed,) = [event for event in events if isinstance(event, Failed)]
    return failed.error


def test_one_replica_is_enough() -> None:
    cluster = FakeCluster({"a": good, "b": good})
    events = cluster.run()
    assert (texts(events), events[-1], cluster.called) == (TEXT, END, ["a"])


@pytest.mark.parametrize("n", range(0, len(WHOLE) + 1, 3))
@pytest.mark.parametrize("end", [DiedError(), [Failed(ShuttingDownError("bye"))], SILENT, None], ids=str)
def test_a_lost_replica_is_not_seen(n: int, end: Any) -> None:
    tail = [] if end is None else [end]
    cluster = FakeCluster({"a": lambda _: [*([event] for event in WHOLE[:n]), [], *tail], "b": good})
    events = cluster.run(silence_s=0.02)
    assert (texts(events), events[-1], cluster.called) == (TEXT, END, ["a", "b"])
    assert [type(event) for event in events].count(Admitted) == 1
    if end is SILENT:
        assert cluster.fleet.order((), 1) == ["b", "a"], "the silent one comes last"


def test_silence_before_the_first_answer_is_that_of_the_replica_it_was_sent_to() -> None:
    cluster = FakeCluster({"a": lambda _: [SILENT], "b": lambda n: [SILENT] if n < 2 else good(n)}, greets=False)
    error = error_of(cluster.run(silence_s=0.01))
    assert isinstance(error, InternalError)
    assert set(cluster.called) == {"a", "b"}


def test_a_request_that_loses_every_replica_fails() -> None:
    cluster = FakeCluster({name: lambda _: [DiedError()] for name in "abcdef"})
    error = error_of(cluster.run())
    assert str(error) == f"{MAX_LOST} replicas were lost during the request"
    assert len(cluster.called) == MAX_LOST


def test_a_full_replica_is_passed_by() -> None:
    cluster = FakeCluster({"a": refused(9), "b": good})
    assert (texts(cluster.run()), cluster.called) == (TEXT, ["a", "b"])


def test_full_queues_everywhere_refuse_with_the_shortest_wait() -> None:
    cluster = FakeCluster({"a": refused(9), "b": refused(3)})
    error = error_of(cluster.run())
    assert (type(error), error.retry_after) == (QueueFullError, 3)
    many = FakeCluster({name: refused(5) for name in "abcdefgh"})
    assert isinstance(error_of(many.run()), QueueFullError)
    assert len(many.called) == MAX_REFUSALS


def test_a_request_that_has_begun_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PAUSE_S", 0.001)
    cluster = FakeCluster({"a": lambda _: [WHOLE[:4], DiedError()], "b": lambda n: good(n) if n > 3 else refused(1)(n)})
    assert texts(cluster.run()) == TEXT
    assert cluster.called == ["a", "b", "b", "b", "b"]


def test_errors_of_the_request_are_passed_on() -> None:
    cluster = FakeCluster({"a": lambda _: [[Failed(PromptTooLongError(9, 8))]], "b": good})
    assert isinstance(error_of(cluster.run()), PromptTooLongError)
    assert cluster.called == ["a"]


@pytest.mark.parametrize(
    ("fault", "code"), [(BusyError(), "queue_full"), (MissingError(), "loading"), (ValueError("secret"), None)], ids=str
)
def test_faults_of_the_cluster_are_errors_of_the_server(fault: Exception, code: str | None) -> None:
    cluster = FakeCluster({"a": lambda _: [fault]}, greets=False)
    error = error_of(cluster.run())
    assert error.code == code
    assert "secret" not in str(error)


def test_a_call_without_a_replica_fails_in_time() -> None:
    cluster = FakeCluster({"a": lambda _: [SILENT]}, greets=False)
    cluster.fleet.route = lambda *_: None  # type: ignore[method-assign]
    error = error_of(cluster.run(silence_s=0.02))
    assert (error.code, error.retry_after) == ("loading", 5)
