"""Request router of Ray Serve, by the cost in time of `llamacli.serve.ray.policy`."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from llamacli.serve.ray.messages import Route
from llamacli.serve.ray.view import view_of

MAX_RANKS = 8
"""Replicas that Ray Serve tries in turn before it asks again."""


class CostRouter(RequestRouter):
    """Router that sends a call where it costs the least time."""

    def initialize_state(self, app: str) -> None:
        """Find the application's view; called by Ray Serve."""
        self._view = view_of(app)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Replicas for a call, the cheapest first, one of each rank."""
        if pending_request is not None:  # without it, Ray Serve asks again at once, and blocks its loop
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        route = _route_of(pending_request)
        if route is None:
            return [list(candidate_replicas)]
        if route.only:
            return [[by_name[route.only]]] if route.only in by_name else []
        fleet = self._view.fleet
        order = fleet.order(route.hashes, route.n_tokens, by_name, route.avoid)
        if order and route.call:
            fleet.route(route.call, order[0], route.hashes, route.n_tokens)
        return [[by_name[name]] for name in order[:MAX_RANKS]]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Count a call for its replica; called by Ray Serve."""
        route = _route_of(pending_request)
        if route is not None and route.call:
            self._view.fleet.route(route.call, replica_id.unique_id, route.hashes, route.n_tokens)

    def update_replicas(self, replicas: list[Any]) -> None:
        """Take the present replicas and their reports; called by Ray Serve."""
        super().update_replicas(replicas)
        self._view.update({replica.replica_id.unique_id: replica.routing_stats.get("report") for replica in replicas})


def _route_of(pending_request: Any) -> Route | None:
    arguments = pending_request.args if pending_request is not None else ()
    return next((argument for argument in arguments if isinstance(argument, Route)), None)
