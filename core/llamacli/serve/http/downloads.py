"""Downloads and deletions of llama-server's router, in the catalogue of ollama's."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from llamacli.serve.errors import BadRequestError, ServeError
from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import as_serve_error
from llamacli.serve.http.jobs import job_of
from llamacli.serve.http.ollama_models import (
    TICK_S,
    WorkEndedError,
    catalogue_of,
    claimed,
    deleted,
    expect_new,
    model_name,
    pulled,
)
from llamacli.serve.http.schemas.foreign import Schema
from llamacli.serve.http.state import Server


class Download(Schema, kw_only=True):
    """Request of `POST /models`: a model of the hub, `user/repo:TYPE`."""

    model: str


async def download(call: Call, request: Download) -> None:
    """Begin to download a model; `/models/sse` has the progress."""
    name = model_name(request.model)
    catalogue_of(call.server)
    expect_new(call.server, name)
    if call.server.jobs.get(job_of(name)) is not None:
        raise BadRequestError(f"the model {name!r} is being downloaded", "model")
    call.server.jobs.expect_room()
    call.server.jobs.start(job_of(name), _download(call.server, name))
    await call.respond({"success": True})


async def remove(call: Call) -> None:
    """Delete the catalogue's model `?model=NAME`."""
    await deleted(call.server, model_name(call.wanted_model))
    await call.respond({"success": True})


async def _download(server: Server, name: str) -> None:
    """Download a model, with events of its progress and end."""
    left, told, loop = threading.Event(), [0.0], asyncio.get_running_loop()

    def tell(state: dict[str, Any]) -> None:
        if left.is_set():
            raise WorkEndedError
        now = time.monotonic()
        if "total" in state and (now - told[0] >= TICK_S or state["completed"] == state["total"]):
            told[0] = now
            data = {"url": state["digest"], "downloaded": state["completed"], "total": state["total"]}
            loop.call_soon_threadsafe(server.events.add, name, "download_progress", data)

    catalogue, pool = catalogue_of(server), ThreadPoolExecutor(1, "llamacli-catalogue")
    try:
        work = partial(pulled, catalogue, name, tell)
        await loop.run_in_executor(pool, claimed, catalogue, name, work, lambda: tell({}))
        server.engine.add(catalogue.source(name))
        server.events.add(name, "download_finished", {})
    except asyncio.CancelledError:
        server.events.add(name, "download_failed", {"error": "it was cancelled"})
        raise
    except Exception as error:
        failure: ServeError = as_serve_error(error, job_of(name))
        server.events.add(name, "download_failed", {"error": str(failure)})
    finally:
        left.set()
        pool.shutdown(wait=False)
