"""`llamacli run` at a terminal: a conversation. Only this module needs prompt-toolkit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from llamacli.chat.messages import Message
from llamacli.chat.session import GIVEN
from llamacli.cli.chat import replying
from llamacli.cli.interrupts import check, forget
from llamacli.cli.output import note, one_line, write
from llamacli.cli.sampling import FIELDS
from llamacli.cli.text import read_anew, read_file
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
"""The share of the context from which on every reply says how full it is."""

_SWITCHES = {"on": True, "off": False, "true": True, "false": False}


class _Leave(Exception):  # noqa: N818 - nothing went wrong
    """The user wants to go."""


class Repl:
    """A conversation at a terminal, until the user leaves.

    Ctrl-C stops a reply, or what is being typed; Ctrl-D leaves. Lines between triple quotes are one text. Lines that
    begin with a slash are commands. With `stats` the figures of each reply are shown.
    """

    def __init__(self, chat: ChatSession, params: SamplingParams, *, shift: bool, stats: bool, model: str):
        self._chat, self._params, self._shift, self._stats, self._model = chat, params, shift, stats, model
        self._attached: list[str] = []
        self._input: PromptSession[str] = PromptSession(
            history=_history(), completer=_Commands(), complete_while_typing=False, reserve_space_for_menu=0
        )

    def run(self) -> None:
        """Converse."""
        note(
            f"{Path(self._model).name}, a context of {self._chat.session.seq_len} tokens. /help says what can be done."
        )
        while True:
            try:
                self._take(self._read())
            except (EOFError, _Leave):
                return
            except KeyboardInterrupt:
                forget()
                note("(Ctrl-D leaves)")
            except (LlamaCliError, OSError) as error:
                note(f"error: {one_line(error)}")
            except MemoryError:
                note("error: not enough memory")

    def _read(self) -> str:
        """What the user types: one line, or all lines from triple quotes to triple quotes."""
        line = self._line(PROMPT)
        if not line.lstrip().startswith(QUOTES):
            return line.strip()
        lines = [line.lstrip().removeprefix(QUOTES)]
        while QUOTES not in lines[-1]:
            lines.append(self._line(MORE))
        lines[-1] = lines[-1][: lines[-1].rindex(QUOTES)]
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        return read_anew(self._input.prompt(prompt), "what was typed")

    def _take(self, text: str) -> None:
        if text.startswith("/"):
            name, _, argument = text[1:].partition(" ")
            if name not in _COMMANDS:
                raise InvalidRequestError(f"there is no command /{name}; /help lists them")
            _COMMANDS[name].run(self, argument.strip())
        elif text or self._attached:
            self._chat.add_user("\n\n".join(filter(None, [*self._attached, text])))
            self._attached.clear()
            self._reply()

    def _reply(self) -> None:
        """Write the reply, and how full the context is if that matters."""
        chat = self._chat
        reasoning = False
        try:
            with replying(chat, self._params, shift=self._shift) as pieces:
                for piece in pieces:
                    if piece.reasoning != reasoning:
                        reasoning = piece.reasoning
                        write("" if reasoning else "\n\n")
                    write(piece.text, dim=reasoning)
                    check()
        except KeyboardInterrupt:
            forget()
        except ContextOverflowError as error:
            chat.history.pop()
            needed = error.n_past + error.n_tokens
            raise InvalidRequestError(
                f"with this the conversation has {needed} tokens, and the context holds {error.seq_len}: say less, "
                "/clear the conversation, or run with a larger -c or with --context-shift"
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
            way_out = "old turns will be forgotten" if self._shift else "/clear begins anew, a larger -c holds more"
            note(f"(the context is {state}: {n_past} of {seq_len} tokens; {way_out})")

    # --- commands

    def help(self, _: str) -> None:
        """List what can be typed."""
        for name, command in _COMMANDS.items():
            if name == command.names[0]:
                usage = f"/{' /'.join(command.names)} {command.argument}".rstrip()
                note(f"  {usage:<28} {command.help}")
        note(f"  {QUOTES:<28} Begins and ends a text of several lines.")
        note("  Ctrl-C stops a reply, Ctrl-D leaves.")

    def set(self, argument: str) -> None:
        """Change a setting."""
        name, _, value = argument.removeprefix("parameter ").lstrip().partition(" ")
        key, value = name.replace("-", "_"), value.strip()
        if not key:
            return self.show("")
        if not value:
            raise InvalidRequestError(f"/set {name} needs a value")
        if key == "seed":
            self._chat.session.set_seed(_whole(name, value))
        elif key == "max_tokens":
            n = _whole(name, value)
            self._chat.max_new = n if n >= 0 else self._chat.session.seq_len
        elif key == "think":
            if value not in _SWITCHES:
                raise InvalidRequestError(f"/set think takes on or off, not {value!r}")
            self._chat.variables["enable_thinking"] = _SWITCHES[value]
        elif key == "system":
            self._chat.system = value
        elif key == "effort":
            self._chat.variables["reasoning_effort"] = value
        elif key in FIELDS:
            field = FIELDS[key]
            number: Any = _whole(name, value) if is_integer(self._numbers()[field]) else _number(name, value)
            self._params = attrs.evolve(self._params, **{field: number})
        else:
            names = ", ".join(["seed", "max_tokens", "think", "effort", "system", *self._numbers()])
            raise InvalidRequestError(f"there is no setting {name!r}; there are {names}")
        return None

    def show(self, _: str) -> None:
        """Show the settings and the state of the conversation."""
        chat = self._chat
        note(f"model       {self._model}")
        note(f"template    {chat.format.name}")
        note(f"system      {chat.system or '(none)'}")
        note(f"context     {chat.session.n_past} of {chat.session.seq_len} tokens, {len(chat.history)} messages")
        note(f"max_tokens  {chat.max_new}")
        for name, value in {**chat.variables, **self._numbers()}.items():
            note(f"{name:<11} {value}")

    def clear(self, _: str) -> None:
        """Forget the conversation."""
        self._chat.clear()
        self._attached.clear()
        note("(the conversation begins anew)")

    def regen(self, _: str) -> None:
        """Take back the last reply and ask for another."""
        if self._chat.retract() is None:
            raise InvalidRequestError("there is no reply to take back")
        self._reply()

    def system(self, argument: str) -> None:
        """Set what the model is told before the conversation; without a text, show it."""
        if argument:
            self._chat.system = argument
        else:
            note(self._chat.system or "(none)")

    def save(self, argument: str) -> None:
        """Write the conversation to a file."""
        path = _path("save", argument)
        conversation = {
            "system": self._chat.system,
            "messages": [message.as_dict() for message in self._chat.history],
            "variables": self._chat.variables,
        }
        text = json.dumps(conversation, ensure_ascii=False, indent=1) + "\n"
        with replacing(path, overwrite=True) as file:
            file.write(text.encode())
        note(f"({path}: {len(self._chat.history)} messages saved)")

    def load(self, argument: str) -> None:
        """Go on with a conversation that was written to a file."""
        path = _path("load", argument)
        try:
            found = json.loads(read_file(path))
            system, variables = found["system"], dict(found["variables"])
            messages = [Message.from_dict(message) for message in found["messages"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidRequestError(f"{path}: not a conversation that /save wrote: {error}") from error
        if not isinstance(system, str) or GIVEN & variables.keys():
            raise InvalidRequestError(f"{path}: not a conversation that /save wrote")
        self._chat.system, self._chat.history[:], self._chat.variables = system, messages, variables
        note(f"({path}: {len(messages)} messages)")

    def read(self, argument: str) -> None:
        """Put a file's text in front of what is said next."""
        path = _path("read", argument)
        self._attached.append(read_file(path))
        note(f"({path}: goes before what you say next)")

    def exit(self, _: str) -> None:
        """Leave."""
        raise _Leave

    def _numbers(self) -> dict[str, Any]:
        """The settings of the sampler that are numbers."""
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


class _Commands(Completer):
    """Completes the names of commands."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """The commands that begin as the line does."""
        typed = document.text_before_cursor
        if typed.startswith("/"):
            for name in _COMMANDS:
                if name.startswith(typed[1:]):
                    yield Completion(f"/{name}", start_position=-len(typed))


def _history() -> History:
    """What was typed before, in this conversation and in earlier ones; a user without a home has nowhere to keep it."""
    folder = user_folder("state")
    if folder is None:
        return InMemoryHistory()
    path = folder / "history"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError as error:
        note(f"llamacli: warning: what is typed is not remembered: {one_line(error)}")
        return InMemoryHistory()
    return FileHistory(path)


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"/{command} needs the name of a file")
    return Path(argument).expanduser()


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidRequestError(f"/set {name} takes a whole number, not {value!r}") from None


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidRequestError(f"/set {name} takes a number, not {value!r}") from None
