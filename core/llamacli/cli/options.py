"""Options and types that several commands share."""

from __future__ import annotations

import logging
import math
from typing import Any, TypeVar

import click

from llamacli.cli.output import note

Decorated = TypeVar("Decorated")

PATH = click.Path()
"""A file's path, as a str. Whether it can be read is found out by reading it."""

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


class FiniteRange(click.FloatRange):
    """A FloatRange that refuses NaN and infinities too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
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
