"""`llamacli perplexity`: how well a model expects a text."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamacli.cli.options import MOST_TOKENS, PATH, global_options, kv_type_options, mode_option, threads_option
from llamacli.cli.output import print_json, write
from llamacli.cli.progress import load
from llamacli.cli.text import read_file, read_stdin
from llamacli.errors import InvalidRequestError
from llamacli.tools.demo import demo_path

if TYPE_CHECKING:
    from llamacli.tools.perplexity import Estimate

_log = logging.getLogger(__name__)


@click.command()
@click.argument("text", required=False, type=PATH, metavar="[TEXT_FILE]")
@click.option("-m", "--model", type=PATH, help="The model's file; without it, the demo model.")
@click.option("-f", "--file", type=PATH, allow_from_autoenv=False, help="The text's file, instead of TEXT_FILE.")
@click.option(
    "-c", "--ctx-size", metavar="N", type=click.IntRange(4, MOST_TOKENS), default=512, show_default=True,
    help="Length of a chunk in tokens.",
)  # fmt: skip
@click.option(
    "--chunks", metavar="N", type=click.IntRange(-1), default=-1, show_default=True,
    help="Measure this many chunks at most; -1: all.",
)  # fmt: skip
@threads_option
@mode_option
@kv_type_options("f32 in mode fp32, else f16")
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="How the result is printed.",
)  # fmt: skip
@global_options
def perplexity(
    text: str | None,
    model: str | None,
    file: str | None,
    ctx_size: int,
    chunks: int,
    threads: int | None,
    mode: str,
    kv_type: str | tuple[str, str] | None,
    output: str,
) -> None:
    """Measure the perplexity of a text, by llama.cpp's method: lower is better.

    The text is evaluated in chunks, each on its own and with BOS first; the tokens of each second half are scored. The
    estimate after each chunk is shown, and at the end the result with its standard error. Without TEXT_FILE, stdin is
    read.
    """
    if text is not None and file is not None:
        raise click.UsageError("TEXT_FILE and -f exclude each other.")
    name = text if file is None else file
    content = read_stdin() if name is None else _read(name)
    if content is None:
        raise click.UsageError("Give TEXT_FILE, or pipe a text in.")

    from llamacli.tools.perplexity import perplexity as measure
    from llamacli.tools.perplexity import perplexity_tokens

    with load(model or str(demo_path()), mode, threads) as loaded:
        tokens = perplexity_tokens(loaded, content)
        if ctx_size > loaded.config.context_length:
            _log.warning("-c %d: the model was trained for %d tokens only", ctx_size, loaded.config.context_length)
        estimates = measure(
            loaded, tokens, n_ctx=ctx_size, max_chunks=None if chunks < 0 else chunks, kv_type=kv_type
        )  # fmt: skip
        results = list(estimates) if output == "json" else list(_shown(estimates))
    if not results:
        return
    last = results[-1]
    if output == "text":
        note = f"{last.n_chunks} chunks of {ctx_size} tokens, {last.n_scored} of them scored"
        click.echo(f"\nperplexity {last.value:.4f} ± {last.error:.5f} ({note})")
        return
    print_json(
        {
            "perplexity": last.value,
            "error": last.error,
            "n_ctx": ctx_size,
            "n_chunks": last.n_chunks,
            "n_tokens": len(tokens),
            "n_scored": last.n_scored,
            "running": [estimate.value for estimate in results],
        }
    )


def _read(name: str) -> str:
    from llamacli.gguf import is_gguf

    if is_gguf(name):
        raise InvalidRequestError(f"{name} is a model, not a text: a model is given with -m")
    return read_file(Path(name))


def _shown(estimates: Iterable[Estimate]) -> Iterable[Estimate]:
    """Show each estimate as it comes."""
    for estimate in estimates:
        write(f"[{estimate.n_chunks}]{estimate.value:.4f},")
        yield estimate
