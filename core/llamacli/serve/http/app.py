"""Starlette app of the server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llamacli.errors import PluginError
from llamacli.serve.errors import MethodError, NotFoundError, ServeError
from llamacli.serve.http.call import Call
from llamacli.serve.http.endpoint import Endpoint
from llamacli.serve.http.errors import error_body, headers_of
from llamacli.serve.http.middleware import wrap
from llamacli.serve.http.page import Page
from llamacli.serve.http.routes import APIS, ROUTES, ApiRoute
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.http.sse import to_json
from llamacli.serve.http.state import Server
from llamacli.serve.http.tracing import Traces, traces_of_environment
from llamacli.serve.requests import Engine

LAG_INTERVAL_S = 0.5
EXPIRE_INTERVAL_S = 3600.0

_log = logging.getLogger(__name__)


def create_app(engine: Engine, settings: HttpSettings | None = None) -> ASGIApp:
    """ASGI app that serves an engine; the engine's owner closes it."""
    return app_of(Server(engine, settings or HttpSettings()))


def app_of(server: Server) -> ASGIApp:
    """ASGI app of a server's endpoints."""
    traces = traces_of_environment()
    starlette = Starlette(
        routes=list(_routes(server)),
        lifespan=lambda _: _lifespan(server, traces),
        exception_handlers={HTTPException: _http_error},  # type: ignore[dict-item]
    )
    starlette.router.redirect_slashes = False
    return wrap(starlette, server.settings, traces)


class MethodNotAllowed:
    """ASGI app that refuses all methods.

    The header Allow names those of its path.
    """

    def __init__(self, allowed: Iterable[str]):
        self._headers = {"Allow": ", ".join(allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse one request."""
        raise HTTPException(405, headers=self._headers)


def _routes(server: Server) -> Iterator[BaseRoute]:
    routes = (*ROUTES, *_added())

    @functools.cache
    def document() -> Any:
        from llamacli.serve.http.openapi import description  # which imports all handlers

        return description(routes)

    async def openapi(call: Call) -> None:
        await call.respond(await call.server.run(document))

    own = [ApiRoute("GET", ("/openapi.json",), openapi, public=True)]
    if server.settings.page is None:
        own.append(ApiRoute("GET", ("/",), root, public=True))  # HEAD comes with it
    methods: dict[str, list[str]] = {}
    for route in (*routes, *own):
        endpoint = Endpoint(route, server)
        for path in route.paths:
            methods.setdefault(path, []).append(route.method)
            yield Route(path, endpoint, methods=[route.method])
    for path, allowed in methods.items():  # before the page, whose mount takes every path
        yield Route(path, MethodNotAllowed(allowed))
    if server.settings.page is not None:
        yield Mount("/", Page(server.settings.page))


def _added() -> Iterator[ApiRoute]:
    """Routes of other distributions; faulty ones are logged and left out."""
    taken = {(route.method, path) for route in ROUTES for path in route.paths}
    for entry in importlib.metadata.entry_points(group=APIS):
        try:
            routes = tuple(entry.load())
            wrong = next((route for route in routes if not isinstance(route, ApiRoute)), None)
            if wrong is not None:
                raise PluginError(f"{wrong!r} is not an ApiRoute")
            new = {(route.method, path) for route in routes for path in route.paths}
            if new & taken:
                raise PluginError(f"there is a route of {' '.join(min(new & taken))} already")
        except Exception as error:
            _log.error("the API %s of %s is left out: %s", entry.name, entry.value, f"{type(error).__name__}: {error}")
            continue
        taken |= new
        yield from routes


async def root(call: Call) -> None:
    """Greeting at `/` of a server without a page."""
    await call.respond_bytes(
        b"llamacli is running; its API is described in /openapi.json\n", "text/plain; charset=utf-8"
    )


@contextlib.asynccontextmanager
async def _lifespan(server: Server, traces: Traces | None) -> AsyncIterator[None]:
    """Go on with stored work, and keep watch, while the app runs."""
    work = _measure_lag(server), _expire(server), server.mcp.tools()
    watches = [asyncio.create_task(one) for one in work]
    if server.store.unfinished("response"):
        from llamacli.serve.http.openai.stored import resume  # which imports the handlers

        resume(server)
    if server.store.unfinished("batch"):
        from llamacli.serve.http.batches import resume as resume_batches

        resume_batches(server)
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()
        await server.jobs.close()
        await server.mcp.close()
        if traces is not None:
            await server.run(traces.close)
        server.close()


async def _expire(server: Server) -> None:
    """Remove what is too old, now and then."""
    while True:
        try:
            await server.run(server.store.expire)
        except ServeError as error:
            _log.error("old objects cannot be removed: %s", error)
        await asyncio.sleep(EXPIRE_INTERVAL_S)


async def _measure_lag(server: Server) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(LAG_INTERVAL_S)
        server.metrics.observe_lag(max(0.0, time.monotonic() - before - LAG_INTERVAL_S))


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    if error.status_code == 405:
        failure: ServeError = MethodError(f"{path} does not take {request.method}")
    else:
        failure = NotFoundError(f"there is no {path}")
    headers = {**(error.headers or {}), **headers_of(failure)}
    return Response(to_json(error_body(path)(failure)), failure.status, headers, "application/json")
