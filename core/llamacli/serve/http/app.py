"""Starlette app of the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llamacli.serve.errors import MethodError, NotFoundError, ServeError
from llamacli.serve.http import local
from llamacli.serve.http.call import Call, Endpoint, Server
from llamacli.serve.http.errors import headers_of, ollama_body, openai_body
from llamacli.serve.http.middleware import wrap
from llamacli.serve.http.openapi import description
from llamacli.serve.http.page import Page
from llamacli.serve.http.routes import ROUTES
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.http.sse import to_json
from llamacli.serve.requests import Engine

LAG_INTERVAL_S = 0.5


def create_app(engine: Engine, settings: HttpSettings | None = None) -> ASGIApp:
    """ASGI app that serves an engine; the engine's owner closes it."""
    server = Server(engine, settings or HttpSettings())
    starlette = Starlette(
        routes=list(_routes(server)),
        lifespan=lambda _: _lifespan(server),
        exception_handlers={HTTPException: _http_error},  # type: ignore[dict-item]
    )
    starlette.router.redirect_slashes = False
    return wrap(starlette, server.settings)


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
    for route in ROUTES:
        endpoint = Endpoint(route.handler, server, route.name, public=route.public, queued=route.queued)
        for path in route.paths:
            yield Route(path, endpoint, methods=[route.method])
    methods: dict[str, list[str]] = {}
    for route in ROUTES:
        for path in route.paths:
            methods.setdefault(path, []).append(route.method)
    for path, allowed in methods.items():  # before the page, whose mount takes every path
        yield Route(path, MethodNotAllowed(allowed))
    document = description(ROUTES)

    async def openapi(call: Call) -> None:
        await call.respond(document)

    yield Route("/openapi.json", Endpoint(openapi, server, "/openapi.json", public=True), methods=["GET"])
    if server.settings.page is None:
        yield Route("/", Endpoint(local.root, server, "/", public=True), methods=["GET"])
    else:
        yield Mount("/", Page(server.settings.page))


@contextlib.asynccontextmanager
async def _lifespan(server: Server) -> AsyncIterator[None]:
    """Measure the delay of the event loop while the app runs."""
    lag = asyncio.create_task(_measure_lag(server))
    try:
        yield
    finally:
        lag.cancel()
        server.close()


async def _measure_lag(server: Server) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(LAG_INTERVAL_S)
        server.metrics.observe_lag(max(0.0, time.monotonic() - before - LAG_INTERVAL_S))


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Response to an unknown path, method or static file."""
    path = request.url.path
    if error.status_code == 405:
        failure: ServeError = MethodError(f"{path} does not take {request.method}")
    else:
        failure = NotFoundError(f"there is no {path}")
    body = ollama_body(failure) if path.startswith("/api/") else openai_body(failure)
    headers = {**(error.headers or {}), **headers_of(failure)}
    return Response(to_json(body), failure.status, headers, "application/json")
