"""Interactive chat of `llamacli run` at a terminal, with prompt_toolkit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from llamacli.chat.codec import GIVEN
from llamacli.chat.messages import Message
from llamacli.cli.chat import replying
from llamacli.cli.interrupts import clear, raise_if_interrupted
from llamacli.cli.output import note, one_line, write
from llamacli.cli.progress import waiting
from llamacli.cli.sampling import FIELDS
from llamacli.cli.text import read_file, redecoded, unescaped, words
from llamacli.errors import ContextOverflowError, InvalidRequestError, LlamaCliError
from llamacli.util.files import replacing
from llamacli.util.folders import user_folder
from llamacli.util.numbers import is_integer

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    from llamacli import ChatSession, SamplingParams

QUOTES = '"""'
PROMPT, MORE = ">>> ", "... "

_NEARLY_FULL = 0.85
"""Fraction of the context from which on every reply is followed by a note about it."""

_SWITCHES = {"on": True, "off": False, "true": True, "false": False}


class _Exit(Exception):  # noqa: N818 - not an error
    """Raised by the command /exit."""


class Repl:
    """Interactive chat at a terminal.

    Ctrl-C stops a reply or discards the typed line; Ctrl-D exits. Lines between triple quotes are one message. Lines
    that begin with a slash are commands. `shift` drops the oldest messages when the context is full; `stats` prints
    the speed of each reply.
    """

    def __init__(self, chat: ChatSession, params: SamplingParams, *, shift: bool, stats: bool, model: str):
        self._chat, self._params, self._shift, self._stats, self._model = chat, params, shift, stats, model
        self._attached: list[str] = []
        self._input: PromptSession[str] = PromptSession(
            history=_history(), completer=_CommandCompleter(), complete_while_typing=False, reserve_space_for_menu=0
        )

    def run(self) -> None:
        """Read and answer messages until the user exits."""
        note(f"{Path(self._model).name}, a context of {self._chat.session.seq_len} tokens. /help lists the commands.")
        while True:
            try:
                self._handle(self._read())
            except (EOFError, _Exit):
                return
            except KeyboardInterrupt:
                clear()
                note("(Ctrl-D exits)")
            except (LlamaCliError, OSError) as error:
                note(f"error: {one_line(error)}")
            except MemoryError:
                note("error: not enough memory")

    def _read(self) -> str:
        """Read one line, or all lines between triple quotes."""
        line = self._line(PROMPT)
        if not line.lstrip().startswith(QUOTES):
            return line.strip()
        lines = [line.lstrip().removeprefix(QUOTES)]
        while QUOTES not in lines[-1]:
            lines.append(self._line(MORE))
        lines[-1] = lines[-1][: lines[-1].rindex(QUOTES)]
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        return redecoded(self._input.prompt(prompt), "the input")

    def _handle(self, text: str) -> None:
        if text.startswith("/"):
            name, _, argument = text[1:].partition(" ")
            if name not in _COMMANDS:
                raise InvalidRequestError(f"unknown command /{name}; /help lists the commands")
            _COMMANDS[name].run(self, argument.strip())
        elif text or self._attached:
            self._chat.add_user("\n\n".join(filter(None, [*self._attached, text])))
            self._attached.clear()
            self._reply()

    def _reply(self) -> None:
        """Write the reply, and a note if the context is nearly full."""
        chat = self._chat
        reasoning = False
        try:
            with replying(chat, self._params, shift=self._shift) as pieces, waiting(chat.session) as wait:
                for piece in wait.watch(pieces):
                    if piece.reasoning != reasoning:
                        reasoning = piece.reasoning
                        write("" if reasoning else "\n\n")
                    write(piece.text, dim=reasoning)
                    raise_if_interrupted()
        except KeyboardInterrupt:
            clear()
        except ContextOverflowError as error:
            chat.history.pop()
            needed = error.n_past + error.n_tokens
            raise InvalidRequestError(
                f"the chat has {needed} tokens with this message, and the context only {error.seq_len}: shorten it, "
                "/clear the chat, or run with a larger -c or with --context-shift"
            ) from error
        except BaseException:
            if chat.pending:
                chat.history.pop()
            raise
        write("\n")
        if self._stats:
            s = chat.session.stats
            note(f"(read {s.n_prompt} tokens, {s.prefill_tps:.1f} tok/s; wrote {s.n_gen}, {s.gen_tps:.1f} tok/s)")
        n_past, seq_len = chat.session.n_past, chat.session.seq_len
        if chat.stop == "context" or n_past >= _NEARLY_FULL * seq_len:
            state = "full" if chat.stop == "context" else "nearly full"
            remedy = "the oldest messages will be dropped" if self._shift else "/clear it, or run with a larger -c"
            note(f"(the context is {state}: {n_past} of {seq_len} tokens; {remedy})")

    # --- commands

    def help(self, _: str) -> None:
        """List the commands."""
        for name, command in _COMMANDS.items():
            if name == command.names[0]:
                usage = f"/{' /'.join(command.names)} {command.argument}".rstrip()
                note(f"  {usage:<28} {command.help}")
        note(f"  {QUOTES:<28} Begin or end a message of several lines.")
        note("  Ctrl-C stops a reply, Ctrl-D exits.")

    def set(self, argument: str) -> None:
        """Change a setting."""
        name, _, value = argument.removeprefix("parameter ").lstrip().partition(" ")
        key, value = name.replace("-", "_"), value.strip()
        if not key:
            return self.show("")
        if not value:
            raise InvalidRequestError(f"/set {name} needs a value")
        if key == "seed":
            self._chat.session.set_seed(_integer(name, value))
        elif key == "max_tokens":
            n = _integer(name, value)
            self._chat.max_new = n if n >= 0 else self._chat.session.seq_len
        elif key == "think":
            if value not in _SWITCHES:
                raise InvalidRequestError(f"/set think takes on or off, not {value!r}")
            self._chat.variables["enable_thinking"] = _SWITCHES[value]
        elif key == "system":
            self._chat.system = value
        elif key == "stop":
            self._params = attrs.evolve(self._params, stop=stop_strings(value))
        elif key == "effort":
            self._chat.variables["reasoning_effort"] = value
        elif key in FIELDS:
            field = FIELDS[key]
            number: Any = _integer(name, value) if is_integer(self._numbers()[field]) else _number(name, value)
            self._params = attrs.evolve(self._params, **{field: number})
        else:
            names = ", ".join(["seed", "max_tokens", "stop", "think", "effort", "system", *self._numbers()])
            raise InvalidRequestError(f"unknown setting {name!r}; known are {names}")
        return None

    def show(self, _: str) -> None:
        """Show the settings and the state of the chat."""
        chat = self._chat
        note(f"model       {self._model}")
        note(f"template    {chat.format.name}")
        note(f"system      {chat.system or '(none)'}")
        note(f"context     {chat.session.n_past} of {chat.session.seq_len} tokens, {len(chat.history)} messages")
        note(f"max_tokens  {chat.max_new}")
        for name, value in {**chat.variables, **self._numbers()}.items():
            note(f"{name:<11} {value}")

    def clear(self, _: str) -> None:
        """Delete all messages."""
        self._chat.clear()
        self._attached.clear()
        note("(all messages deleted)")

    def regen(self, _: str) -> None:
        """Replace the last reply with a new one."""
        if self._chat.retract() is None:
            raise InvalidRequestError("there is no reply to replace")
        self._reply()

    def system(self, argument: str) -> None:
        """Set the system prompt; without a text, show it."""
        if argument:
            self._chat.system = argument
        else:
            note(self._chat.system or "(none)")

    def save(self, argument: str) -> None:
        """Save the chat to a file."""
        path = _path("save", argument)
        content = {
            "system": self._chat.system,
            "messages": [message.as_dict() for message in self._chat.history],
            "variables": self._chat.variables,
        }
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        with replacing(path, overwrite=True) as file:
            file.write(text.encode())
        note(f"({path}: {len(self._chat.history)} messages saved)")

    def load(self, argument: str) -> None:
        """Load a chat from a file."""
        path = _path("load", argument)
        try:
            found = json.loads(read_file(path))
            system, variables = found["system"], dict(found["variables"])
            messages = [Message.from_dict(message) for message in found["messages"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidRequestError(f"{path}: not a chat file of /save: {error}") from error
        if not isinstance(system, str) or GIVEN & variables.keys():
            raise InvalidRequestError(f"{path}: not a chat file of /save")
        self._chat.system, self._chat.history[:], self._chat.variables = system, messages, variables
        note(f"({path}: {len(messages)} messages)")

    def read(self, argument: str) -> None:
        """Attach a file's text to the next message."""
        path = _path("read", argument)
        self._attached.append(read_file(path))
        note(f"({path}: attached to the next message)")

    def exit(self, _: str) -> None:
        """Exit."""
        raise _Exit

    def _numbers(self) -> dict[str, Any]:
        """The numeric sampling parameters."""
        return {field: getattr(self._params, field) for field in dict.fromkeys(FIELDS.values())}


@attrs.frozen
class _Command:
    names: tuple[str, ...]
    argument: str
    run: Callable[[Repl, str], None]

    @property
    def help(self) -> str:
        return str(self.run.__doc__)


_COMMANDS = {
    name: command
    for command in (
        _Command(("help", "?"), "", Repl.help),
        _Command(("set",), "NAME VALUE", Repl.set),
        _Command(("show",), "", Repl.show),
        _Command(("clear",), "", Repl.clear),
        _Command(("regen",), "", Repl.regen),
        _Command(("system",), "TEXT", Repl.system),
        _Command(("save",), "FILE", Repl.save),
        _Command(("load",), "FILE", Repl.load),
        _Command(("read",), "FILE", Repl.read),
        _Command(("exit", "bye"), "", Repl.exit),
    )
    for name in command.names
}


class _CommandCompleter(Completer):
    """Tab completion of command names."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """The commands that start with the typed text."""
        typed = document.text_before_cursor
        if typed.startswith("/"):
            for name in _COMMANDS:
                if name.startswith(typed[1:]):
                    yield Completion(f"/{name}", start_position=-len(typed))


def _history() -> History:
    """History of typed lines, in the state directory or in memory."""
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
    return FileHistory(path)


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"/{command} needs a file name")
    return Path(argument).expanduser()


def stop_strings(value: str) -> tuple[str, ...]:
    """Stop strings of `/set stop`, quoted as in a shell; `""` is none."""
    return tuple(filter(None, map(unescaped, words(value))))


def _integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidRequestError(f"/set {name} takes an integer, not {value!r}") from None


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidRequestError(f"/set {name} takes a number, not {value!r}") from None
