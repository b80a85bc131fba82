"""Text input from arguments, files and stdin."""

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
    """Read a UTF-8 file."""
    return decoded(path.read_bytes(), str(path))


def read_stdin() -> str | None:
    """Read all of stdin; None if it is a terminal or closed."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    _log.info("reading stdin")  # a hint for users who wait at an open pipe
    return decoded(sys.stdin.buffer.read(), "stdin")


def argument(text: str) -> str:
    """Decode a command-line argument as UTF-8; see `redecoded`."""
    return redecoded(text, "the text on the command line")


def redecoded(text: str, source: str) -> str:
    """Decode text with surrogate escapes as UTF-8.

    It has them where the locale's encoding could not decode it.
    """
    return decoded(os.fsencode(text), source) if _UNDECODED.search(text) else text


def without_final_newline(text: str) -> str:
    """Remove one line end from the end of a text."""
    return text.removesuffix("\n").removesuffix("\r")


def decoded(data: bytes, source: str) -> str:
    """Decode UTF-8; InvalidRequestError names `source`."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None
