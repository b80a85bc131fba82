"""View of the replicas in the ingress: loads, metrics and states."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping

from llamacli.serve.metrics import LoadStats, ModelStats
from llamacli.serve.ray.messages import Report
from llamacli.serve.ray.policy import Fleet
from llamacli.serve.ray.stats import Totals


class View:
    """Replicas of an application, as their reports describe them.

    The router updates it in its thread; the engine reads it.
    """

    def __init__(self, ingress: str):
        self.fleet = Fleet(ingress)
        self._lock = threading.Lock()
        self._totals, self._states = Totals(), dict[str, str]()
        self._reports: dict[str, bytes] = {}

    def update(self, reports: Mapping[str, bytes | None]) -> None:
        """Set which replicas there are, with their reports, None for none yet."""
        with self._lock:
            self.fleet.keep(reports)
            self._totals.keep(reports)
            self._states = {name: state for name, state in self._states.items() if name in reports}
            new = {name: data for name, data in reports.items() if data and data != self._reports.get(name)}
            self._reports = {name: data for name, data in reports.items() if data}
            for name, data in new.items():
                report: Report = pickle.loads(data)
                self.fleet.report(name, report.load, report.received)
                self._totals.update(name, report.stats, report.loads)
                self._states[name] = report.status

    def stats(self) -> ModelStats:
        """Numbers of all replicas together."""
        with self._lock:
            return self._totals.sum()

    def loads(self) -> LoadStats:
        """Loads of all replicas together."""
        with self._lock:
            return self._totals.loads()

    @property
    def status(self) -> str:
        """State of the best replica: "ok", "loading" or "stuck"."""
        with self._lock:
            states = {self._states.get(name, "ok") for name in self.fleet.replicas}
        return next((state for state in ("ok", "loading", "stuck") if state in states), "loading")


_views: dict[str, View] = {}


def view_of(app: str, ingress: str = "") -> View:
    """View of an application, which its router and its engine share."""
    return _views.setdefault(app, View(ingress))


def forget_view(app: str) -> None:
    """Drop the view of an application."""
    _views.pop(app, None)
