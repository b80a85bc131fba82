"""`llamacli batch`: requests of a JSONL file, without a server."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli.command import Command
from llamacli.cli.model_sources import model_sources
from llamacli.cli.numbers import Integer
from llamacli.cli.options import PATH, global_options, mode_option, option, threads_option
from llamacli.cli.output import note
from llamacli.cli.serve import expect_packages
from llamacli.errors import InvalidRequestError
from llamacli.util.files import check_target, replacing

if TYPE_CHECKING:
    from llamacli.serve.http.settings import HttpSettings
    from llamacli.serve.models import ModelSource
    from llamacli.serve.settings import EngineSettings

_NAME = "batch"


@click.command(cls=Command)
@click.argument("requests", type=PATH)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@option("-o", "--output", type=PATH, help="File of the results. Default: REQUESTS with the suffix .results.jsonl.")
@option("-c", "--ctx-size", metavar="N", type=Integer(0), default=0, help="Context length in tokens; 0: the model's.")
@option("--max-running", metavar="N", type=Integer(1), help="Texts generated at once. Default: as llamacli serve.")
@mode_option
@threads_option
@global_options
def batch(requests: str, models: tuple[str, ...], output: str | None, **given: Any) -> None:
    """Answer each line of REQUESTS, a JSONL file of requests.

    A MODEL is as for `llamacli serve`; lines without a model, or with another name, get the first. Results are in the
    order of the lines; those of a run that was killed are kept in OUTPUT.work, where the next one goes on. A line that
    fails has an error as its result, and the exit status is 1.
    """
    expect_packages("batch")
    from llamacli.serve.http.settings import HttpSettings
    from llamacli.serve.settings import EngineSettings, default_max_running

    path = Path(requests)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = Path(output) if output else path.with_suffix(".results.jsonl")
    check_target(target, overwrite=True)
    work = target.with_name(f"{target.name}.work")
    running = given["max_running"] or default_max_running()
    http = HttpSettings(data=work, store_size=1 << 50, store_age=None, total_slots=running, any_model=True)
    limits = EngineSettings(
        n_ctx=given["ctx_size"] or None,
        models_max=1,
        max_running=running,
        mode=given["mode"],
        threads=given["threads"],
        step_ms=0,
    )
    failed = asyncio.run(_run(path, digest, target, model_sources(models, ()), http, limits))
    shutil.rmtree(work)
    if failed:
        raise click.exceptions.Exit(1)


async def _run(
    path: Path, digest: str, target: Path, sources: Sequence[ModelSource], http: HttpSettings, limits: EngineSettings
) -> int:
    """Run all lines, and write the results; the number that failed."""
    from llamacli.serve.engine import LocalEngine
    from llamacli.serve.http.batches import BatchRun, split_lines
    from llamacli.serve.http.state import Server

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk

    engine = LocalEngine(sources, limits)
    try:
        server = Server(engine, http)
        try:
            found = server.store.unfinished("batch")
            if not found:
                server.store.add("batch", "", {"id": _NAME, "digest": digest}, is_open=True)
            elif found[0].data["digest"] != digest:
                raise InvalidRequestError(f"{http.data}: it is of another file than {path}: delete it to begin anew")
            engine.load(sources[0].name).result()
            run = BatchRun(server, _NAME, None, lambda: split_lines(chunks(), http.max_body))
            await run.run()
            with replacing(target, overwrite=True) as file:
                for result in server.store.results(_NAME, failed=None):
                    file.write(result)
            stats = engine.stats().models.values()
            cached = sum(one.prefix_tokens.get("true", 0) for one in stats)
            total = sum(sum(one.prefix_tokens.values()) for one in stats)
            told = f"{cached} of {total} prompt tokens were cached"
            note(f"llamacli: {run.completed} answered, {run.failed} failed; {told}")
            return run.failed
        finally:
            server.close()
    finally:
        engine.close()
