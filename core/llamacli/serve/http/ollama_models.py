"""Endpoints of ollama's API that change the catalogue of models."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from llamacli.chat.environment import Environment
from llamacli.errors import HubError, InvalidRequestError, ModelFormatError
from llamacli.hub.names import reference
from llamacli.hub.repositories import fetch
from llamacli.serve.catalogue import Catalogue, Manifest, checked_name, expect_gguf, parse_modelfile
from llamacli.serve.errors import (
    BadRequestError,
    InternalError,
    NotSupportedError,
    ServeError,
    StorageFullError,
    UnknownModelError,
)
from llamacli.serve.http.bodies import convert
from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import ollama_body
from llamacli.serve.http.schemas.foreign import unknown_fields
from llamacli.serve.http.schemas.ollama import SAMPLING, OllamaCopy, OllamaCreate, OllamaOptions, OllamaTarget
from llamacli.serve.http.sse import NDJSON_HEADERS, line
from llamacli.serve.http.state import Server
from llamacli.serve.requests import Preset
from llamacli.util.files import NO_ROOM

_log = logging.getLogger(__name__)

Tell = Callable[[dict[str, Any]], None]

_GO_TEMPLATE = ("{{ .", "{{.", "{{- .", "{{-.", "{{ if ", "{{- if ", "{{ range ", "{{- range ")
TICK_S = 0.2
"""Seconds between two lines of progress."""


class WorkEndedError(Exception):
    """Nobody waits for the work any more."""


async def pull(call: Call, request: OllamaTarget) -> None:
    """Download a model of the hub, with lines of its progress.

    A second one of the same name waits for the first, whose files it finds, or goes on with them if that one failed.
    """
    catalogue, name = catalogue_of(call.server), model_name(request.model or request.name)

    await _run(call, request.stream, name, partial(pulled, catalogue, name), joins=True)


def pulled(catalogue: Catalogue, name: str, tell: Tell) -> None:
    """Download a model of the hub into the catalogue.

    Raises HubError, ModelFormatError, OSError.
    """
    tell({"status": "pulling manifest"})

    def progress(file: str, done: int, total: int) -> None:
        if total:
            tell({"status": f"pulling {file}", "digest": file, "total": total, "completed": done})

    paths = fetch(reference(name), catalogue.hub, progress)
    tell({"status": "verifying the file"})
    expect_gguf(paths[0])
    catalogue.write(name, Manifest([catalogue.relative(path) for path in paths]))


async def create(call: Call, given: OllamaCreate) -> None:
    """Make a model of another, or of blobs.

    It has defaults and adapters of its own, or another type.
    """
    catalogue, name = catalogue_of(call.server), model_name(given.model or given.name)
    request = given if given.modelfile is None else _of_modelfile(given)
    if (request.base is None) == (not request.files):
        raise BadRequestError("from: give the name of a model, or files", "from", "missing_required_parameter")
    files, base = _origin(call, catalogue, request)
    added = [_blob(catalogue, digest, "adapters") for digest in (request.adapters or {}).values()]
    preset = _preset(request, base.preset)
    if request.template:
        _expect_template(request.template)

    def work(tell: Tell) -> None:
        expect_gguf(files[0])
        made = [*files]
        if request.quantize:
            tell({"status": f"quantizing to {request.quantize.upper()}"})
            made = [_quantized(catalogue, files[0], request.quantize, tell)]
        if not all(path.is_relative_to(catalogue.folder) for path in made):
            tell({"status": "copying the model into the catalogue"})
            made = [_copied(catalogue, path, tell) for path in made]
        tell({"status": "writing manifest"})
        names = [catalogue.relative(path) for path in made]
        catalogue.write(name, Manifest(names, [*base.adapters, *map(catalogue.relative, added)], preset))
        if request.files:
            catalogue.drop([catalogue.relative(path) for path in files])  # one that was quantized

    await _run(call, request.stream, name, work)


async def copy(call: Call, request: OllamaCopy) -> None:
    """Give a model of the catalogue another name besides."""
    catalogue, source, name = catalogue_of(call.server), model_name(request.source), model_name(request.destination)
    _expect(catalogue, source)
    await call.server.run(claimed, catalogue, name, lambda: catalogue.copy(source, name))
    call.server.engine.add(catalogue.source(name))
    await call.respond({})


async def delete(call: Call, request: OllamaTarget) -> None:
    """Delete a model of the catalogue; its requests that run go on."""
    await deleted(call.server, model_name(request.model or request.name))
    await call.respond({})


async def deleted(server: Server, name: str) -> None:
    """Delete a model of the catalogue. Raises UnknownModelError, NotSupportedError."""
    catalogue = catalogue_of(server)
    _expect(catalogue, name)

    def work() -> None:
        catalogue.delete(name)
        with contextlib.suppress(UnknownModelError):  # its file was damaged at the start
            server.engine.remove(name)

    await server.run(claimed, catalogue, name, work)


async def push(call: Call, request: OllamaTarget) -> None:
    """Upload of models: refused."""
    raise NotSupportedError("models are not uploaded; use the tools of the hub")


async def has_blob(call: Call) -> None:
    """Status 200 for a blob that is there, else 404."""
    path = _blob_path(catalogue_of(call.server), call.path_params["digest"])
    await call.respond_bytes(b"", "application/octet-stream", 200 if path.is_file() else 404)


async def add_blob(call: Call) -> None:
    """Take a file of any size, whose digest is in the path."""
    catalogue, digest = catalogue_of(call.server), call.path_params["digest"]
    _blob_path(catalogue, digest)
    found = hashlib.sha256()
    with _reported(), catalogue.new_blob(digest) as blob, blob.path.open("wb") as file:
        async for part in call.parts():
            found.update(part)
            await call.server.run(file.write, part)
        blob.digest = f"sha256:{found.hexdigest()}"
    await call.respond({}, 201)


# --- parts of requests


def catalogue_of(server: Server) -> Catalogue:
    """Catalogue of a server; NotSupportedError without one."""
    if server.catalogue is None:
        raise NotSupportedError("this server has no catalogue of models; start it with --catalogue DIR")
    return server.catalogue


def model_name(given: str | None) -> str:
    """Name of a model, which is never a path. Raises BadRequestError."""
    if given is None:
        raise BadRequestError("model: it is required", "model", "missing_required_parameter")
    try:
        return checked_name(given)
    except InvalidRequestError as error:
        raise BadRequestError(str(error), "model") from None


def expect_new(server: Server, name: str) -> None:
    """Check that no model of the start has a name.

    Raises BadRequestError.
    """
    infos = server.engine.models()
    if not catalogue_of(server).has(name) and any(name in (info.name, *info.aliases) for info in infos):
        raise BadRequestError(f"the model {name!r} was named when the server was started", "model")


def _expect(catalogue: Catalogue, name: str) -> None:
    if not catalogue.has(name):
        raise UnknownModelError(f"the model {name!r} is not in the catalogue")


def _blob_path(catalogue: Catalogue, digest: str) -> Path:
    try:
        return catalogue.blob(digest)
    except InvalidRequestError as error:
        raise BadRequestError(str(error), "digest") from None


def _blob(catalogue: Catalogue, digest: str, field: str) -> Path:
    path = _blob_path(catalogue, digest)
    if not path.is_file():
        raise BadRequestError(f"{field}: there is no blob {digest}", field)
    return path


def _of_modelfile(given: OllamaCreate) -> OllamaCreate:
    """Request with the fields of a Modelfile. Raises BadRequestError."""
    try:
        fields = parse_modelfile(given.modelfile or "")
    except InvalidRequestError as error:
        raise BadRequestError(str(error), "modelfile") from None
    base, adapters = fields["from"], {one: one.removeprefix("@") for one in fields["adapters"]}
    is_blob = base.startswith("@")
    return OllamaCreate(
        model=given.model or given.name,
        base=None if is_blob else base,
        files={"model.gguf": base.removeprefix("@")} if is_blob else None,
        adapters=adapters or None,
        template=fields.get("template"),
        system=fields.get("system"),
        parameters=fields["parameters"],
        quantize=given.quantize,
        stream=given.stream,
    )


def _origin(call: Call, catalogue: Catalogue, request: OllamaCreate) -> tuple[list[Path], Manifest]:
    if request.files:
        blobs = [_blob(catalogue, request.files[name], "files") for name in sorted(request.files)]
        if len(blobs) > 1:
            raise BadRequestError("files: give one GGUF file", "files")
        return blobs, Manifest([])
    name = model_name(request.base)
    if catalogue.has(name):
        manifest = catalogue.read(name)
        return [catalogue.folder / file for file in manifest.files], manifest
    infos = {one: info for info in call.server.engine.models() for one in (info.name, *info.aliases)}
    if name not in infos:
        raise UnknownModelError(f"the model {name!r} does not exist; pull it first")
    return [Path(infos[name].path)], Manifest([])


def _preset(request: OllamaCreate, base: Preset) -> Preset:
    """Defaults of a request over those of its origin.

    Raises BadRequestError.
    """
    given = dict(request.parameters or {})
    for name in ("num_ctx", "num_gpu", "num_thread", "num_batch"):
        if name in given:
            reason = f"parameters.{name}: the server's options decide"
            raise BadRequestError(reason, "parameters", "unsupported_parameter")
    try:
        options: OllamaOptions = convert(given, OllamaOptions)
        unknown = next(iter(unknown_fields(given, options)), None)
    except BadRequestError as error:
        raise BadRequestError(f"parameters.{error}", "parameters") from None
    if unknown is not None:
        raise BadRequestError(f"parameters.{unknown[0]}: there is no such parameter", "parameters", "unknown_parameter")
    sampling = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    stop = base.stop if options.stop is None else (options.stop,) if isinstance(options.stop, str) else (*options.stop,)
    n = options.num_predict
    return Preset(
        system=base.system if request.system is None else request.system,
        template=request.template or base.template,
        sampling={**base.sampling, **sampling},
        stop=stop,
        seed=base.seed if options.seed is None or options.seed < 0 else options.seed,
        max_tokens=base.max_tokens if n is None or n < 0 else n,
    )


def _expect_template(template: str) -> None:
    if any(mark in template for mark in _GO_TEMPLATE) and "{%" not in template:
        raise BadRequestError("template: it is one of Go; give Jinja, or none for the file's own", "template")
    try:
        Environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise BadRequestError(f"template: line {error.lineno}: {error.message}", "template") from None
    except RecursionError:
        raise BadRequestError("template: it is nested too deeply", "template") from None


# --- work in a thread


def claimed(
    catalogue: Catalogue, name: str, work: Callable[[], None], waiting: Callable[[], None] | None = None
) -> None:
    """Do work on a model that nothing else changes meanwhile.

    `waiting` is called while something does.
    """
    with _reported(), catalogue.claimed(name, waiting):
        work()


def _quantized(catalogue: Catalogue, path: Path, kind: str, tell: Tell) -> Path:
    """Blob of a model's file in another type."""
    from llamacli.conversion import file_type, plan, write
    from llamacli.gguf import open_gguf

    with catalogue.new_blob() as blob, open_gguf(path) as file:
        planned = plan(file, file_type(kind))
        if planned.requantized:
            raise InvalidRequestError("quantize: the model is quantized already; begin with an F32, F16 or BF16 file")

        def progress(done: int, total: int) -> None:
            tell({"status": f"quantizing to {kind.upper()}", "total": total, "completed": done})

        write(planned, blob.path, overwrite=True, progress=progress)
    return blob.path


def _copied(catalogue: Catalogue, path: Path, tell: Tell) -> Path:
    found, done, total = hashlib.sha256(), 0, path.stat().st_size
    with catalogue.new_blob() as blob:
        with path.open("rb") as source, blob.path.open("wb") as file:
            while part := source.read(1 << 22):
                found.update(part)
                file.write(part)
                done += len(part)
                tell({"status": "copying the model into the catalogue", "total": total, "completed": done})
        blob.digest = f"sha256:{found.hexdigest()}"
    return blob.path


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Make errors of files and of the hub those of the request."""
    try:
        yield
    except ServeError:
        raise
    except (HubError, ModelFormatError, InvalidRequestError) as error:
        raise BadRequestError(str(error)) from None
    except OSError as error:
        failed = StorageFullError if error.errno in NO_ROOM else InternalError
        _log.error("the catalogue cannot be changed", exc_info=error)
        raise failed(f"the catalogue cannot be written: {error.strerror or error}") from None


async def _run(
    call: Call, streams: bool | None, name: str, work: Callable[[Tell], None], *, joins: bool = False
) -> None:
    """Change a model of the catalogue in a thread, and offer it.

    With `joins` it waits while another request changes the model, else it is refused then. A client that leaves ends
    the work where it next tells of its progress.
    """
    catalogue, engine, loop = catalogue_of(call.server), call.server.engine, asyncio.get_running_loop()
    expect_new(call.server, name)
    states: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    left = threading.Event()
    told: dict[str, float] = {}

    def tell(state: dict[str, Any]) -> None:
        if left.is_set():
            raise WorkEndedError
        now, done = time.monotonic(), state.get("completed") == state.get("total")
        if done or now - told.get(state["status"], 0) >= TICK_S:
            told[state["status"]] = now
            loop.call_soon_threadsafe(states.put_nowait, state)

    def ended(done: asyncio.Future[None]) -> None:
        done.exception()  # of a client that has left, nobody else looks at it
        states.put_nowait(None)

    async def events() -> AsyncIterator[dict[str, Any]]:
        waiting = partial(tell, {"status": "waiting for another pull of it"}) if joins else None
        done = loop.run_in_executor(pool, claimed, catalogue, name, partial(work, tell), waiting)
        done.add_done_callback(ended)
        while (state := await call.unless_gone(states.get())) is not None:
            yield state
        await done
        engine.add(catalogue.source(name))
        yield {"status": "success"}

    pool = ThreadPoolExecutor(1, "llamacli-catalogue")
    try:
        if streams is False:
            *_, last = [state async for state in events()]
            await call.respond(last)
            return
        async with call.stream(NDJSON_HEADERS, lambda error: line(ollama_body(error))) as write:
            async for state in events():
                await write(line(state))
    finally:
        left.set()
        pool.shutdown(wait=False)
