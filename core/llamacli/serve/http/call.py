"""Calls of endpoints.

Bodies in, JSON or streams out, runs of the engine between.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, get_origin

import attrs
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from llamacli.model import Model
from llamacli.serve.errors import (
    BadRequestError,
    BodyTimeoutError,
    BodyTooLargeError,
    LoadingError,
    MediaTypeError,
    ServeError,
)
from llamacli.serve.http.access_log import AccessLine
from llamacli.serve.http.bodies import convert, parse
from llamacli.serve.http.errors import as_serve_error
from llamacli.serve.http.inner import Exchange
from llamacli.serve.http.keys import ApiKey
from llamacli.serve.http.middleware import send_error, send_response
from llamacli.serve.http.recordings import Recording
from llamacli.serve.http.schemas.foreign import unknown_fields
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.http.sse import PING, SSE_HEADERS, to_json
from llamacli.serve.http.state import Server
from llamacli.serve.requests import (
    Admitted,
    Done,
    Event,
    Failed,
    Finished,
    ModelInfo,
    Pin,
    Request,
    Stream,
    TextDelta,
)

T = TypeVar("T")
P = ParamSpec("P")

DISCARD_S, DISCARD_BYTES = 2.0, 64 << 20
"""Limits up to which the rest of a refused body is read, so that its sender gets to read the response."""

ROOM_INTERVAL_S = 0.1
"""Seconds between looks for room, while other models are in use."""

LINGER_S = 1.0
"""Seconds that a client has to read an error event, and to close, before the connection is cut."""

WATCHES = 8
"""Looks at a stream in the time after which it is silent, or its client too slow."""

LARGE_BODY = 64 << 10
"""Bytes of a body above which it is parsed in the pool, so that the event loop stays free."""

MAX_UNKNOWN = 1000
"""Names of unknown fields that the log has, once each."""

LONG_BODY = 256 << 10
"""Bytes of a body above which its texts wait for a thread of their own: they take seconds."""

_log = logging.getLogger(__name__)


class DisconnectedError(Exception):
    """The client has closed the connection."""


class Call:
    """Call of an endpoint: one HTTP request and its response."""

    def __init__(self, server: Server, scope: Scope, receive: Receive, send: Send):
        self.server, self.scope = server, scope
        self.headers = Headers(scope=scope)
        self.request_id: str = scope["state"]["request_id"]
        self.access: AccessLine = scope["state"]["access"]
        self.key = self.owner = ""
        self.api_key: ApiKey | None = None
        self.background = False
        self.stream_of_events: Stream | None = None
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self._receive, self._send = receive, send
        self._body_read = False
        self._n_body = 0
        self._pins: dict[str, Pin] = {}
        self._warning: dict[str, str] = {}
        self._write_began: float | None = None
        self._write_ended = 0.0

    @property
    def settings(self) -> HttpSettings:
        """Settings of the server."""
        return self.server.settings

    @property
    def started(self) -> bool:
        """True once the response has begun."""
        return self.access.status is not None

    def page(self, most: int = 100) -> dict[str, Any]:
        """Options of a page: `limit`, `after` and `ascending`.

        Raises BadRequestError.
        """
        limit, order = self.query.get("limit", "20"), self.query.get("order", "desc")
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= most):
            raise BadRequestError(f"limit: {limit!a} is not a number from 1 to {most}", "limit")
        if order not in ("asc", "desc"):
            raise BadRequestError(f"order: {order!a} is neither asc nor desc", "order")
        return {"limit": int(limit), "after": self.query.get("after"), "ascending": order == "asc"}

    # --- request

    def check_key(self) -> None:
        """Check the API key, and note which client it is. Raises ApiKeyError."""
        inner: Exchange | None = self.scope["state"].get("exchange")
        if inner is not None:
            self.key, self.owner, self.background = inner.key, inner.owner, inner.background
            self.api_key = self.server.keys.of(self.owner)
            return
        self.api_key = self.server.keys.find(self.headers)
        if self.api_key is None:
            client = self.scope.get("client")
            self.key = client[0] if client else ""
            return
        self.key = self.owner = self.api_key.owner
        self.access.fields["key"] = self.api_key.name

    async def body(self, kind: Any) -> Any:
        """Body of the request, checked against a schema.

        For an array that is `list[schema]`. Raises MediaTypeError, BodyTooLargeError, BodyTimeoutError,
        BadRequestError: for fields that are refused too, and for unknown ones if the settings say so.
        """
        raw = await self._parsed_body(functools.partial(parse, kind=get_origin(kind) or dict))
        return self.checked(raw, kind)

    def checked(self, raw: Any, kind: Any, *, strict: bool = True) -> Any:
        """Body of a request, or fields of a form, checked."""
        value = convert(raw, kind, strict=strict)
        self._warn(dict(unknown_fields(raw, value)))
        return value

    def _warn(self, unknown: Mapping[str, str | None]) -> None:
        """Refuse unknown fields, or name them in header and log."""
        if not unknown:
            return
        texts = [f"{path!a}" + (f" (is it {near!r}?)" if near else "") for path, near in unknown.items()]
        if self.settings.strict:
            raise BadRequestError(f"unknown fields: {', '.join(texts)}", next(iter(unknown)), "unknown_parameter")
        text = ", ".join(texts)[:MAX_UNKNOWN].replace('"', "'")
        self._warning = {"warning": f'299 llamacli "unknown fields without effect: {text}"'}
        new = unknown.keys() - self.server.unknown
        if new and len(self.server.unknown) < MAX_UNKNOWN:
            self.server.unknown.update(new)
            _log.warning("request %s: %s: unknown fields without effect: %s", self.request_id, self.scope["path"], text)

    async def _parsed_body(self, parse: Callable[[bytes], T]) -> T:
        """Parsed body of the request.

        Raises MediaTypeError, BodyTooLargeError, BodyTimeoutError, BadRequestError.
        """
        declared = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page of another origin can send a body without a type, or a form, and without asking first. The examples
        # of ollama's documentation send what curl calls a form.
        usual = {"application/json", *([] if "origin" in self.headers else [""])}
        if self.scope["path"].startswith("/api/") and "origin" not in self.headers:
            usual.add("application/x-www-form-urlencoded")
        if declared not in usual:
            raise MediaTypeError(f"the body is {declared or 'without a type'}; it must be application/json")
        try:
            async with asyncio.timeout(self.settings.read_timeout):
                data = await self._read()
        except TimeoutError:
            self._body_read = True  # no more of it is waited for
            seconds = self.settings.read_timeout
            raise BodyTimeoutError(f"the body did not arrive within {seconds:g} seconds") from None
        if self.settings.log_texts:
            _log.info("request %s: %s", self.request_id, data.decode("utf-8", "replace"))
        return await self.server.run(parse, data) if len(data) > LARGE_BODY else parse(data)

    async def compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the body's texts in a thread.

        Short texts do not wait for long ones. A long text that still waits when its client leaves is not begun: then
        this raises DisconnectedError.
        """
        if self._n_body <= LONG_BODY:
            return await self.server.run(function, *args, **kwargs)
        call = functools.partial(function, *args, **kwargs)
        return await self.unless_gone(_in_thread(self.server.long_texts, call))

    async def model(self, name: str | None, *, loads: bool = False) -> tuple[ModelInfo, Model]:
        """Loaded model of a name, and what the engine knows of it.

        With `loads` it is loaded whatever the settings say of requests.
        It stays loaded until the call ends, or `run` has submitted a request. Waits for the load, and for room where
        other models are in use, up to `load_timeout`. Raises UnknownModelError, LoadingError, DisconnectedError.
        """
        info = self.server.find_model(name)
        if not (info.loaded or loads or self.settings.autoload):
            raise BadRequestError(f"the model {info.name!r} is not loaded: POST /models/load loads it", "model")
        if info.name not in self._pins:
            await self.unless_gone(self._pin(info.name))
        self.access.fields["model"] = info.name
        return self.server.find_model(info.name), self._pins[info.name].model

    @property
    def wanted_model(self) -> str | None:
        """Name in the query parameter `model`, None for the first model.

        As for llama-server's router.
        """
        return self.query.get("model")

    @property
    def query(self) -> QueryParams:
        """Query parameters."""
        return QueryParams(self.scope.get("query_string", b""))

    async def _pin(self, name: str) -> None:
        deadline = time.monotonic() + self.settings.load_timeout
        while True:
            try:
                self._pins[name] = await self.server.engine.pin(name)
                return
            except LoadingError:
                if time.monotonic() >= deadline and not self.background:
                    raise
            await asyncio.sleep(ROOM_INTERVAL_S)

    async def parts(self, types: Sequence[str] = ()) -> AsyncIterator[bytes]:
        """Parts of a body of any size, as they come.

        `types` are those allowed, bytes by default.

        Raises MediaTypeError, BodyTimeoutError, DisconnectedError.
        """
        declared = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Types that a web page of another origin cannot send without asking first; ollama's client says JSON.
        usual = {"application/octet-stream", "application/json", *([] if "origin" in self.headers else [""])}
        if declared not in (types or usual):
            raise MediaTypeError(f"the body is {declared or 'without a type'}; it must be application/octet-stream")
        while not self._body_read:
            try:
                async with asyncio.timeout(self.settings.read_timeout):
                    message = await self._receive()
            except TimeoutError:
                raise BodyTimeoutError("no part of the body came in time") from None
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            self._body_read = not message.get("more_body", False)
            yield message.get("body", b"")

    async def _read(self) -> bytes:
        limit = self.settings.max_body
        too_large = BodyTooLargeError(f"the body is larger than the limit of {limit} bytes")
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        chunks, n_bytes = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            chunks.append(message.get("body", b""))
            n_bytes += len(chunks[-1])
            self._body_read = not message.get("more_body", False)
            if n_bytes > limit:
                raise too_large
            if self._body_read:
                self._n_body = n_bytes
                return b"".join(chunks)

    async def discard_body(self) -> None:
        """Read the rest of the body, within limits.

        A connection that is closed with data unread is reset, and the client may lose the response.
        """
        if "expect" in self.headers or "_gone" in self.__dict__:
            return  # its sender waits for a sign before it sends the body, or it was read
        n_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while not self._body_read and n_bytes <= DISCARD_BYTES:
                    message = await self._receive()
                    n_bytes += len(message.get("body", b""))
                    self._body_read = not message.get("more_body", False)

    def record(self, begin: Callable[[Send], Recording]) -> Recording:
        """Put a recording between this call and its client.

        The body has been read.
        """
        recording = begin(self._send)
        self._receive, self._send = recording.receive, recording.send
        return recording

    # --- engine

    @contextlib.asynccontextmanager
    async def run(self, request: Request) -> AsyncGenerator[AsyncIterator[Event]]:
        """Submit a request; its events after admission.

        Raises what `Engine.submit` raises, and the error of a request that fails before it is admitted. The request is
        cancelled when the context ends before it, and when the client disconnects: then events end with
        DisconnectedError.
        """
        stream = self.server.engine.submit(attrs.evolve(request, background=True) if self.background else request)
        self.stream_of_events = stream
        self._release()  # the request itself keeps its model, and its reader may be slow
        cancel = functools.partial(_cancel, stream)
        self._gone.add_done_callback(cancel)
        events = aiter(stream)
        try:
            first = await anext(events, None)
            if first is None:
                raise DisconnectedError
            if isinstance(first, Failed):
                raise first.error
            assert isinstance(first, Admitted)
            self.access.fields["queue"] = first.queue_s
            self._use("prompt", sum(map(len, request.prompts)))
            yield self._noted(events)
        finally:
            stream.cancel()
            self._gone.remove_done_callback(cancel)

    async def _noted(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """Events with errors raised, and numbers noted for the log."""
        fields, reasons = self.access.fields, []
        async for event in events:
            match event:
                case Failed():
                    raise event.error
                case TextDelta() if "ttft" not in fields:
                    fields["ttft"] = self.access.seconds
                case Finished():
                    reasons.append(event.reason)
                case Done():
                    usage = event.usage
                    self._use("generated", usage.generated)
                    fields |= {"prompt": usage.prompt, "cached": usage.cached, "generated": usage.generated}
                    fields |= {"finish": ",".join(dict.fromkeys(reasons))} if reasons else {}
                    if event.timings.n_preempted:
                        fields["preempted"] = event.timings.n_preempted
            yield event
            if isinstance(event, Done):
                return
        raise DisconnectedError

    def _use(self, kind: str, n_tokens: int) -> None:
        if self.api_key is not None:
            self.server.keys.use(self.api_key, n_tokens)
            self.server.metrics.count_tokens(self.api_key.name, kind, n_tokens)

    @functools.cached_property
    def _gone(self) -> asyncio.Task[None]:
        """Task that ends when the client disconnects; the body has been read."""
        return asyncio.create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of work.

        Raises DisconnectedError if the client leaves before it is done.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise DisconnectedError
            return task.result()
        finally:
            task.cancel()

    def _release(self) -> None:
        while self._pins:
            self._pins.popitem()[1].release()

    def close(self) -> None:
        """End what runs for this call."""
        self._release()
        if "_gone" in self.__dict__:
            self._gone.cancel()

    # --- response

    async def respond(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a response of JSON."""
        await self.respond_bytes(to_json(value), "application/json", status, headers)

    async def respond_bytes(
        self, body: bytes, content_type: str, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Send a response."""
        given = {"content-type": content_type, **self._warning, **(headers or {})}
        await self._guard(send_response(self._send, status, given, body))

    async def fail(self, error: ServeError) -> None:
        """Send a response with an error."""
        await send_error(self.scope, self._send, error)

    @contextlib.asynccontextmanager
    async def stream(
        self, headers: dict[str, str] = SSE_HEADERS, error_event: Callable[[ServeError], bytes] | None = None
    ) -> AsyncGenerator[Callable[[bytes], Awaitable[None]]]:
        """Send a response piece by piece, by the function of this context.

        After some seconds of silence a comment is sent, where the stream is of server-sent events. An error that comes
        now is sent as `error_event` formats it, and a moment later the connection is cut: the response does not end
        properly, so that no client takes it for whole.
        """
        encoded = [(name.encode(), value.encode()) for name, value in (headers | self._warning).items()]
        await self._guard(self._send({"type": "http.response.start", "status": 200, "headers": encoded}))
        watch = asyncio.create_task(self._watch(pings=headers is SSE_HEADERS))
        try:
            yield self._write
            await self._guard(self._send({"type": "http.response.body", "body": b""}))
        except DisconnectedError:
            raise
        except Exception as error:
            failure = as_serve_error(error, self.request_id)
            self.access.fields["error"] = failure.code or failure.type
            if error_event is not None:
                await self._write(error_event(failure))
                # fetch and aiohttp drop what they have received and not handed on when the connection is cut.
                await asyncio.wait({self._gone}, timeout=LINGER_S)
            raise DisconnectedError from None
        finally:
            watch.cancel()

    async def _write(self, data: bytes) -> None:
        """Send a piece of a stream; waits while the client is slow."""
        self._write_began = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._write_began, self._write_ended = None, time.monotonic()

    async def _watch(self, *, pings: bool) -> None:
        """Send comments in silence, and cut off a client that reads nothing.

        One task for a stream: a timer for each piece would take a third of its time.
        """
        interval, limit = self.settings.ping_interval, self.settings.write_timeout
        self._write_ended = time.monotonic()
        while True:
            await asyncio.sleep(min(interval, limit) / WATCHES)
            now = time.monotonic()
            if self._write_began is not None and now - self._write_began >= limit:
                self._abort()
            elif pings and self._write_began is None and now - self._write_ended >= interval:
                await self._write(PING)

    async def _guard(self, sending: Awaitable[None]) -> None:
        """Cut the connection of a client that reads nothing for `write_timeout`."""
        try:
            async with asyncio.timeout(self.settings.write_timeout):
                await sending
        except TimeoutError:
            self._abort()
            raise DisconnectedError from None

    def _abort(self) -> None:
        """Cut the connection, with what is not sent yet."""
        self.access.fields["error"] = "write_timeout"
        abort = self.scope["state"].get("abort")
        if abort is not None:
            abort()


async def _in_thread(pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, call)


def _cancel(stream: Stream, gone: asyncio.Task[None]) -> None:
    if not gone.cancelled():
        stream.cancel()
