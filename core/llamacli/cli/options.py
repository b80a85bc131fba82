"""Options and types that several commands share."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from llamacli.cli.output import note

Decorated = TypeVar("Decorated")

PATH = click.Path()
"""A file's path, as a str. Whether it can be read is found out by reading it."""

MOST_TOKENS = (1 << 31) - 1
"""The longest context: `llamacli.architecture.MAX_CONTEXT`, written out because importing it is slow."""

DEBUG = "llamacli.debug"
"""Key in `Context.meta`: whether errors show their traceback."""


def threads_option(command: Decorated) -> Decorated:
    """Give a command `-t`, None where it was not given."""
    decorate = click.option(
        "-t",
        "--threads",
        metavar="N",
        type=click.IntRange(1, 1024),
        help="How many threads compute; without it, one for each core that may be used.",
    )
    return decorate(command)  # type: ignore[type-var]


def mode_option(command: Decorated) -> Decorated:
    """Give a command `--mode`, a `llamacli.QuantMode`."""
    decorate = click.option(
        "--mode",
        type=click.Choice(["auto", "fp32", "q8", "q4"]),
        default="auto",
        show_default=True,
        help="Keep weights in the file's own types (auto), exact, or requantised.",
    )
    return decorate(command)  # type: ignore[type-var]


CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Those of `llamacli.kv`, written out because importing it would delay every start."""


def kv_type_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `--kv-type` and, of keys and of values alone, llama.cpp's `-ctk` and `-ctv`.

    It gets one parameter `kv_type`: None where nothing was given, one name, or a pair. `default` is told in the help.
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

        choice = click.Choice(CACHE_TYPES)
        options = (
            click.option("--kv-type", type=choice, help=f"Type of cached keys and values. Default: {default}."),
            click.option("-ctk", "--cache-type-k", type=choice, help="Type of cached keys, if another than of values."),
            click.option("-ctv", "--cache-type-v", type=choice, help="Type of cached values."),
        )
        decorated: Callable[..., Any] = run
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


class FiniteRange(click.FloatRange):
    """A FloatRange that refuses NaN and infinities too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number from {self.min:.15g} to {self.max:.15g}.", param, ctx)
        return number


def global_options(command: Decorated, *, env: bool = False) -> Decorated:
    """Give a command `-v` and `--debug`: they may stand before the command's name or after it."""

    def verbose(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            logging.getLogger("llamacli").setLevel(logging.INFO)

    def debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG] = True

    settings: dict[str, Any] = {"is_flag": True, "expose_value": False, "allow_from_autoenv": env}
    for decorate in (
        click.option("--debug", callback=debug, help="Show the traceback of an error.", **settings),
        click.option("-v", "--verbose", callback=verbose, help="Say on stderr what is being done.", **settings),
    ):
        command = decorate(command)  # type: ignore[type-var]
    return command


class StderrHandler(logging.Handler):
    """Log records as lines on stderr, whatever stderr is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        note(f"llamacli: {record.levelname.lower()}: {record.getMessage()}")


def log_to_stderr() -> None:
    """Show warnings and worse of the whole package, until `-v` asks for more."""
    logger = logging.getLogger("llamacli")
    logger.setLevel(logging.WARNING)
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        logger.addHandler(StderrHandler())
