"""Generating a text and writing it as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from llamacli.cli.interrupts import check
from llamacli.cli.output import has_status, write
from llamacli.errors import ContextOverflowError, InvalidRequestError
from llamacli.kv import N_BATCH

if TYPE_CHECKING:
    from llamacli import SamplingParams, Session
    from llamacli.sampling import LogProbs


@attrs.define
class Completion:
    """A generated text: token ids, their text, and why it ended; `logprobs`, a token each, where they are asked for.

    `stop` is "eos" (the model ended it), "length" (as many tokens as asked for), "context" (the context is full) or
    "interrupt" (Ctrl-C).
    """

    tokens: list[int]
    text: str
    stop: str
    logprobs: list[LogProbs]


class TextAfterPrompt:
    """Writes a text that continues a prompt after the prompt, as soon as nothing wipes it away.

    That is at once, or after a bar shows how much of a long prompt of `n_prompt` tokens has been read.
    """

    def __init__(self, prompt: str, n_prompt: int):
        self._prompt, self._n_prompt = prompt, n_prompt

    def begin(self) -> None:
        """The prompt is known to fit, and will now be read."""
        if not (has_status() and self._n_prompt > N_BATCH):
            self.feed("")

    def feed(self, piece: str) -> None:
        """Write a piece of the text."""
        write(self._prompt + piece)
        self._prompt = ""

    def end(self) -> None:
        """Write the prompt, if no piece has come."""
        self.feed("")


def too_long(error: ContextOverflowError) -> InvalidRequestError:
    """What to tell somebody whose prompt does not fit."""
    return InvalidRequestError(
        f"the prompt has {error.n_tokens} tokens and the context only {error.seq_len}: shorten it or raise -c"
    )


def complete(
    session: Session,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    ignore_eos: bool,
    on_start: Callable[[], None],
    sink: TextAfterPrompt | None,
) -> Completion:
    """Generate up to `max_tokens` tokens, without limit if negative, and give the `sink` each piece as it comes.

    `on_start` is called once the prompt is known to fit. Raises InvalidRequestError if it does not.
    """
    limit = session.seq_len if max_tokens < 0 else max_tokens
    try:
        stream = session.generate(prompt, params, max_tokens=limit, ignore_eos=ignore_eos)
    except ContextOverflowError as error:
        raise too_long(error) from error
    tokens: list[int] = []
    pieces: list[str] = []
    logprobs: list[LogProbs] = []
    try:
        on_start()
        if sink is not None:
            sink.begin()
        check()
        for token in stream:
            tokens.append(token.id)
            pieces.append(token.piece)
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
            if sink is not None:
                sink.feed(token.piece)
            check()
    except KeyboardInterrupt:
        stop = "interrupt"
    else:
        full = session.n_past == session.seq_len
        stop = "length" if len(tokens) == max_tokens else "context" if full else "eos"
    if sink is not None:
        sink.end()
    return Completion(tokens, "".join(pieces), stop, logprobs)
