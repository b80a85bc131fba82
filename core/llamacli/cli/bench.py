"""`llamacli bench`: speed in tokens per second."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli import options
from llamacli.cli.command import Command, output_option
from llamacli.cli.hub import resolve_model
from llamacli.cli.numbers import Integer, IntList
from llamacli.cli.options import PATH, option
from llamacli.cli.output import print_json
from llamacli.cli.overrides import override_options, pop_overrides
from llamacli.cli.plot import ImagePath
from llamacli.cli.progress import Task, load, shown
from llamacli.hub.demo import demo_path

if TYPE_CHECKING:
    from llamacli.tools.bench import Row


_MAX = 1_000_000

_INTERVAL_S = 0.5
"""Seconds between two updates of the status line, which take time of the cores that are measured."""


def _lengths(short: str, name: str, default: str, text: str) -> Callable[[Any], Any]:
    return option(short, name, type=IntList(_MAX), default=default, show_default=True, help=text)


@click.command(cls=Command)
@click.argument("file", required=False, metavar="[MODEL]", type=PATH)
@option("-m", "--model", type=PATH, help="Model file; default: the demo model.")
@_lengths("-p", "--n-prompt", "512", f"Prompt lengths in tokens, each from 0 to {_MAX}; 0: no test.")
@_lengths("-n", "--n-gen", "128", f"Numbers of tokens to generate, each from 0 to {_MAX}; 0: no test.")
@_lengths("-d", "--n-depth", "0", f"Numbers of tokens in the cache before each test, each from 0 to {_MAX}.")
@option(
    "-r", "--repetitions", metavar="N", type=Integer(1), default=5, show_default=True, help="Repetitions of each test."
)
@options.threads_option
@options.mode_option
@options.load_option
@options.prompts_option
@options.kv_type_options("f16")
@options.lora_option
@override_options
@output_option("md", "json", "jsonl", "csv")
@option("--plot", type=ImagePath(), help="Also plot the results to a PNG, SVG or PDF file. Needs matplotlib.")
@options.global_options
def bench(
    file: str | None,
    model: str | None,
    n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...],
    n_depth: tuple[int, ...],
    repetitions: int,
    threads: int | None,
    mode: str,
    load_mode: str,
    prompts: str,
    kv_type: str | tuple[str, str] | None,
    lora: tuple[tuple[str, float], ...],
    output: str,
    plot: str | None,
    **given: Any,
) -> None:
    """Benchmark tokens per second, with the tests of llama.cpp.

    `pp512` evaluates a prompt of 512 tokens at once, `tg128` generates 128 tokens one by one. Tokens are random, and
    the output has the columns of llama.cpp's benchmark.
    """
    if None not in (file, model):
        raise click.UsageError("MODEL and -m exclude each other.")
    model = file if model is None else model
    path = resolve_model(model) if model is not None else str(demo_path())
    measured: list[Row] = []
    with load(path, mode, threads, lora, load_mode, pop_overrides(given), prompts=prompts) as loaded:
        from llamacli.kernels.team import check_threads
        from llamacli.tools.bench import measure

        n_threads = check_threads(threads)
        task = Task("", unit=" runs")

        def report(test: str, done: int, total: int) -> None:
            task.label = test
            task.report(done, total)

        rows = measure(
            path, loaded, n_prompt, n_gen, n_depth, repetitions=repetitions, threads=n_threads,
            kv_type=kv_type or "f16", progress=report,
        )  # fmt: skip
        _PRINTERS[output](_recorded(rows, measured, task))
    if plot is not None:
        from llamacli.cli.plot import plot_rates

        plot_rates(measured, plot)


def _recorded(rows: Iterator[Row], measured: list[Row], task: Task) -> Iterator[Row]:
    while True:
        with shown(task, interval_s=_INTERVAL_S):
            row = next(rows, None)
        if row is None:
            return
        measured.append(row)
        yield row


def _print_md(rows: Iterable[Row]) -> None:
    header = ("model", "size", "params", "backend", "threads", "test", "t/s")
    widths = (24, 10, 10, 7, 7, 16, 18)

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))} |"

    click.echo(line(header))
    click.echo(f"| {' | '.join('-' * (width - 1) + ':' for width in widths)} |")
    for row in rows:
        cells = (
            row.model_type, f"{row.model_size / 2**20:.2f} MiB", f"{row.model_n_params / 1e6:.2f} M", row.backend,
            str(row.n_threads), row.test, f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
        )  # fmt: skip
        click.echo(line(cells))


def _print_json(rows: Iterable[Row]) -> None:
    print_json([row.as_dict() for row in rows])


def _print_jsonl(rows: Iterable[Row]) -> None:
    for row in rows:
        print_json(row.as_dict(), indent=None)


def _print_csv(rows: Iterable[Row]) -> None:
    writer = None
    for row in rows:
        cells = {name: value for name, value in row.as_dict().items() if not name.startswith("samples")}
        if writer is None:
            writer = csv.DictWriter(sys.stdout, cells, lineterminator="\n")
            writer.writeheader()
        writer.writerow(cells)


_PRINTERS = {"md": _print_md, "json": _print_json, "jsonl": _print_jsonl, "csv": _print_csv}
