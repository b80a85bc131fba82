"""Process of the server: listening, readiness, draining on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from llamacli.errors import InvalidRequestError
from llamacli.serve.http.app import app_of
from llamacli.serve.http.heads import HeadTimeout
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.http.state import Server
from llamacli.serve.requests import Engine

KEEP_ALIVE_S = 75
CLOSE_TIMEOUT_S = 5
"""Seconds that connections have to end after the engine has drained."""

BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""

_ACCEPTS = 16
"""Connections that asyncio accepts in a turn; without free descriptors it tries, and reports, as many."""

_REPORT_S = 10.0
"""Seconds between two reports that no descriptor is free."""

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

_log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Socket that is bound to an address and listens.

    Raises InvalidRequestError with the address if that is not possible.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family = infos[0][0]
        return socket.create_server(infos[0][4][:2], family=family, backlog=BACKLOG, reuse_port=False)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "; --port takes another, 0 any free one" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
        raise InvalidRequestError(f"cannot listen on {host}:{port}: {reason}{hint}") from None


@contextlib.contextmanager
def listening(hosts: Sequence[str], port: int) -> Iterator[list[socket.socket]]:
    """Sockets that listen at one port of several addresses.

    Port 0 is a free one, the same for all. Raises InvalidRequestError with the address if that is not possible.
    """
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        for host in hosts:
            sockets.append(opened.enter_context(listen(host, port)))
            port = sockets[0].getsockname()[1]
        yield sockets


def expect_certificate(files: tuple[Path, Path]) -> None:
    """Check the files of a certificate and its key.

    Raises InvalidRequestError that names them if one cannot be read, or if they do not belong together.
    """
    certificate, key = files
    try:
        for path in files:
            path.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise InvalidRequestError(f"{certificate} and {key} are not a certificate and its key: {error}") from None


class HttpServer(uvicorn.Server):
    """Uvicorn server that drains its engine before it closes connections.

    SIGTERM, SIGINT, SIGHUP and `stop` drain: new requests are refused, running ones have `shutdown_timeout` seconds. A
    second signal ends them at once. `on_ready` is called when connections are accepted. The engine is closed at last.
    """

    def __init__(
        self,
        engine: Engine,
        settings: HttpSettings,
        listening: Sequence[socket.socket],
        on_ready: Callable[[], None] = lambda: None,
    ):
        self._server = Server(engine, settings)
        super().__init__(
            uvicorn.Config(
                app_of(self._server),
                log_config=None,
                log_level=logging.WARNING,
                loop="asyncio",  # MCP servers are child processes, which uvloop's are not
                access_log=False,
                ws="none",
                backlog=_ACCEPTS,
                lifespan="on",
                server_header=False,
                proxy_headers=False,
                ssl_certfile=settings.ssl and settings.ssl[0],
                ssl_keyfile=settings.ssl and settings.ssl[1],
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            )
        )
        self._engine, self._timeout, self._on_ready = engine, settings.shutdown_timeout, on_ready
        self._listening = [*listening]
        self._heads = HeadTimeout(lambda: self.server_state.connections, settings.read_timeout)
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._n_signals = 0
        self._reported_at = -_REPORT_S

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal comes, or `stop`."""
        # Uvicorn calls a response that was cut on purpose an error.
        logging.getLogger("uvicorn.error").addFilter(_is_no_cut)
        try:
            with _handles_hangup(self.handle_exit):
                super().run(sockets or self._listening)
        finally:
            self._engine.close()

    def stop(self) -> None:
        """Do what a signal does; from any thread."""
        self._n_signals += 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._report)
        await super().startup(sockets)
        for one in self._listening:
            one.listen(BACKLOG)  # asyncio has set the number of its turns
        self._watching = asyncio.create_task(self._heads.watch())
        if self._n_signals:
            self._drain()
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections, and end."""
        if self._watching is not None:
            self._watching.cancel()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, SIGINT or SIGHUP."""
        self.stop()

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report that no descriptor is free in one line.

        Other errors are reported as asyncio does.

        asyncio tries again after a second.
        """
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_DESCRIPTOR:
            loop.default_exception_handler(context)
        elif loop.time() - self._reported_at >= _REPORT_S:
            self._reported_at = loop.time()
            _log.error("no connection can be accepted: %s (see ulimit -n)", error.strerror)

    def _drain(self) -> None:
        if self._draining is None:
            _log.info("shutting down: running requests have %g seconds", self._timeout)
            self._draining = asyncio.create_task(self._drain_for(self._timeout))
        elif self._n_signals > 1:
            self._draining.cancel()
            self._draining = asyncio.create_task(self._drain_for(0.0))

    async def _drain_for(self, seconds: float) -> None:
        await self._engine.drain(seconds)
        await self._server.mcp.close()  # calls of tools end
        self.should_exit = True


@contextlib.contextmanager
def _handles_hangup(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGHUP, which uvicorn does not.

    Unless it is ignored, as by nohup.
    """
    number = getattr(signal, "SIGHUP", None)  # Windows has none
    is_main = threading.current_thread() is threading.main_thread()
    if number is None or not is_main or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)


def _is_no_cut(record: logging.LogRecord) -> bool:
    return "without completing response" not in str(record.msg)
