"""`llamacli imatrix`: compute the importance matrix of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamacli.cli import options
from llamacli.cli.command import Command
from llamacli.cli.hub import resolve_model
from llamacli.cli.options import PATH, option
from llamacli.cli.output import human_bytes, note
from llamacli.cli.progress import bar
from llamacli.cli.text import read_file, read_stdin
from llamacli.errors import InvalidRequestError

if TYPE_CHECKING:
    from llamacli import Model
    from llamacli.tools.importance import Collector


@click.command(cls=Command)
@click.argument("model", type=PATH)
@option("-f", "--file", metavar="TEXT", type=PATH, allow_from_autoenv=False, help="Text file; default: stdin.")
@option("-o", "--output", metavar="OUT", type=PATH, default="imatrix.gguf", show_default=True, help="File to write.")
@options.chunk_options(16)
@option("--process-output", is_flag=True, help="Measure the output matrix too.")
@option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@options.threads_option
@options.mode_option
@options.global_options
def imatrix(
    model: str,
    file: str | None,
    output: str,
    ctx_size: int,
    chunks: int | None,
    process_output: bool,
    force: bool,
    threads: int | None,
    mode: str,
) -> None:
    """Compute the importance matrix of a model from a text.

    Evaluates the text in chunks, as llama.cpp does, and writes OUT with the mean squared inputs of each
    weight matrix, of experts one by one. `llamacli quantize --imatrix OUT` then keeps the weights that matter more
    exact. OUT is a GGUF file, which llama.cpp reads too; it is written at the end, in one step.

    The text should be like what the model will be used for, some hundred thousand characters of it.
    """
    from llamacli.util.files import check_target

    out = Path(output)
    if out.is_file() and not force:
        raise InvalidRequestError(f"{out} exists: --force overwrites it")
    check_target(out, overwrite=force)
    text = read_stdin() if file is None else read_file(Path(file))
    if text is None:
        raise click.UsageError("Give a text with -f, or pipe one in.")
    path = resolve_model(model)
    with bar(f"reading {os.path.basename(path)}"):
        from llamacli.conversion import write_imatrix
        from llamacli.gguf import open_gguf
        from llamacli.tools.importance import Collector, collect, importance_matrix, number_of_chunks

    with open_gguf(path) as opened:
        tensors = opened.tensors
    collector = Collector(output=process_output)
    try:
        with _load(path, mode, threads, collector) as loaded:
            tokens = loaded.tokenizer.encode_prompt(text)
            options.warn_of_long_context(loaded, ctx_size)
            n_chunks = number_of_chunks(tokens, ctx_size, chunks)
            with bar("measuring", unit=" chunks") as progress:
                for n_done in collect(loaded, tokens, n_ctx=ctx_size, max_chunks=chunks):
                    progress(n_done, n_chunks)
    except KeyboardInterrupt:
        note(f"interrupted: {out} is not written")
        raise
    found = importance_matrix(
        out, collector, tensors, dataset=os.path.basename(file or "stdin"), n_chunks=n_chunks, n_ctx=ctx_size
    )
    write_imatrix(found, overwrite=force)
    unseen = sum(int((entry.counts == 0).sum()) for entry in found.entries.values())
    missed = f"; {unseen} matrices of experts were never used" if unseen else ""
    click.echo(f"{out}: {len(found.entries)} tensors, {n_chunks} chunks of {ctx_size} tokens{missed}")


def _load(path: str, mode: str, threads: int | None, collector: Collector) -> Model:
    with bar(f"loading {os.path.basename(path)}", human_bytes) as progress:
        from llamacli import load_model
        from llamacli.engine import jit_disabled

        if jit_disabled():
            raise InvalidRequestError("NUMBA_DISABLE_JIT is set, so the kernels cannot be compiled")
        from llamacli.engine.native import NativeEngine

        return load_model(path, mode, progress=progress, engine=NativeEngine(threads, collector))
