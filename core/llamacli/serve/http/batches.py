"""Batches: lines of requests, run in the background, with stored results."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from llamacli.serve.errors import BadRequestError, ServeError, ShuttingDownError, StorageFullError
from llamacli.serve.http.bodies import parse
from llamacli.serve.http.endpoint import Endpoint
from llamacli.serve.http.errors import openai_body
from llamacli.serve.http.inner import Exchange
from llamacli.serve.http.routes import ROUTES
from llamacli.serve.http.state import Server
from llamacli.serve.store import new_id

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

_FULL_S = 10.0
"""Seconds between tries to write to a full store."""
_MORE = 8
"""Lines in work beyond those that run at once, so that steps are full."""

_log = logging.getLogger(__name__)


@attrs.frozen
class Line:
    """Request of a line, whose number counts from 1."""

    number: int
    custom_id: str
    path: str
    body: dict[str, Any]


def split_lines(chunks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Lines of a file that comes in parts.

    Of a longer one only `longest` + 1 bytes.
    """
    rest = b""
    for chunk in chunks:
        first, *more = chunk.split(b"\n")
        rest += first[: longest + 1 - len(rest)]
        for part in more:
            yield rest
            rest = part[: longest + 1]
    if rest:
        yield rest


def parse_line(number: int, data: bytes, endpoint: str | None, longest: int) -> Line:
    """Parse a line of a batch.

    `endpoint` is the only one allowed, None for any. Raises BadRequestError.
    """
    if len(data) > longest:
        raise BadRequestError(f"line {number}: it is longer than the limit of {longest} bytes", None, "body_too_large")
    fields = parse(data)
    custom_id, path, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequestError(f"line {number}: custom_id: it is required", "custom_id")
    if fields.get("method", "POST") != "POST":
        raise BadRequestError(f"line {number}: method: it is not POST", "method")
    if path not in ENDPOINTS or endpoint not in (None, path):
        if str(path).startswith("/v1/audio/"):
            reason = "takes a form, lines have JSON; /v1/chat/completions takes input_audio"
            raise BadRequestError(f"line {number}: url: {path!a} {reason}", "url")
        allowed = ", ".join(ENDPOINTS) if endpoint is None else endpoint
        raise BadRequestError(f"line {number}: url: {path!a} is not {allowed}", "url")
    if not isinstance(body, dict):
        raise BadRequestError(f"line {number}: body: it is not an object", "body")
    wrong = next((name for name in ("stream", "background") if body.get(name)), None)
    if wrong is not None:
        raise BadRequestError(f"line {number}: body.{wrong}: lines have whole answers", f"body.{wrong}")
    return Line(number, custom_id, path, body)


class BatchRun:
    """Run of the lines of a batch that have no result.

    `lines` reads the input from its beginning. Lines run grouped by model, in the order of the models' first lines.
    """

    def __init__(
        self,
        server: Server,
        name: str,
        endpoint: str | None,
        lines: Callable[[], Iterator[bytes]],
        key: str = "",
        owner: str = "",
    ):
        self._server, self._name, self._endpoint, self._lines = server, name, endpoint, lines
        self._key, self._owner, self._longest = key, owner, server.settings.max_body
        self.total = self.completed = self.failed = 0
        self._waits = False

    async def run(self) -> None:
        """Run all lines. Raises ShuttingDownError, StoreError."""
        server = self._server
        done = await server.run(server.store.lines_done, self._name)
        self.failed = sum(done.values())
        self.completed = len(done) - self.failed
        models = await server.run(self._models)
        self.total = sum(models.values())
        room = asyncio.Semaphore(server.settings.total_slots + _MORE)
        try:
            async with asyncio.TaskGroup() as group:
                for model in models:
                    seen: set[str] = set()
                    for number, data in self._numbered():
                        await room.acquire()
                        line, chosen, failure = self._line(number, data, seen)
                        if number in done or chosen != model:
                            room.release()
                            if not number % 64:
                                await asyncio.sleep(0)
                            continue
                        group.create_task(self._answer(room, number, line, failure))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        return ((number, data) for number, data in enumerate(self._lines(), 1) if data.strip())

    def _line(self, number: int, data: bytes, seen: set[str]) -> tuple[Line | None, str, ServeError | None]:
        try:
            line = parse_line(number, data, self._endpoint, self._longest)
            if line.custom_id in seen:
                raise BadRequestError(f"line {number}: custom_id: {line.custom_id[:80]!a} is there twice", "custom_id")
        except ServeError as error:
            return None, "", error
        seen.add(line.custom_id)
        return line, str(line.body.get("model") or ""), None

    def _models(self) -> dict[str, int]:
        seen: set[str] = set()
        found: dict[str, int] = {}
        for number, data in self._numbered():
            model = self._line(number, data, seen)[1]
            found[model] = found.get(model, 0) + 1
        return found

    async def _answer(
        self, room: asyncio.Semaphore, number: int, line: Line | None, failure: ServeError | None
    ) -> None:
        try:
            result: dict[str, Any] = {"id": new_id("batch_req"), "custom_id": line.custom_id if line else None}
            if line is None:
                assert failure is not None
                error = {**openai_body(failure)["error"], "line": number}
                result |= {"response": None, "error": error}
                failed = True
            else:
                exchange = await self._exchanged(line)
                body = json.loads(exchange.content)
                response = {"status_code": exchange.status, "request_id": exchange.request_id, "body": body}
                result |= {"response": response, "error": None}
                failed = exchange.status != 200
            await self._keep(number, json.dumps(result).encode() + b"\n", failed=failed)
        finally:
            room.release()

    async def _exchanged(self, line: Line) -> Exchange:
        while True:
            body = json.dumps(line.body).encode()
            exchange = Exchange(line.path, body, new_id("req"), self._key, self._owner, background=True)
            await perform(self._server, exchange)
            if exchange.status != 503:
                return exchange
            code = json.loads(exchange.content)["error"]["code"]
            if code == "shutting_down":
                raise ShuttingDownError("the server is shutting down")
            await asyncio.sleep(1)

    async def _keep(self, number: int, data: bytes, *, failed: bool) -> None:
        await self.write(self._server.store.add_result, self._name, number, data, failed=failed)
        self.failed += failed
        self.completed += not failed

    async def write(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Call a method of the store, again while the store is full."""
        while True:
            try:
                await self._server.run(method, *arguments, **options)
                self._waits = False
                return
            except StorageFullError as error:
                if not self._waits:
                    _log.warning("batch %s waits: %s", self._name, error)
                self._waits = True
                await asyncio.sleep(_FULL_S)


async def perform(server: Server, exchange: Exchange) -> None:
    """Answer a request of the server's own."""
    route = next(route for route in ROUTES if route.method == "POST" and exchange.path in route.paths)
    await Endpoint(route, server)(exchange.scope, exchange.receive, exchange.send)


async def run_batch(server: Server, name: str, owner: str, key: str) -> None:
    """Run a stored batch to its end.

    That of a server that shuts down stays open.
    """
    found = await server.run(server.store.get, "batch", name, owner)
    data, file = found.data, found.data["input_file_id"]
    run = BatchRun(
        server, name, data["endpoint"],
        lambda: split_lines(server.store.chunks(file), server.settings.max_body), key, owner,
    )  # fmt: skip
    if (job := server.jobs.get(name)) is not None:
        job.shown = lambda: {**data, "request_counts": _counts(run)}
    data |= {"status": "in_progress", "in_progress_at": data["in_progress_at"] or int(time.time())}
    await run.write(server.store.update, name, data, is_open=True)
    try:
        await run.run()
    except ShuttingDownError:
        return
    except Exception as error:
        _log.error("batch %s failed", name, exc_info=error)
        await end_batch(server, name, owner, "failed", run)
        return
    await end_batch(server, name, owner, "completed", run)


async def end_batch(server: Server, name: str, owner: str, status: str, run: BatchRun | None = None) -> None:
    """Make files of a batch's results, and close it.

    A full store is waited for if there is a run, and StorageFullError otherwise.
    """
    found = await server.run(server.store.get, "batch", name, owner)
    now, files = int(time.time()), []
    data = {**found.data, "status": status, f"{status}_at": now}
    for failed, field, kind in ((False, "output_file_id", "output"), (True, "error_file_id", "errors")):
        n, n_bytes = await server.run(server.store.n_result_bytes, name, failed=failed)
        if n:
            file = {"id": new_id("file"), "object": "file", "bytes": n_bytes, "created_at": now, "status": "processed",
                    "filename": f"{name}_{kind}.jsonl", "purpose": "batch_output"}  # fmt: skip
            data[field] = file["id"]
            files.append((failed, file))
        data["request_counts"] = {**data["request_counts"], "failed" if failed else "completed": n}
    if run is not None:
        data["request_counts"]["total"] = run.total
    write = server.run if run is None else run.write
    await write(server.store.end_batch, owner, data, files)


def _counts(run: BatchRun) -> dict[str, int]:
    return {"total": run.total, "completed": run.completed, "failed": run.failed}


def start_batch(server: Server, name: str, owner: str, key: str) -> None:
    """Run a batch in the background."""
    server.jobs.start(name, run_batch(server, name, owner, key))


def resume(server: Server) -> None:
    """Go on with the batches that the last server has left."""
    for found in server.store.unfinished("batch"):
        start_batch(server, found.id, found.owner, found.owner)
