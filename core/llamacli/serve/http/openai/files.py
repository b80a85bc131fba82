"""Endpoints of files and batches: `/v1/files`, `/v1/batches`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from llamacli.serve.errors import BadRequestError, ConflictError, MediaTypeError, NotSupportedError
from llamacli.serve.http.batches import ENDPOINTS, end_batch, start_batch
from llamacli.serve.http.call import Call
from llamacli.serve.http.schemas.foreign import Foreign, Schema
from llamacli.serve.store import Found, object_id, shown_page

PURPOSES = ("batch", "user_data", "assistants", "vision", "fine-tune", "evals")

_CHUNK = 1 << 20
_MAX_FIELD = 1 << 16


class BatchRequest(Schema, kw_only=True):
    """Request of `POST /v1/batches`."""

    foreign: ClassVar[Foreign] = {"output_expires_after": "files are removed by --store-age"}

    input_file_id: str
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    completion_window: str
    metadata: dict[str, Any] | None = None


class Form:
    """Form with one file, in parts as they come."""

    def __init__(self, boundary: bytes):
        from python_multipart.multipart import MultipartParser, parse_options_header

        self._options = parse_options_header
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.chunks: list[bytes] = []
        self._field, self._value, self._header = "", b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._is_file = False
        self._parser = MultipartParser(boundary, {
            "on_part_begin": self._begin, "on_part_data": self._data, "on_part_end": self._end,
            "on_header_field": self._name_part, "on_header_value": self._value_part,
            "on_headers_finished": self._headers_end,
        })  # fmt: skip
        self._current = b""

    def write(self, data: bytes) -> None:
        """Parse a part of the body."""
        self._parser.write(data)

    def _begin(self) -> None:
        self._headers, self._header, self._value, self._current = {}, b"", b"", b""

    def _name_part(self, data: bytes, start: int, end: int) -> None:
        if self._current:
            self._headers[self._header.lower()] = self._current
            self._header, self._current = b"", b""
        self._header += data[start:end]

    def _value_part(self, data: bytes, start: int, end: int) -> None:
        self._current += data[start:end]

    def _headers_end(self) -> None:
        self._headers[self._header.lower()] = self._current
        _, options = self._options(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._field == "file"
        if self._is_file:
            self.filename = options.get(b"filename", b"file").decode("utf-8", "replace")[:255]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.chunks.append(data[start:end])
        elif len(self._value) + end - start > _MAX_FIELD:
            raise BadRequestError(f"{self._field}: more than {_MAX_FIELD} bytes", self._field, "invalid_form")
        else:
            self._value += data[start:end]

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._field] = self._value.decode("utf-8", "replace")


async def upload(call: Call) -> None:
    """Take a file of any size that the store has room for."""
    name, store = object_id("file"), call.server.store

    async def keep(number: int, part: bytes) -> None:
        await call.server.run(store.add_chunk, name, number, part)

    try:
        form, n_bytes = await received(call, keep)
        if form.filename is None:
            raise BadRequestError("file: it is required", "file", "missing_required_parameter")
        purpose = form.fields.get("purpose")
        if purpose not in PURPOSES:
            raise BadRequestError(f"purpose: {purpose!a} is none of {', '.join(PURPOSES)}", "purpose")
        data = {"id": name, "object": "file", "bytes": n_bytes, "created_at": int(time.time()), "status": "processed",
                "filename": form.filename, "purpose": purpose}  # fmt: skip
        await call.server.run(store.add, "file", call.owner, data)
    except BaseException:
        await call.server.run(store.drop_chunks, name)
        raise
    await call.respond(data)


async def received(call: Call, keep: Callable[[int, bytes], Awaitable[Any]]) -> tuple[Form, int]:
    """Form of a body, and the number of bytes of its file.

    `keep` takes the numbered parts of the file. Raises MediaTypeError, BadRequestError, and NotSupportedError without
    python-multipart.
    """
    try:
        import python_multipart.multipart as multipart
    except ImportError:
        raise NotSupportedError("files need the package python-multipart") from None
    kind, options = multipart.parse_options_header(call.headers.get("content-type", ""))
    origin = call.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != call.headers.get("host"):
        raise MediaTypeError("forms of other origins are not taken")  # a page can send one without asking first
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise MediaTypeError("the body must be multipart/form-data")
    form = Form(options[b"boundary"])
    number = n_bytes = 0
    kept: list[bytes] = []

    async def flush() -> None:
        nonlocal number
        await keep(number, b"".join(kept))
        number += 1
        kept.clear()

    try:
        async for part in call.parts(("multipart/form-data",)):
            form.write(part)
            kept += form.chunks
            n_bytes += sum(map(len, form.chunks))
            form.chunks.clear()
            if sum(map(len, kept)) >= _CHUNK:
                await flush()
    except multipart.MultipartParseError as error:
        raise BadRequestError(f"the form is damaged: {error}", None, "invalid_form") from None
    if kept:
        await flush()
    return form, n_bytes


async def files(call: Call) -> None:
    """All files, the newest first."""
    page = call.page(10_000)
    data, more = await call.server.run(lambda: call.server.store.page("file", call.owner, **page))
    purpose = call.query.get("purpose")
    await call.respond(shown_page([one for one in data if purpose in (None, one["purpose"])], more))


async def file(call: Call) -> None:
    """Description of a file."""
    await call.respond((await _stored(call, "file")).data)


async def content(call: Call) -> None:
    """Contents of a file."""
    found, store = await _stored(call, "file"), call.server.store
    is_results = found.data["purpose"] == "batch_output"
    parts = store.results(found.id, failed=None) if is_results else store.chunks(found.id)
    async with call.stream({"content-type": "application/octet-stream"}) as write:
        while (part := await call.server.run(next, parts, None)) is not None:
            await write(part)


async def delete_file(call: Call) -> None:
    """Delete a file."""
    found = await _stored(call, "file")
    await call.server.run(call.server.store.remove, "file", found.id, call.owner)
    await call.respond({"id": found.id, "object": "file", "deleted": True})


async def add_batch(call: Call, request: BatchRequest) -> None:
    """Begin a batch of the requests in a file."""
    store = call.server.store
    found = await call.server.run(store.get, "file", request.input_file_id, call.owner)
    if found.data["purpose"] != "batch":
        raise BadRequestError("input_file_id: the purpose of the file is not batch", "input_file_id")
    call.server.jobs.expect_room()
    times = dict.fromkeys(("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling",
                           "cancelled"))  # fmt: skip
    data = {
        "id": object_id("batch"), "object": "batch", "endpoint": request.endpoint, "errors": None,
        "input_file_id": request.input_file_id, "completion_window": request.completion_window, "status": "validating",
        "output_file_id": None, "error_file_id": None, "created_at": int(time.time()),
        **{f"{name}_at": None for name in times},
        "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": request.metadata,
    }  # fmt: skip
    await call.server.run(store.add, "batch", call.owner, data, is_open=True)
    start_batch(call.server, data["id"], call.owner, call.key)
    await call.respond(data)


async def batches(call: Call) -> None:
    """All batches, the newest first."""
    page = call.page()
    data, more = await call.server.run(lambda: call.server.store.page("batch", call.owner, **page))
    await call.respond(shown_page([_now(call, one) for one in data], more))


async def batch(call: Call) -> None:
    """Batch with its counts."""
    await call.respond(_now(call, (await _stored(call, "batch")).data))


async def cancel_batch(call: Call) -> None:
    """End a batch; the results so far become its files."""
    found = await _stored(call, "batch")
    await call.server.jobs.cancel(found.id)
    found = await _stored(call, "batch")
    if found.data["status"] not in ("validating", "in_progress"):
        raise ConflictError(f"the batch {found.id} is {found.data['status']}")
    await end_batch(call.server, found.id, call.owner, "cancelled")
    await call.respond((await _stored(call, "batch")).data)


def _now(call: Call, data: dict[str, Any]) -> dict[str, Any]:
    job = call.server.jobs.get(data["id"])
    return data if job is None or job.shown is None else job.shown()


async def _stored(call: Call, kind: Literal["file", "batch"]) -> Found:
    return await call.server.run(call.server.store.get, kind, call.path_params["id"], call.owner)
