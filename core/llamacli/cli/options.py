"""Options and parameter types shared by several commands."""

from __future__ import annotations

import functools
import logging
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llamacli.cli.command import Option
from llamacli.cli.numbers import Integer
from llamacli.cli.output import note
from llamacli.errors import PluginWarning
from llamacli.util.settings import MAX_CONTEXT, MAX_THREADS, KVTypeName, LoadMode, Prompts, QuantMode

if TYPE_CHECKING:
    from llamacli import Model

Decorated = TypeVar("Decorated")

PATH = click.Path()
"""A file's path as a str, not checked until the file is opened."""

_log = logging.getLogger(__name__)

option = functools.partial(click.option, cls=Option)
"""Decorator that adds an option to a command."""

DEBUG = "llamacli.debug"
"""Key in `Context.meta` of the flag that errors show their traceback."""


threads_option = option(
    "-t", "--threads", metavar="N", type=Integer(1, MAX_THREADS),
    help="Number of threads; default: one per usable core.",
)  # fmt: skip
"""Option `-t`; its default is None."""

mode_option = option(
    "--mode", type=click.Choice([mode.value for mode in QuantMode]), default=QuantMode.AUTO.value, show_default=True,
    help="Types of the weights in memory: the file's own (auto), exact (fp32), or requantized (q8, q4).",
)  # fmt: skip
"""Option `--mode`: a `llamacli.QuantMode` by name."""

load_option = option(
    "--load", "load_mode", type=click.Choice([mode.value for mode in LoadMode]), default=LoadMode.AUTO.value,
    show_default=True,
    help="Place of the weights: memory, a packed copy on disk that is read when it is used (map), or by what fits.",
)  # fmt: skip
"""Option `--load`: a `LoadMode` by name."""


prompts_option = option(
    "--prompts", type=click.Choice([way.value for way in Prompts]), default=Prompts.REGISTERS.value, show_default=True,
    help="Products of prompts: as those of generated tokens (registers), or by AMX in bfloat16 (tiles).",
)  # fmt: skip
"""Option `--prompts`: a `Prompts` by name."""


def chunk_options(shortest: int) -> Callable[[Decorated], Decorated]:
    """Add `-c` and `--chunks` to a command.

    A text is evaluated in chunks of at least `shortest` tokens. The command gets `ctx_size`, and `chunks`, which is
    None for all.
    """

    def limit(_ctx: click.Context, _param: click.Parameter, value: int) -> int | None:
        if not value:
            raise click.BadParameter("0 is no chunk; give at least 1, or -1 for all.")
        return None if value < 0 else value

    def decorate(command: Decorated) -> Decorated:
        for add in (
            option(
                "--chunks", metavar="N", type=Integer(-1), default=-1, show_default=True, callback=limit,
                help="Maximum number of chunks; -1: all.",
            ),
            option(
                "-c", "--ctx-size", metavar="N", type=Integer(shortest, MAX_CONTEXT), default=512, show_default=True,
                help="Chunk length in tokens.",
            ),
        ):  # fmt: skip
            command = add(command)  # type: ignore[type-var]
        return command

    return decorate


def kv_type_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--kv-type`, `-ctk` and `-ctv` to a command.

    The latter are llama.cpp's, for keys and values alone.
    The command gets one parameter `kv_type`: None, one name, or a pair. `default` is text for the help.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(
            *args: Any, kv_type: str | None, cache_type_k: str | None, cache_type_v: str | None, **rest: Any
        ) -> Any:
            pair = None
            if cache_type_k or cache_type_v:
                missing = kv_type or "f16"
                pair = (cache_type_k or missing, cache_type_v or missing)
            return command(*args, kv_type=pair or kv_type, **rest)

        choice = click.Choice([name.value for name in KVTypeName])
        options = (
            option("--kv-type", type=choice, help=f"Type of cached keys and values. Default: {default}."),
            option("-ctk", "--cache-type-k", type=choice, metavar="TYPE", help="Type of cached keys only."),
            option("-ctv", "--cache-type-v", type=choice, metavar="TYPE", help="Type of cached values only."),
        )
        decorated: Callable[..., Any] = run
        for add in reversed(options):
            decorated = add(decorated)
        return decorated

    return decorate


class LoraFile(click.Path):
    """File of a LoRA adapter with its scale: FILE or FILE:SCALE."""

    name = "file[:scale]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a file and its scale, 1 by default."""
        if isinstance(value, tuple):
            return value
        if Path(str(value)).is_dir():
            self.fail(f"{value} is a folder: `llamacli convert FOLDER OUT` makes a file of a PEFT adapter.", param, ctx)
        file, colon, number = str(value).rpartition(":")
        if not colon or Path(str(value)).exists():
            return str(value), 1.0
        try:
            scale = float(number)
        except ValueError:
            scale = math.nan
        if not math.isfinite(scale):
            self.fail(f"{number!r} is not a number; expected FILE or FILE:SCALE, as in adapter.gguf:0.5.", param, ctx)
        return file, scale


mmproj_option = option(
    "-mm", "--mmproj", type=PATH, metavar="FILE",
    help="Encoder of pictures, a mmproj file; default: the one in the model's folder.",
)  # fmt: skip
lora_option = option(
    "--lora", "--lora-scaled", metavar="FILE[:SCALE]", type=LoraFile(), multiple=True, allow_from_autoenv=False,
    help="Apply a LoRA adapter, a GGUF file; may be given several times. SCALE multiplies it; default: 1.",
)  # fmt: skip
"""Option of LoRA adapters: a tuple of files with their scales."""


def global_options(command: Decorated, *, env: bool = False) -> Decorated:
    """Add `-v` and `--debug`, valid before and after the command's name."""

    def verbose(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            logging.getLogger("llamacli").setLevel(logging.INFO)

    def debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG] = True

    settings: dict[str, Any] = {"is_flag": True, "expose_value": False, "allow_from_autoenv": env}
    for decorate in (
        click.option("--debug", callback=debug, help="Show the traceback of an error.", **settings),
        click.option("-v", "--verbose", callback=verbose, help="Log progress to stderr.", **settings),
    ):
        command = decorate(command)  # type: ignore[type-var]
    return command


def warn_of_long_context(model: Model, n_ctx: int) -> None:
    """Warn of a context longer than that of the training."""
    if n_ctx > model.config.context_length:
        _log.warning("-c %d: the model was trained for %d tokens only", n_ctx, model.config.context_length)


class StderrHandler(logging.Handler):
    """Log handler that writes lines to the current stderr.

    Records of the logger `timed`, if it is not empty, and of those below it begin with their time. With `as_json` each
    line is an object: time, level, logger, message, what the record's attribute `fields` has, and a traceback.
    """

    timed = ""
    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        if self.as_json:
            click.echo(_as_json(record), err=True)
            return
        text = record.getMessage()
        if self.timed and record.name.startswith(self.timed):
            text = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record.created))} {text}"
        note(f"llamacli: {record.levelname.lower()}: {text}")


def _as_json(record: logging.LogRecord) -> str:
    import json

    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    line = {
        "time": f"{moment}.{int(record.msecs):03}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
        **getattr(record, "fields", {}),
    }
    if record.exc_info:
        line["exception"] = logging.Formatter().formatException(record.exc_info)
    return json.dumps(line, default=str)


def log_to_stderr() -> None:
    """Log to stderr from WARNING on; `-v` lowers the level to INFO."""
    logger = logging.getLogger("llamacli")
    logger.setLevel(logging.WARNING)
    warnings.simplefilter("ignore", PluginWarning)  # each is logged too
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        logger.addHandler(StderrHandler())
