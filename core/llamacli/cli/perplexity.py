"""`llamacli perplexity`: perplexity of a text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli import options
from llamacli.cli.command import Command, output_option
from llamacli.cli.options import PATH, option
from llamacli.cli.output import has_status, note, print_json, write
from llamacli.cli.progress import Task, load, shown
from llamacli.cli.text import decoded, read_bytes, read_stdin
from llamacli.errors import InvalidRequestError
from llamacli.hub.demo import demo_path

if TYPE_CHECKING:
    from llamacli.model import Model
    from llamacli.tools.perplexity import Estimate


@click.command(cls=Command)
@click.argument("text", required=False, type=PATH, metavar="[TEXT_FILE]")
@option("-m", "--model", type=PATH, help="Model file; default: the demo model.")
@option("-f", "--file", type=PATH, allow_from_autoenv=False, help="Text file, instead of TEXT_FILE.")
@option(
    "--kl-divergence-base", "kl_base", metavar="FILE", type=PATH,
    help="Log-probabilities of a base model, as llama.cpp's: saved, or read by --kl-divergence.",
)  # fmt: skip
@option("--kl-divergence", "compare", is_flag=True, help="Compare with --kl-divergence-base; needs no text.")
@options.chunk_options(4)
@options.threads_option
@options.mode_option
@options.prompts_option
@options.kv_type_options("f32 in mode fp32, else f16")
@options.lora_option
@output_option("text", "json")
@options.global_options
def perplexity(
    text: str | None,
    model: str | None,
    file: str | None,
    kl_base: str | None,
    compare: bool,
    ctx_size: int,
    chunks: int | None,
    threads: int | None,
    mode: str,
    prompts: str,
    kv_type: str | tuple[str, str] | None,
    lora: tuple[tuple[str, float], ...],
    output: str,
) -> None:
    """Measure the perplexity of a text, as llama.cpp does.

    Lower is better. The text is evaluated in independent chunks that begin with BOS; tokens of the second half of each
    are scored. Prints the estimate after each chunk, at a terminal in the status line, and finally the result with its
    standard error. Without TEXT_FILE, the text is read from stdin.

    --kl-divergence prints how far the model's distributions are from those of a base model, such as the same before it
    was quantized, for the text, chunks and --ctx-size of FILE.
    """
    if compare:
        if kl_base is None:
            raise click.UsageError("--kl-divergence needs --kl-divergence-base FILE.")
        if text is not None or file is not None:
            raise click.UsageError("--kl-divergence takes the text of --kl-divergence-base: give none.")
        with load(model or str(demo_path()), mode, threads, lora, prompts=prompts) as loaded:
            _compare(loaded, Path(kl_base), chunks, kv_type, output)
        return
    content = _read_text(text, file)

    with load(model or str(demo_path()), mode, threads, lora, prompts=prompts) as loaded:
        from llamacli.tools.divergence import save_base
        from llamacli.tools.importance import number_of_chunks
        from llamacli.tools.perplexity import perplexity as measure
        from llamacli.tools.perplexity import perplexity_tokens

        tokens = perplexity_tokens(loaded, content)
        options.warn_of_long_context(loaded, ctx_size)
        arguments: dict[str, Any] = {"n_ctx": ctx_size, "max_chunks": chunks, "kv_type": kv_type}
        estimates = (
            save_base(loaded, tokens, Path(kl_base), **arguments) if kl_base else measure(loaded, tokens, **arguments)
        )
        n_chunks = number_of_chunks(tokens, ctx_size, chunks)
        results: list[Estimate] = []
        try:
            for estimate in _watched(estimates, n_chunks, output == "text"):
                results.append(estimate)
        except KeyboardInterrupt:
            if results:
                last = results[-1]
                value = f"perplexity {last.value:.4f} ± {last.error:.5f}"
                note(f"interrupted: {value} after {last.n_chunks} of {n_chunks} chunks")
            raise
    if output == "json":
        _print_json(results, ctx_size, len(tokens))
    else:
        last = results[-1]
        scored = f"{last.n_chunks} chunks of {ctx_size} tokens, {last.n_scored} of them scored"
        if not _in_status_line():
            click.echo()
        click.echo(f"perplexity {last.value:.4f} ± {last.error:.5f} ({scored})")


def _compare(model: Model, path: Path, chunks: int | None, kv_type: str | tuple[str, str] | None, output: str) -> None:
    from llamacli.tools.divergence import BaseFile, divergence

    base, task = BaseFile.open(path), Task("KL divergence", unit=" chunks")
    last = None
    with shown(task):
        for last in divergence(model, base, max_chunks=chunks, kv_type=kv_type):
            task.report(last.n_chunks, min(base.n_chunks, chunks or base.n_chunks))
            task.label = f"KL divergence {last.kld[0]:.5f}"
    assert last is not None
    values = {
        "perplexity": last.perplexity, "perplexity_base": last.base, "log_ratio": last.log_ratio,
        "kl_divergence": last.kld, "rms_dp": last.rms_dp, "same_top": last.same_top,
    }  # fmt: skip
    if output == "json":
        found = {name: {"value": value, "error": error} for name, (value, error) in values.items()}
        points = {"kl_divergence": last.percentiles(last.klds), "dp": last.percentiles(last.dps)}
        sizes = {"n_ctx": base.n_ctx, "n_chunks": last.n_chunks, "n_scored": last.n_scored}
        print_json(found | {"percentiles": points} | sizes)
        return
    for name, (value, error) in values.items():
        click.echo(f"{name:<16} {value:10.6f} ± {error:.6f}")
    dps = last.percentiles(last.dps)
    for percent, kld in last.percentiles(last.klds).items():
        click.echo(f"{percent:5} %  KLD {kld:10.6f}  Δp {100 * dps[percent]:8.3f} %")
    click.echo(f"{last.n_chunks} chunks of {base.n_ctx} tokens, {last.n_scored} of them scored")


def _read_text(argument: str | None, option: str | None) -> str:
    if argument is not None and option is not None:
        raise click.UsageError("TEXT_FILE and -f exclude each other.")
    name = option if argument is None else argument
    if name is None:
        content = read_stdin()
        if content is None:
            raise click.UsageError("Give TEXT_FILE, or pipe a text in.")
        return content
    data = read_bytes(Path(name))
    if data.startswith(b"GGUF"):
        raise InvalidRequestError(f"{name} is a model file, not a text: use -m for the model")
    return decoded(data, name)


def _in_status_line() -> bool:
    return has_status() and sys.stdout is not None and sys.stdout.isatty()


def _watched(estimates: Iterable[Estimate], n_chunks: int, printed: bool) -> Iterator[Estimate]:
    task = Task("perplexity", unit=" chunks")
    task.report(0, n_chunks)
    with shown(task):
        for estimate in estimates:
            task.report(estimate.n_chunks, n_chunks)
            task.label = f"perplexity {estimate.value:.4f}"
            if printed and not _in_status_line():
                write(f"[{estimate.n_chunks}]{estimate.value:.4f},")
            yield estimate


def _print_json(results: Sequence[Estimate], n_ctx: int, n_tokens: int) -> None:
    last = results[-1]
    print_json(
        {
            "perplexity": last.value,
            "error": last.error,
            "n_ctx": n_ctx,
            "n_chunks": last.n_chunks,
            "n_tokens": n_tokens,
            "n_scored": last.n_scored,
            "running": [estimate.value for estimate in results],
        }
    )
