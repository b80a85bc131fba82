"""Chatting from the command line: its options, and a reply as it is written."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from llamacli.cli.interrupts import check
from llamacli.cli.options import PATH
from llamacli.cli.output import write
from llamacli.cli.text import argument, read_file
from llamacli.errors import ContextOverflowError, InvalidRequestError

if TYPE_CHECKING:
    from llamacli import ChatSession, Model, Piece, SamplingParams, Session
    from llamacli.cli.generate import Completion

Decorated = TypeVar("Decorated")

_log = logging.getLogger(__name__)

_OPTIONS = (
    click.option("-sys", "--system-prompt", metavar="TEXT", help="What the model is told before the conversation."),
    click.option("--raw", "--no-chat", is_flag=True, help="Continue the prompt as it is, without a chat template."),
    click.option(
        "--chat-template", metavar="NAME",
        help="Chat with this template instead of the file's own: its name, or Jinja source.",
    ),
    click.option("--chat-template-file", type=PATH, help="Read the chat template from a file."),
    click.option("--think/--no-think", default=None, help="Ask the model to reason first, or not to."),
    click.option(
        "--reasoning-effort", metavar="LEVEL", help="How much to reason; most models know low, medium and high."
    ),
    click.option(
        "--context-shift", is_flag=True, help="Where a turn does not fit any more, forget the oldest ones."
    ),
)  # fmt: skip


def chat_options(command: Decorated) -> Decorated:
    """Give a command the options that `Wishes.taken_from` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)  # type: ignore[type-var]
    return command


class Wishes(NamedTuple):
    """What the options say of chatting: `raw` is not at all. `asked` is whether any of the others was given."""

    system: str
    raw: bool
    template: str | None
    variables: dict[str, Any]
    shift: bool
    asked: bool

    @classmethod
    def taken_from(cls, given: dict[str, Any]) -> Wishes:
        """Take the chat options out of all the options that were given."""
        system, raw = given.pop("system_prompt"), given.pop("raw")
        template, file = given.pop("chat_template"), given.pop("chat_template_file")
        think, effort, shift = given.pop("think"), given.pop("reasoning_effort"), given.pop("context_shift")
        if template is not None and file is not None:
            raise click.UsageError("--chat-template and --chat-template-file exclude each other.")
        if file is not None:
            template = read_file(Path(file))
        variables = {"enable_thinking": think, "reasoning_effort": effort}
        asked = shift or any(value is not None for value in (system, template, think, effort))
        given_variables = {name: value for name, value in variables.items() if value is not None}
        return cls(argument(system or ""), raw, template, given_variables, shift, asked)

    def lead_to_chat(self, model: Model) -> bool:
        """Whether to chat: the model's file has a template, or one was asked for."""
        from llamacli.chat.formats import own_templates

        if self.raw:
            return False
        if self.template is not None or own_templates(model.metadata):
            return True
        if self.asked:
            _log.warning("the model's file has no chat template, so it continues the prompt; --chat-template names one")
        return False

    def chat(self, model: Model, session: Session, max_tokens: int) -> ChatSession:
        """The conversation; replies have no limit if `max_tokens` is negative."""
        max_new = session.seq_len if max_tokens < 0 else max_tokens
        return model.create_chat(self.system, max_new, session=session, template=self.template, **self.variables)


def show(piece: Piece) -> None:
    """Write a piece of a reply: to stdout what is meant for the user, to stderr the model's reasoning, dimmed there."""
    write(piece.text, err=piece.reasoning, dim=piece.reasoning)


def reply_as_json(chat: ChatSession) -> dict[str, Any]:
    """What the last reply has beside its text, as chat APIs call it."""
    reply = chat.history[-1].as_dict() if not chat.pending else {}
    return {name: reply[name] for name in ("reasoning_content", "tool_calls") if name in reply}


def at_terminal() -> bool:
    """Whether somebody sits there to talk to."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def reply_once(
    chat: ChatSession,
    prompt: str,
    params: SamplingParams,
    *,
    on_start: Callable[[], None],
    on_piece: Callable[[Piece], None] | None,
) -> Completion:
    """Reply to a prompt and hand over each piece as it comes; `on_start` is called once the prompt is known to fit.

    Raises InvalidRequestError if it does not fit, or if there is none.
    """
    from llamacli.cli.generate import Completion, too_long

    if not prompt:
        raise InvalidRequestError("there is no prompt to reply to (--raw lets the model begin a text)")
    chat.add_user(prompt)
    content: list[str] = []
    try:
        with replying(chat, params) as pieces:
            on_start()
            check()
            for piece in pieces:
                if not piece.reasoning:
                    content.append(piece.text)
                if on_piece is not None:
                    on_piece(piece)
                check()
    except ContextOverflowError as error:
        raise too_long(error) from error
    except KeyboardInterrupt:
        stop = "interrupt"
    else:
        stop = chat.stop
    tokens = chat.reply_tokens
    logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
    return Completion([token.id for token in tokens], "".join(content), stop, logprobs)


@contextlib.contextmanager
def replying(chat: ChatSession, params: SamplingParams, *, shift: bool = False) -> Iterator[Iterator[Piece]]:
    """The pieces of the reply, which is over when this is left; with `shift` old turns are forgotten to make room."""
    while True:
        try:
            pieces = chat.respond(params)
            break
        except ContextOverflowError:
            if not (shift and chat.forget_oldest_turn()):
                raise
    try:
        yield pieces
    finally:
        pieces.close()
