"""View of the replicas in the ingress."""

from __future__ import annotations

import pickle

from llamacli.serve.metrics import Counters, LoadStats
from llamacli.serve.ray.messages import Report
from llamacli.serve.ray.policy import Load
from llamacli.serve.ray.view import View, forget_view, view_of


def report(n: int, status: str = "ok") -> bytes:
    counters = Counters()
    counters.generation_tokens += n
    return pickle.dumps(Report(Load(running=n), ("i/1",), status, counters.snapshot(running=n), LoadStats(1, 0, n)))


def test_reports_change_loads_metrics_and_states() -> None:
    view = View("i")
    assert view.status == "loading", "there is no replica"
    view.update({"a": None})
    assert view.status == "ok"
    view.fleet.route("i/1", "a", (), 10)
    view.update({"a": report(2, "stuck"), "b": report(3)})
    assert (view.fleet.load("a").running, view.fleet.load("b").running) == (2, 3)
    assert (view.stats().running, view.status) == (5, "ok")
    view.update({"a": report(2, "stuck")})
    assert (view.stats().running, view.stats().generation_tokens, view.status) == (2, 5, "stuck")
    assert view.loads() == LoadStats(2, 0, 2), "one has gone, with its memory"


def test_the_router_and_the_engine_share_a_view() -> None:
    first = view_of("test app", "i")
    assert view_of("test app") is first
    forget_view("test app")
    assert view_of("test app") is not first
    forget_view("test app")
