"""Text that a user hands over: an argument, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from llamacli.errors import InvalidRequestError


def read_file(path: Path) -> str:
    """The text of a file."""
    return decoded(path.read_bytes(), str(path))


def read_stdin() -> str | None:
    """All of stdin; None where nobody pipes anything in: a terminal, or no stdin at all."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return decoded(sys.stdin.buffer.read(), "stdin")


def checked_argument(text: str) -> str:
    """An argument as it is, once it is known to be text: the shell hands over any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("the text on the command line is not UTF-8") from None
    return text


def without_final_newline(text: str) -> str:
    """What an editor or `echo` ends a text with is not part of it."""
    return text.removesuffix("\n").removesuffix("\r")


def decoded(data: bytes, source: str) -> str:
    """Bytes as text; InvalidRequestError, naming `source`, if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None
