"""Chat options of the command line, and one reply of a chat."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from llamacli.cli.command import in_group
from llamacli.cli.interrupts import raise_if_interrupted
from llamacli.cli.numbers import Integer
from llamacli.cli.options import PATH, option
from llamacli.cli.output import write
from llamacli.cli.progress import waiting
from llamacli.cli.text import argument, read_file
from llamacli.errors import ContextOverflowError, InvalidRequestError

if TYPE_CHECKING:
    from llamacli import ChatSession, Model, Piece, SamplingParams, Session
    from llamacli.chat.functions import Functions
    from llamacli.cli.generate import Completion

Decorated = TypeVar("Decorated")

_log = logging.getLogger(__name__)

_OPTIONS = (
    option("-sys", "--system-prompt", metavar="TEXT", help="System prompt of the chat."),
    option("--raw", "--no-chat", is_flag=True, help="Continue the prompt as it is, without a chat template."),
    option(
        "--chat-template", metavar="NAME",
        help="Use this chat template instead of the file's own: a name, or Jinja source.",
    ),
    option("--chat-template-file", type=PATH, help="Read the chat template from a file."),
    option("--think/--no-think", default=None, help="Turn reasoning on or off, for templates that support it."),
    option("--reasoning-effort", metavar="LEVEL", help="Reasoning effort: for most models low, medium or high."),
    option("--context-shift", is_flag=True, help="Drop the oldest messages when the context is full."),
    option("--tools", type=PATH, help="Let the model call the functions of this Python file."),
    option(
        "--mcp", type=PATH,
        help="Let the model call tools of the MCP servers in this JSON file; you are asked before each call.",
    ),
    option("--log/--no-log", default=False, help="Record the chat for `llamacli logs`; default: off."),
    option(
        "--resume", metavar="ID", type=Integer(0),
        help="Continue a recorded chat, see `llamacli logs`; 0: the last one.",
    ),
)  # fmt: skip


def chat_options(command: Decorated) -> Decorated:
    """Add the options that `ChatOptions.pop_from` reads to a command."""
    return in_group("Chat", *_OPTIONS)(command)


class ChatOptions(NamedTuple):
    """Chat options; `raw` disables chat, `requested` means others were given."""

    system: str
    raw: bool
    template: str | None
    variables: dict[str, Any]
    context_shift: bool
    tools: str | None
    mcp: str | None
    log: bool
    resume: int | None
    requested: bool

    @classmethod
    def pop_from(cls, given: dict[str, Any]) -> ChatOptions:
        """Remove the chat options from a command's parameters; raises UsageError, OSError."""
        names = ("system_prompt", "raw", "chat_template", "chat_template_file", "think", "reasoning_effort")
        system, raw, template, file, think, effort = map(given.pop, names)
        shift, tools, mcp, log, resume = map(given.pop, ("context_shift", "tools", "mcp", "log", "resume"))
        if template is not None and file is not None:
            raise click.UsageError("--chat-template and --chat-template-file exclude each other.")
        if file is not None:
            template = read_file(Path(file))
        requested = shift or any(value is not None for value in (system, template, think, effort, tools, mcp, resume))
        pairs = {"enable_thinking": think, "reasoning_effort": effort}.items()
        variables = {name: value for name, value in pairs if value is not None}
        return cls(argument(system or ""), raw, template, variables, shift, tools, mcp, log, resume, requested)

    def should_chat(self, model: Model) -> bool:
        """Decide between chat, which needs a template, and completion."""
        from llamacli.chat.formats import own_templates

        if self.raw:
            return False
        if self.template is not None or own_templates(model.metadata):
            return True
        if self.requested:
            _log.warning("the model's file has no chat template, so it continues the prompt; --chat-template names one")
        return False

    def create_chat(self, model: Model, session: Session, max_tokens: int, functions: Functions) -> ChatSession:
        """Create the chat session."""
        return model.create_chat(
            self.system, max_tokens, session=session, template=self.template, tools=functions.values(), **self.variables
        )

    def about_template(self, model: Model) -> str:
        """Description of the chat template in use."""
        from llamacli.chat.formats import own_templates

        if self.template is not None:
            return f"{self.template}, of --chat-template" if len(self.template) < 40 else "of --chat-template"
        return "of the model's file" if own_templates(model.metadata) else "of a plugin"


def shown() -> Callable[[Piece], None]:
    """Writer of a reply's pieces, wrapped: content to stdout, reasoning to stderr."""
    from llamacli.cli.wrap import word_wrap

    wrap = word_wrap()
    return lambda piece: write(piece.text, err=piece.reasoning, dim=piece.reasoning, wrap=wrap)


def reply_as_json(chat: ChatSession) -> dict[str, Any]:
    """Reasoning and tool calls of the last reply, named as by APIs."""
    reply = chat.history[-1].as_dict() if not chat.pending else {}
    return {name: reply[name] for name in ("reasoning_content", "tool_calls") if name in reply}


def at_terminal() -> bool:
    """Test that stdin and stdout are terminals."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def reply_once(
    chat: ChatSession,
    prompt: str,
    params: SamplingParams,
    *,
    images: Sequence[str],
    audio: Sequence[str],
    on_start: Callable[[], None],
    on_piece: Callable[[Piece], None] | None,
) -> Completion:
    """Reply to a prompt, passing each piece to `on_piece`.

    `images` and `audio` are files that come before it. Calls of functions are answered until a reply has none.

    `on_start` is called once the prompt is known to fit. Raises InvalidRequestError if it does not, or is empty.
    """
    from llamacli.chat.functions import MAX_ROUNDS
    from llamacli.cli.functions import answer_calls
    from llamacli.cli.generate import Completion, prompt_too_long

    if not (prompt or images or audio):
        raise InvalidRequestError("there is no prompt to reply to (with --raw the model generates text without one)")
    chat.add_user(prompt, images, audio)
    content: list[str] = []

    def reply() -> str:
        with replying(chat, params) as pieces, waiting(chat.session) as wait:
            on_start()
            raise_if_interrupted()
            for piece in wait.watch(pieces, quiet=on_piece is None):
                if not piece.reasoning:
                    content.append(piece.text)
                if on_piece is not None:
                    on_piece(piece)
                raise_if_interrupted()
        return chat.stop

    try:
        stop = reply()
        for _ in range(MAX_ROUNDS):
            if not answer_calls(chat):
                break
            stop = reply()
    except ContextOverflowError as error:
        raise prompt_too_long(error) from error
    except KeyboardInterrupt:
        stop = "interrupt"
    tokens = chat.reply_tokens
    logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
    return Completion([token.id for token in tokens], "".join(content), stop, logprobs)


@contextlib.contextmanager
def replying(chat: ChatSession, params: SamplingParams, *, shift: bool = False) -> Iterator[Iterator[Piece]]:
    """Iterate over a reply's pieces, then close it; `shift` drops oldest messages."""
    while True:
        try:
            pieces = chat.respond(params)
            break
        except ContextOverflowError:
            if not (shift and chat.drop_oldest_turn()):
                raise
    try:
        yield pieces
    finally:
        pieces.close()
