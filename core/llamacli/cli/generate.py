"""Text completion: generate and write a continuation of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from llamacli.cli.interrupts import raise_if_interrupted
from llamacli.cli.output import has_status, write
from llamacli.cli.progress import waiting
from llamacli.cli.wrap import word_wrap
from llamacli.errors import ContextOverflowError, InvalidRequestError

if TYPE_CHECKING:
    from llamacli import SamplingParams, Session
    from llamacli.sampling import LogProbs


@attrs.define
class Completion:
    """Generated tokens, text, stop reason, and log-probabilities if requested.

    `stop` is "eos" (end-of-generation token), "stop" (a stop string), "length" (`max_tokens` reached), "context"
    (context full) or "interrupt" (Ctrl-C).
    """

    tokens: list[int]
    text: str
    stop: str
    logprobs: list[LogProbs]


class CompletionWriter:
    """Writes a prompt and its continuation to stdout.

    The prompt is written at once, or with the first piece if there is a status line, which would overwrite it. On a
    terminal lines are broken at words.
    """

    def __init__(self, prompt: str):
        self._prompt, self._wrap = prompt, word_wrap()

    def begin(self) -> None:
        """Write the prompt, unless there is a status line."""
        if not has_status():
            self.feed("")

    def feed(self, piece: str) -> None:
        """Write a piece, after the prompt if that is still pending."""
        write(self._prompt + piece, wrap=self._wrap)
        self._prompt = ""

    def end(self) -> None:
        """Write the prompt if no piece has come."""
        self.feed("")


def prompt_too_long(error: ContextOverflowError) -> InvalidRequestError:
    """The error for a prompt that does not fit into the context."""
    return InvalidRequestError(
        f"the prompt has {error.n_tokens} tokens and the context only {error.n_ctx}: shorten it or raise -c"
    )


def complete(
    session: Session,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    ignore_eos: bool,
    on_start: Callable[[], None],
    writer: CompletionWriter | None,
) -> Completion:
    """Generate up to `max_tokens` tokens, passing each piece to `writer`.

    -1 means no limit. `on_start` is called once the prompt is known to fit. Raises InvalidRequestError if it does not.
    """
    try:
        stream = session.generate(prompt, params, max_tokens=max_tokens, ignore_eos=ignore_eos)
    except ContextOverflowError as error:
        raise prompt_too_long(error) from error
    tokens: list[int] = []
    pieces: list[str] = []
    logprobs: list[LogProbs] = []
    try:
        on_start()
        if writer is not None:
            writer.begin()
        raise_if_interrupted()
        with waiting(session) as wait:
            for token in wait.watch(stream, quiet=writer is None):
                tokens.append(token.id)
                pieces.append(token.piece)
                if token.logprobs is not None:
                    logprobs.append(token.logprobs)
                if writer is not None:
                    writer.feed(token.piece)
                raise_if_interrupted()
    except KeyboardInterrupt:
        stop = "interrupt"
    else:
        stop = _stop_reason(session, len(tokens), max_tokens)
    if writer is not None:
        writer.end()
    return Completion(tokens, "".join(pieces), stop, logprobs)


def _stop_reason(session: Session, n_generated: int, max_tokens: int) -> str:
    if session.stop_string:
        return "stop"
    if n_generated == max_tokens:
        return "length"
    return "context" if session.n_past == session.n_ctx else "eos"
