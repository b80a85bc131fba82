"""ASGI middleware.

Request ids, Host check, CORS, access log, last line of defence.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamacli.serve.errors import HostError, NotFoundError
from llamacli.serve.http.access_log import AccessLine
from llamacli.serve.http.errors import as_serve_error, error_body, headers_of
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.http.sse import to_json
from llamacli.serve.http.tracing import Traces

MAX_REQUEST_ID = 128
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

_EXPOSED = "x-request-id, retry-after, warning"
_PREFLIGHT_S = "600"


class RequestContext:
    """Outermost middleware.

    Gives each request an id (the client's own if it is short and printable) and a line in the access log, in the
    scope's state under `request_id` and `access`. An exception that gets here is answered with 500, without its text;
    after the response has begun the connection is cut. `traces` record what the log has.
    """

    def __init__(self, app: ASGIApp, traces: Traces | None = None):
        self._app, self._traces = app, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        access = AccessLine(scope["method"], scope["path"], request_id)
        state = scope.setdefault("state", {})
        state["request_id"], state["access"] = request_id, access
        state["abort"] = getattr(getattr(getattr(send, "__self__", None), "transport", None), "abort", None)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                access.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            failure = as_serve_error(error, request_id)
            if access.status is None:
                await send_error(scope, send_with_id, failure)
        finally:
            access.write()
            if self._traces is not None:
                self._traces.record(access, Headers(scope=scope))


class HostCheck:
    """Refusal of requests with a header Host of another machine.

    On loopback, this keeps web pages from reaching the server under a name of theirs (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]):
        self._app, self._allowed = app, frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        given = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if given is not None:  # clients of HTTP/1.0 may leave it out, browsers never do
            host = host_name(given)
            if host not in self._allowed and not host.endswith(".localhost"):
                error = HostError(f"the header Host names {host!r}; --allowed-host accepts further names")
                await send_error(scope, send, error)
                return
        await self._app(scope, receive, send)


class Prefix:
    """Path that comes before those of all endpoints, and of the page."""

    def __init__(self, app: ASGIApp, prefix: str):
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path == self._prefix:  # relative addresses of the page need the slash
            await send_response(send, 307, {"location": f"{path}/"}, b"")
        elif path.startswith(f"{self._prefix}/"):
            await self._app({**scope, "path": path.removeprefix(self._prefix)}, receive, send)
        else:
            await send_error(scope, send, NotFoundError(f"there is no {path}"))


class Cors:
    """Cross-origin resource sharing for listed origins.

    "*" is any, "localhost" any on this machine.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]):
        self._app, self._origins = app, frozenset(origins)

    def _allows(self, origin: str) -> bool:
        return bool({"*", origin} & self._origins) or ("localhost" in self._origins and _is_local(origin))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        asks = scope["type"] == "http" and scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if origin is None or not self._allows(origin):
            # Without the header that allows it, a browser sends nothing after a preflight request.
            await (send_response(send, 200, {"vary": "Origin"}, b"") if asks else self._app(scope, receive, send))
            return
        given = {"access-control-allow-origin": origin, "vary": "Origin", "access-control-expose-headers": _EXPOSED}
        if asks:
            given |= {
                "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
                "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
                "access-control-max-age": _PREFLIGHT_S,
            }
            if "access-control-request-private-network" in headers:  # Chrome asks before a page reaches the loopback
                given["access-control-allow-private-network"] = "true"
            await send_response(send, 200, given, b"")
            return

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(given)
            await send(message)

        await self._app(scope, receive, send_with_origin)


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def wrap(app: ASGIApp, settings: HttpSettings, traces: Traces | None = None) -> ASGIApp:
    """Put the middleware that the settings ask for around an app."""
    app = Prefix(app, settings.api_prefix) if settings.api_prefix else app
    app = Cors(app, settings.cors_origins) if settings.cors_origins else app
    if all(map(is_loopback, settings.hosts)):
        app = HostCheck(app, {*LOOPBACK_NAMES, *settings.hosts, *settings.allowed_hosts})
    return RequestContext(app, traces)


def is_loopback(host: str) -> bool:
    """True for a name or address of the loopback."""
    return host in LOOPBACK_NAMES or host.startswith("127.") or host.endswith(".localhost")


def host_name(header: str) -> str:
    """Host name of the header Host, without a port, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


async def send_response(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    """Send a whole response."""
    if status != 204:  # which has no body, and HTTP allows no length there
        headers = {**headers, "content-length": str(len(body))}
    encoded = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items() if value]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def send_error(scope: Scope, send: Send, error: Any) -> None:
    """Send an error in the dialect of the path."""
    body = scope.get("state", {}).get("error_body", error_body(scope["path"]))(error)
    headers = {"content-type": "application/json", **headers_of(error)}
    await send_response(send, error.status, headers, to_json(body))


def _request_id(given: str | None) -> str:
    if given and len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return secrets.token_hex(8)
