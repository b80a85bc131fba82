"""Typed lines of the interactive chat: prompt, history, completion."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from llamacli.cli.output import note, one_line
from llamacli.cli.text import redecoded
from llamacli.util.folders import user_folder

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent

QUOTES = '"""'
PROMPT, MORE = ">>> ", "... "

_PICTURE = re.compile(
    r"""(?<!\S)(?:(?P<q>['"])(?:file://|~?/|\.{1,2}/)[^\n]+?\.(?:TYPES)(?P=q)"""
    r"""|(?:file://|~?/|\.{1,2}/)(?:\\.|[^\s\\])+?\.(?:TYPES)(?=[\s?!.,;:)]|$))""".replace(
        "TYPES", "png|jpe?g|webp|gif|bmp|tiff?"
    ),
    re.IGNORECASE,
)


class Input:
    """Reader of messages at a terminal.

    Lines between triple quotes are one message. `commands` are names to complete after a slash; those in `files` take a
    file's name, `settings` are the names for `/set`. Lines are kept in a file while `keep` is true.
    """

    def __init__(self, commands: Iterable[str], files: Collection[str], settings: Iterable[str]):
        self._history = _history()
        output = create_output()
        if isinstance(output, Vt100_Output):
            # A terminal's answer to the request for its cursor's position may be read as typed text.
            output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            history=self._history,
            completer=_Completer(tuple(commands), files, tuple(settings)),
            complete_while_typing=False,
            reserve_space_for_menu=0,
            output=output,
        )

    def keep(self, wanted: bool) -> None:
        """Keep typed lines in the file, or in memory only."""
        if isinstance(self._history, _FileHistory):
            self._history.enabled = wanted

    def read(self, draft: str = "") -> str:
        """Read one line, or all lines between triple quotes.

        `draft` is there to be edited. Raises KeyboardInterrupt; EOFError; InvalidRequestError for text that is not
        UTF-8.
        """
        line = self._line(PROMPT, draft)
        if not line.lstrip().startswith(QUOTES):
            return line.strip()
        lines = [line.lstrip().removeprefix(QUOTES)]
        while QUOTES not in lines[-1]:
            lines.append(self._line(MORE))
        lines[-1] = lines[-1][: lines[-1].rindex(QUOTES)]
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str, draft: str = "") -> str:
        return redecoded(self._session.prompt(prompt, default=draft), "the input")


class _FileHistory(FileHistory):
    enabled = True

    def store_string(self, string: str) -> None:
        if self.enabled:
            super().store_string(string)


class _Completer(Completer):
    def __init__(self, commands: tuple[str, ...], files: Collection[str], settings: tuple[str, ...]):
        self._commands, self._files, self._settings = commands, files, settings
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        typed = document.text_before_cursor
        if not typed.startswith("/"):
            return
        name, space, argument = typed[1:].partition(" ")
        if not space:
            yield from _starting(name, self._commands, len(name))
        elif name in self._files:
            yield from self._paths.get_completions(Document(argument), complete_event)
        elif name == "set" and " " not in argument:
            yield from _starting(argument, self._settings, len(argument))


def dropped_pictures(text: str) -> tuple[str, list[Path]]:
    """Text without the paths of pictures, and these paths.

    A path begins with `/`, `~/`, `./`, `../` or `file://`, ends like a picture's, and has a file. It is quoted, or its
    spaces are escaped, as terminals write the files that are dropped on them.
    """
    found = [(match, unquoted(match[0])) for match in _PICTURE.finditer(text)]
    dropped = [(match, path) for match, path in found if path.is_file()]
    for match, _ in reversed(dropped):
        text = text[: match.start()].rstrip(" ") + text[match.end() :]
    return (text.strip() if dropped else text), [path for _, path in dropped]


def unquoted(text: str) -> Path:
    """Path of a file as a shell or a terminal writes it."""
    quote = text[0] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else ""
    text = text[1:-1] if quote else re.sub(r"\\(.)", r"\1", text)
    return Path(unquote(text.removeprefix("file://")) if text.startswith("file://") else text).expanduser()


def _starting(typed: str, names: Iterable[str], n_typed: int) -> Iterator[Completion]:
    for name in names:
        if name.startswith(typed):
            yield Completion(name, start_position=-n_typed)


def _history() -> History:
    folder = user_folder("state")
    if folder is None:
        return InMemoryHistory()
    path = folder / "history"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError as error:
        note(f"llamacli: warning: the history is not saved: {one_line(error)}")
        return InMemoryHistory()
    return _FileHistory(path)
