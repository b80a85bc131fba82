"""Interactive chat of `llamacli run` at a terminal, with prompt_toolkit."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from llamacli.chat.codec import GIVEN
from llamacli.chat.functions import MAX_ROUNDS
from llamacli.chat.messages import Message
from llamacli.cli.chat import replying
from llamacli.cli.conversations import Conversation, conversation_log
from llamacli.cli.functions import answer_calls, load_functions
from llamacli.cli.interrupts import clear, raise_if_interrupted
from llamacli.cli.output import note, one_line, terminal_columns, write
from llamacli.cli.progress import waiting
from llamacli.cli.repl_input import QUOTES, Input, dropped_pictures, unquoted
from llamacli.cli.repl_settings import NAMES, Settings
from llamacli.cli.text import read_file
from llamacli.cli.tokenize import shown_piece
from llamacli.cli.wrap import flowed, word_wrap
from llamacli.errors import ContextOverflowError, InvalidRequestError, LlamaCliError, MediaError
from llamacli.media.pictures import Picture
from llamacli.media.sound import Sound
from llamacli.util.files import replacing

if TYPE_CHECKING:
    from llamacli import ChatSession, SamplingParams

_NEARLY_FULL = 0.85
"""Fraction of the context from which on every reply is followed by a note about it."""

_MAX_LISTED = 200
"""Largest number of tokens that /tokens lists."""

_COLUMN = 24
"""Width of the commands in /help."""


class _Exit(Exception):  # noqa: N818 - not an error
    """Raised by /exit, and by /model with the model to continue with."""


class Repl:
    """Interactive chat at a terminal.

    Ctrl-C stops a reply or discards the typed line; Ctrl-D exits. Lines between triple quotes, or pasted,
    are one message. A slash and a word begin a command, a path does not; pictures whose paths are in a message, such as
    those of files dropped on the terminal, are attached to it. A message that is stopped before its reply, or
    does not fit, comes back to the prompt.

    `shift` drops the oldest messages when the context is full. `logged`
    is the conversation of the log that is continued.
    """

    def __init__(self, settings: Settings, *, shift: bool, logged: Conversation | None):
        self._chat, self._settings, self._shift = settings.chat, settings, shift
        self._number = None if logged is None else logged.id
        self._model, self._about = "", dict[str, str]()
        self._attached: list[tuple[Path, str | Picture | Sound]] = []
        self._draft = ""
        self._input = Input(_COMMANDS, _FILES, NAMES)

    def run(self, chat: ChatSession, params: SamplingParams, model: str, about: dict[str, str]) -> str | None:
        """Read and answer messages until the user exits.

        `about` describes the model, for `/show`. A chat other than before continues the conversation. Returns the model
        to continue with, after `/model`.
        """
        if chat is not self._chat:
            chat.system, chat.history, chat.variables = self._chat.system, self._chat.history, self._chat.variables
            chat.use_tools(self._chat.functions.values())
            self._settings.use(chat, params)
            self._chat = chat
        self._model, self._about = model, about
        note(f"{Path(model).name}, a context of {chat.session.n_ctx} tokens. /help lists the commands.")
        if chat.history:
            note(f"({len(chat.history)} messages so far)")
        while True:
            try:
                draft, self._draft = self._draft, ""
                self._input.keep(self._settings.history)
                self._handle(self._input.read(draft))
            except (EOFError, _Exit) as end:
                return end.args[0] if end.args else None
            except KeyboardInterrupt:
                clear()
                files = ", ".join(path.name for path, _ in self._attached)
                self._attached.clear()
                note(f"({files} discarded; Ctrl-D exits)" if files else "(Ctrl-D exits)")
            except (LlamaCliError, OSError) as error:
                note(f"error: {one_line(error)}")
            except MemoryError:
                note("error: not enough memory")

    # --- messages and replies

    def _handle(self, text: str) -> None:
        word = text.split(maxsplit=1)[0] if text.startswith("/") else ""
        if word.removeprefix("/") not in _COMMANDS:
            text = self._without_pictures(text)
            word = word if text.startswith(word) else ""
        if word.count("/") == 1:  # "/etc/fstab is empty" is a message
            name = word.removeprefix("/")
            if name not in _COMMANDS:
                raise InvalidRequestError(f"unknown command /{name}; /help lists the commands")
            _COMMANDS[name].run(self, text.removeprefix(word).strip())
        elif text in ("exit", "quit"):
            raise _Exit
        elif text or self._attached:
            attached, self._attached = self._attached, []
            self._send(text, attached)

    def _without_pictures(self, text: str) -> str:
        """Attach the pictures whose paths are in a message.

        Their paths are taken out of it, unless the model does not see.
        """
        rest, paths = dropped_pictures(text)
        if not paths:
            return text
        names = ", ".join(path.name for path in paths)
        try:
            self._chat.media_encoder().expect(Picture)
        except MediaError as error:
            note(f"({names}: not attached, the path is sent: {one_line(error)})")
            return text
        pictures = [(path, Picture.of(path)) for path in paths]
        self._attached += pictures
        note(f"({names}: attached)")
        return rest

    def attach(self, images: Sequence[str] = (), audio: Sequence[str] = ()) -> None:
        """Attach files of pictures and of sound to the next message.

        Raises MediaError if one cannot be read, or the model has no encoder of it.
        """
        for medium, paths in ((Picture, images), (Sound, audio)):
            for path in paths:
                self._chat.media_encoder().expect(medium)
                self._attached.append((Path(path), medium.of(path)))

    def _send(
        self,
        text: str,
        attached: Sequence[tuple[Path, str | Picture | Sound]] = (),
        media: Sequence[Picture | Sound] = (),
    ) -> None:
        """Send a message with files; without a reply all come back."""
        contents = [*media, *(content for _, content in attached)]
        texts = [content for content in contents if isinstance(content, str)]
        images = [content for content in contents if isinstance(content, Picture)]
        audio = [content for content in contents if isinstance(content, Sound)]
        self._chat.add_user("\n\n".join(filter(None, [*texts, text])), images, audio)
        answered = False
        try:
            answered = self._reply()
        except (LlamaCliError, OSError, MemoryError) as error:
            note(f"error: {one_line(error)}")
        if not answered:
            self._attached[:0], self._draft = [*((Path("file"), one) for one in media), *attached], text
            files = f" with {', '.join(path.name for path, _ in attached)}" if attached else ""
            note(f"(no reply; your message is back at the prompt{files}, Ctrl-C discards it)")

    def _reply(self) -> bool:
        """Write the reply, those after tool calls too, and notes about it.

        False if it was stopped before its first token; the message is no longer in the history then.
        """
        chat = self._chat
        for _ in range(MAX_ROUNDS + 1):
            if not self._stream():
                return False
            if not answer_calls(chat):
                break
        if self._settings.verbose:
            self.stats("")
        self._note_context()
        if self._settings.log:
            saved = Conversation(self._model, chat.system, chat.variables, chat.history, self._number)
            self._number = conversation_log().save(saved)
        return True

    def _stream(self) -> bool:
        chat = self._chat
        reasoning = False
        feed = word_wrap() if self._settings.wordwrap else str
        try:
            with replying(chat, self._settings.params, shift=self._shift) as pieces, waiting(chat.session) as wait:
                for piece in wait.watch(pieces):
                    if piece.reasoning != reasoning:
                        reasoning = piece.reasoning
                        write("" if reasoning else "\n\n", wrap=feed)
                    write(piece.text, dim=reasoning, wrap=feed)
                    raise_if_interrupted()
        except KeyboardInterrupt:
            clear()
            if chat.pending:
                write("\n")
                self._retract()
                return False
        except ContextOverflowError as error:
            self._retract()
            needed = error.n_past + error.n_tokens
            raise InvalidRequestError(
                f"the chat has {needed} tokens with this message, and the context only {error.n_ctx}: shorten it, "
                "/clear the chat, or run with a larger -c or with --context-shift"
            ) from error
        except BaseException:
            if chat.pending:
                self._retract()
            raise
        write("\n")
        return True

    def _note_context(self) -> None:
        n_past, n_ctx = self._chat.session.n_past, self._chat.session.n_ctx
        if self._chat.stop == "context" or n_past >= _NEARLY_FULL * n_ctx:
            state = "full" if self._chat.stop == "context" else "nearly full"
            remedy = "the oldest messages will be dropped" if self._shift else "/clear it, or run with a larger -c"
            note(f"(the context is {state}: {n_past} of {n_ctx} tokens; {remedy})")

    # --- commands

    def help(self, _: str) -> None:
        """List the commands."""
        for name, command in _COMMANDS.items():
            if name == command.names[0]:
                usage = f"/{' /'.join(command.names)} {command.argument}".rstrip()
                note(f"  {usage:<{_COLUMN}} {command.help}", hang=_COLUMN + 3)
        note(f"  {QUOTES:<{_COLUMN}} Begin or end a message of several lines.", hang=_COLUMN + 3)
        note("  Ctrl-C stops a reply, Ctrl-D exits, Tab completes.")

    def set(self, argument: str) -> None:
        """Change a setting; without a name, list them."""
        if argument:
            self._settings.set(argument)
        else:
            _print_pairs(self._settings.values().items())

    def show(self, argument: str) -> None:
        """Show model, context and settings."""
        chat, session = self._chat, self._chat.session
        n_used = session.n_past if chat.history else 0
        match argument:
            case "system":
                note(chat.system or "(none)")
            case "template":
                write(chat.format.template.rstrip() + "\n" if chat.format.template else "(none)\n")
            case "parameters":
                _print_pairs(self._settings.values().items())
            case "" | "info":
                about = {
                    "model": self._model,
                    **self._about,
                    "replies": f"read as {chat.format.name}",
                    "context": f"{n_used} of {session.n_ctx} tokens, {len(chat.history)} messages",
                    "attached": ", ".join(path.name for path, _ in self._attached) or "(none)",
                    "tools": ", ".join(self._chat.functions) or "(none)",
                }
                _print_pairs((about | ({} if argument else self._settings.values())).items())
            case _:
                raise InvalidRequestError(f"/show takes info, parameters, system or template, not {argument!r}")

    def stats(self, _: str) -> None:
        """Show tokens and speeds of the last reply."""
        s = self._chat.session.stats
        drafted = f"; {s.n_accepted} of {s.n_drafted} drafted tokens accepted" if s.n_drafted else ""
        note(f"(read {s.n_prompt} tokens, {s.prefill_tps:.1f} tok/s; wrote {s.n_gen}, {s.gen_tps:.1f} tok/s{drafted})")

    def clear(self, _: str) -> None:
        """Delete all messages."""
        self._chat.clear()
        self._attached.clear()
        self._number = None
        note("(all messages deleted)")

    def tokens(self, argument: str) -> None:
        """Count and list the tokens of TEXT, else of the last message."""
        tokenizer, history = self._chat.model.tokenizer, self._chat.history
        text = argument or (history[-1].content if history else "")
        if not text:
            raise InvalidRequestError("there is no message with a text; /tokens TEXT lists the tokens of a text")
        ids = tokenizer.encode(text, add_special=False)
        cells = [f"{token} '{shown_piece(tokenizer, token)}'" for token in ids[:_MAX_LISTED]]
        more = f"; the first {_MAX_LISTED}:" if len(ids) > _MAX_LISTED else ""
        note(f"({_counted(len(ids), 'token')}, {_counted(len(text), 'character')}{more})")
        for line in flowed(cells, terminal_columns() - 3):
            note(f"  {line}")

    def regen(self, argument: str) -> None:
        """Replace the last reply with one drawn with another seed."""
        if argument and not argument.isdecimal():
            raise InvalidRequestError(f"/regen takes a seed, an integer of at least 0, not {argument!r}")
        if self._last("assistant") is None:
            raise InvalidRequestError("there is no reply to replace")
        self._settings.set(f"seed {argument or -1}")
        same = "; at temperature 0 replies do not depend on it" if not self._settings.params.temperature else ""
        note(f"(seed {self._settings.seed}{same})")
        message = self._retract()
        self._send(message.content, media=message.media)

    def edit(self, _: str) -> None:
        """Edit the last message in $EDITOR and send it again."""
        try:
            text = click.edit(self._last("user") or "", extension=".md", require_save=True)
        except click.ClickException as error:
            raise InvalidRequestError(f"{error.message}: set EDITOR to your editor") from error
        if text is None or not text.strip():
            note("(not changed)")
            return
        self._send(text.strip("\n"), media=self._retract().media)

    def copy(self, _: str) -> None:
        """Copy the last reply to the clipboard (OSC 52)."""
        reply = self._last("assistant")
        if reply is None:
            raise InvalidRequestError("there is no reply to copy")
        click.echo(f"\x1b]52;c;{base64.b64encode(reply.encode()).decode()}\a", nl=False, color=True)
        note(f"({len(reply)} characters copied, if this terminal allows it)")

    def system(self, argument: str) -> None:
        """Set the system prompt; without a text, show it."""
        if argument:
            self._chat.system = argument
        else:
            note(self._chat.system or "(none)")

    def model(self, argument: str) -> None:
        """Continue the conversation with another model."""
        if not argument:
            note(self._model)
            return
        raise _Exit(str(Path(argument).expanduser()) if argument.startswith("~") else argument)

    def tools(self, argument: str) -> None:
        """Use functions of a Python file as tools."""
        if not argument:
            note(", ".join(self._chat.functions) or "(none)")
            return
        functions = {} if argument in ("none", "off") else load_functions(str(_path("tools", argument)))
        self._chat.use_tools(functions.values())
        note(f"({', '.join(self._chat.functions) or 'no'} tools)")

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
        self._number = None
        note(f"({path}: {len(messages)} messages)")

    def read(self, argument: str) -> None:
        """Attach a file's text to the next message."""
        path = _path("read", argument)
        self._attached.append((path, read_file(path)))
        note(f"({path}: attached to the next message)")

    def image(self, argument: str) -> None:
        """Attach a picture to the next message."""
        path = _path("image", argument)
        self.attach([str(path)])
        note(f"({path}: attached to the next message)")

    def audio(self, argument: str) -> None:
        """Attach sound to the next message."""
        path = _path("audio", argument)
        self.attach(audio=[str(path)])
        note(f"({path}: attached to the next message)")

    def logs(self, argument: str) -> None:
        """List logged conversations, those with TEXT."""
        found = conversation_log().search(argument)
        for conversation in found:
            note(f"  {conversation.id:>5}  {len(conversation.messages):>4} messages  {conversation.title[:50]}")
        if not found:
            note("(no conversation has this text)" if argument else "(no conversations; /set log on records them)")

    def log_resume(self, argument: str) -> None:
        """Continue a logged conversation, by default the last."""
        if argument and not argument.isdecimal():
            raise InvalidRequestError(f"/resume takes the number of a conversation in /logs, not {argument!r}")
        conversation, chat = conversation_log().load(int(argument) if argument else None), self._chat
        chat.system, chat.variables = conversation.system, conversation.variables
        chat.history[:] = conversation.messages
        self._number, self._settings.log = conversation.id, True
        note(f"(conversation {conversation.id}: {len(chat.history)} messages, {conversation.title!r})")

    def exit(self, _: str) -> None:
        """Exit."""
        raise _Exit

    def _last(self, role: str) -> str | None:
        return next((message.content for message in reversed(self._chat.history) if message.role == role), None)

    def _retract(self) -> Message:
        history = self._chat.history
        while history:
            message = history.pop()
            if message.role == "user":
                return message
        return Message("user", "")


@attrs.frozen
class _Command:
    names: tuple[str, ...]
    argument: str
    run: Callable[[Repl, str], None]
    takes_file: bool = False

    @property
    def help(self) -> str:
        return str(self.run.__doc__)


_ALL = (
    _Command(("help", "?"), "", Repl.help),
    _Command(("set",), "[NAME VALUE]", Repl.set),
    _Command(("show",), "[info|system|...]", Repl.show),
    _Command(("stats",), "", Repl.stats),
    _Command(("clear",), "", Repl.clear),
    _Command(("tokens",), "[TEXT]", Repl.tokens),
    _Command(("regen", "retry"), "[SEED]", Repl.regen),
    _Command(("edit",), "", Repl.edit),
    _Command(("copy",), "", Repl.copy),
    _Command(("system",), "[TEXT]", Repl.system),
    _Command(("model",), "[FILE or NAME]", Repl.model, takes_file=True),
    _Command(("tools",), "[FILE.py]", Repl.tools, takes_file=True),
    _Command(("save",), "FILE", Repl.save, takes_file=True),
    _Command(("load",), "FILE", Repl.load, takes_file=True),
    _Command(("read",), "FILE", Repl.read, takes_file=True),
    _Command(("image",), "FILE", Repl.image, takes_file=True),
    _Command(("audio",), "FILE", Repl.audio, takes_file=True),
    _Command(("logs",), "[TEXT]", Repl.logs),
    _Command(("resume",), "[NUMBER]", Repl.log_resume),
    _Command(("exit", "quit", "bye"), "", Repl.exit),
)
_COMMANDS = {name: command for command in _ALL for name in command.names}
_FILES = frozenset(name for name, command in _COMMANDS.items() if command.takes_file)


def _print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    rows = list(pairs)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        note(f"{name:<{width}}  {value}", hang=width + 2)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"/{command} needs a file name")
    path = Path(argument).expanduser()
    return path if path.exists() else unquoted(argument)
