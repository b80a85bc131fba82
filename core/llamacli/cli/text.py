"""Text that a user hands over: an argument, a file, or stdin."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

from llamacli.errors import InvalidRequestError

_log = logging.getLogger(__name__)

_UNDECODED = re.compile("[\udc80-\udcff]")


def read_file(path: Path) -> str:
    """The text of a file."""
    return decoded(path.read_bytes(), str(path))


def read_stdin() -> str | None:
    """All of stdin; None where nobody pipes anything in: a terminal, or no stdin at all."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    _log.info("reading stdin")  # which may never end where nobody meant it to be read
    return decoded(sys.stdin.buffer.read(), "stdin")


def argument(text: str) -> str:
    """Text from the command line, as `read_anew` has it."""
    return read_anew(text, "the text on the command line")


def read_anew(text: str, source: str) -> str:
    """Where the locale could not decode a text's bytes, they are taken for UTF-8."""
    return decoded(os.fsencode(text), source) if _UNDECODED.search(text) else text


def without_final_newline(text: str) -> str:
    """What an editor or `echo` ends a text with is not part of it."""
    return text.removesuffix("\n").removesuffix("\r")


def decoded(data: bytes, source: str) -> str:
    """Bytes as text; InvalidRequestError, naming `source`, if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None
