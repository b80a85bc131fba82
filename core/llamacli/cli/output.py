"""Terminal output of the commands: text, notes, status line, tables, JSON."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from llamacli.errors import LlamaCliError, lacks_memory

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
"""Control characters except tabs and line ends."""

_LONGEST = 2000
"""Characters of the longest error that is printed whole."""


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def write(text: str, *, err: bool = False, dim: bool = False, wrap: Callable[[str], str] = str) -> None:
    """Write generated text to stdout or stderr and flush.

    On a terminal control characters are escaped, so that a model cannot send terminal commands, lines are broken by
    `wrap`, and text is dimmed with `dim`, unless NO_COLOR is set. Files and pipes get the text unchanged.
    """
    stream = sys.stderr if err else sys.stdout
    if stream is not None and stream.isatty():
        text = wrap(_CONTROLS.sub(_escaped, text))
        if dim and not os.environ.get("NO_COLOR"):
            text = click.style(text, dim=True)
    click.echo(text, nl=False, err=err, color=True)


def note(text: str, *, hang: int = 0) -> None:
    """Write one line to stderr.

    A terminal gets lines broken at words; those after the first are indented by `hang`.
    """
    line = at_words(printable(text), hang=hang)
    with _lock:
        status("")
        click.echo(line, err=True)


def at_words(text: str, *, hang: int = 0) -> str:
    """Text for stderr; lines for a terminal are broken at words."""
    return _filled(text, terminal_columns(), hang) if has_status() else text


def print_field(label: str, value: str, width: int = 16) -> None:
    """Print a label and a value in two columns, wrapped on terminals."""
    line = f"{label:<{width}}{printable(value)}"
    if sys.stdout is not None and sys.stdout.isatty():
        line = _filled(line, shutil.get_terminal_size().columns, width)
    click.echo(line)


def _filled(text: str, columns: int, hang: int) -> str:
    width = max(20, columns - 1)
    return textwrap.fill(text, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)


_status = ""
_lock = threading.RLock()
"""Held while stderr is written to, as a thread updates the status line."""


def status(text: str) -> None:
    """Replace the terminal's status line on stderr; an empty text removes it."""
    global _status
    with _lock:
        if text == _status:
            return
        _status = text
        click.echo(f"\r\x1b[K{printable(text)[: terminal_columns() - 1]}", err=True, nl=False, color=True)


def terminal_columns() -> int:
    """Width of the terminal on stderr, whatever stdout is; 80 if unknown."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is no file, or closed
        columns = 0 if os.environ.get("COLUMNS") else os.get_terminal_size(sys.stderr.fileno()).columns
        if columns:
            return columns
    return shutil.get_terminal_size().columns


def has_status() -> bool:
    """Test that stderr is a terminal that can show a status line."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print one JSON document in ASCII; NaN and infinities become strings."""
    click.echo(json.dumps(_strict(value), indent=indent))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> None:
    """Print a table.

    A column whose header ends in a colon is right-aligned. On a terminal, cells are broken at words where the table is
    wider than that.
    """
    lines = [[printable(cell) for cell in row] for row in rows]
    names = [name.removesuffix(":") for name in header]
    columns = list(zip(names, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if sys.stdout is not None and sys.stdout.isatty():
        least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
        _fit(widths, least, shutil.get_terminal_size().columns - len(indent) - 2 * (len(widths) - 1))
    for line in (names, *lines):
        broken = [_broken(cell, width) for cell, width in zip(line, widths, strict=True)]
        for parts in itertools.zip_longest(*broken, fillvalue=""):
            cells = [
                part.rjust(width) if name.endswith(":") else part.ljust(width)
                for part, width, name in zip(parts, widths, header, strict=True)
            ]
            click.echo(indent + "  ".join(cells).rstrip())


def _fit(widths: list[int], least: Sequence[int], room: int) -> None:
    while sum(widths) > room:
        wide = [i for i, width in enumerate(widths) if width > least[i]]
        if not wide:
            return
        widths[max(wide, key=widths.__getitem__)] -= 1


def _broken(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def printable(text: str) -> str:
    """Escape line breaks and control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: Exception) -> str:
    """Format an error in one line.

    Of an OSError the file and the reason. The middle of a text of more than _LONGEST characters is left out: names in
    files can have any length.
    """
    text = str(error) or type(error).__name__
    if lacks_memory(error):
        text = f"not enough memory: {error}".removesuffix(": ")
    elif isinstance(error, OSError) and error.strerror and not isinstance(error, LlamaCliError):
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


def human_bytes(n: int) -> str:
    """Format a size in bytes, as in `1.50 GiB`."""
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{n} B" if unit == "B" else f"{size:.2f} {unit}"


def human_duration(seconds: float) -> str:
    """Format a duration, as in `45 s`, `3 min 20 s` or `2 h 5 min`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def local_minute(seconds: float) -> str:
    """Format seconds since 1970 as local date and minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def human_count(n: int) -> str:
    """Format a number of parameters, as in `1.24 B`."""
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= factor:
            return f"{n / factor:.2f} {unit}"
    return str(n)


class ClosedStdout(io.TextIOBase):
    """Stream in place of a stdout that was closed before the start.

    Writing raises OSError: otherwise the text would be lost without notice.
    """

    def write(self, text: str, /) -> int:
        """Raise OSError, but for no text."""
        if text:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), "stdout")
        return 0


def discard_stdout() -> None:
    """Redirect stdout to the null device, lest flushing at exit fails again."""
    with contextlib.suppress(OSError, ValueError):  # stdout has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
