"""Text input from arguments, files and stdin."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import sys
from pathlib import Path
from typing import BinaryIO

from llamacli.cli.output import note
from llamacli.errors import InvalidRequestError

_PATIENCE_S = 1.0
"""Seconds without any text from stdin until the user is asked for it."""

MAX_TEXT_BYTES = 256 << 20
"""Largest text that is read; files such as /dev/zero never end."""

_UNDECODED = re.compile("[\udc80-\udcff]")


_IMAGE = re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP", re.DOTALL)


def read_file(path: Path) -> str:
    """Read a UTF-8 file.

    Raises InvalidRequestError if it is larger than MAX_TEXT_BYTES, an image or not UTF-8, OSError.
    """
    data = read_bytes(path)
    if _IMAGE.match(data):
        raise InvalidRequestError(f"{path} is an image: --image shows it to the model, or /image in a chat")
    return decoded(data, str(path))


def read_bytes(path: Path) -> bytes:
    """Read a file of at most MAX_TEXT_BYTES."""
    with open(path, "rb") as file:
        return _read_all(file, str(path))


def _read_all(file: BinaryIO, source: str) -> bytes:
    data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise InvalidRequestError(f"{source} is larger than {MAX_TEXT_BYTES >> 20} MiB, the most that is read")
    return data


def read_stdin() -> str | None:
    """Read all of stdin; None if it is a terminal or closed.

    A note asks for text if none comes for a second.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    with contextlib.suppress(OSError, ValueError):  # not a file that can be waited for
        if not select.select([sys.stdin], [], [], _PATIENCE_S)[0]:
            note("llamacli: reading text from stdin until it ends; to read none, add </dev/null")
    return decoded(_read_all(sys.stdin.buffer, "stdin"), "stdin")


def argument(text: str) -> str:
    """Decode a command-line argument as UTF-8; see `redecoded`."""
    return redecoded(text, "the text on the command line")


def redecoded(text: str, source: str) -> str:
    """Decode surrogate escapes, left by the locale's encoding, as UTF-8."""
    return decoded(os.fsencode(text), source) if _UNDECODED.search(text) else text


_ESCAPE = re.compile(r"""(?:\\x[0-9a-fA-F]{2})+|\\[nrt'"\\]""")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def unescaped(text: str) -> str:
    r"""Replace backslash escapes by their characters.

    They are `\n`, `\r`, `\t`, `\'`, `\"`, `\\` and `\x41`; other backslashes stay. As in llama.cpp, `\xe2\x82\xac` are
    the bytes of one character in UTF-8. Raises InvalidRequestError if they are not UTF-8.
    """

    def replaced(found: re.Match[str]) -> str:
        if found[0].startswith(r"\x"):
            return decoded(bytes.fromhex(found[0].replace(r"\x", "")), found[0])
        return _ESCAPED.get(found[0][1], found[0][1])

    return _ESCAPE.sub(replaced, text)


def words(text: str) -> list[str]:
    """Split a line into words, which may be quoted; backslashes stay.

    Raises InvalidRequestError for a quotation mark without its second.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    try:
        return list(lexer)
    except ValueError:
        raise InvalidRequestError(f"{text} has a quotation mark without its second") from None


def without_final_newline(text: str) -> str:
    """Remove one line end from the end of a text."""
    return text.removesuffix("\n").removesuffix("\r")


def decoded(data: bytes, source: str) -> str:
    """Decode UTF-8; InvalidRequestError names `source`."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None
