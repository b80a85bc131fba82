"""Generating a text and writing it as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from llamacli.cli.interrupts import check
from llamacli.errors import ContextOverflowError, InvalidRequestError

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


def complete(
    session: Session,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    ignore_eos: bool,
    on_start: Callable[[], None],
    on_text: Callable[[str], None],
) -> Completion:
    """Generate up to `max_tokens` tokens, without limit if negative, and hand over each piece of text as it comes.

    `on_start` is called once the prompt is known to fit. Raises InvalidRequestError if it does not.
    """
    limit = session.seq_len if max_tokens < 0 else max_tokens
    try:
        stream = session.generate(prompt, params, max_tokens=limit, ignore_eos=ignore_eos)
    except ContextOverflowError as error:
        raise InvalidRequestError(
            f"the prompt has {error.n_tokens} tokens and the context only {error.seq_len}: shorten it or raise -c"
        ) from error
    tokens: list[int] = []
    pieces: list[str] = []
    logprobs: list[LogProbs] = []
    try:
        on_start()
        check()
        for token in stream:
            tokens.append(token.id)
            pieces.append(token.piece)
            if token.logprobs is not None:
                logprobs.append(token.logprobs)
            on_text(token.piece)
            check()
    except KeyboardInterrupt:
        stop = "interrupt"
    else:
        full = session.n_past == session.seq_len
        stop = "length" if len(tokens) == max_tokens else "context" if full else "eos"
    return Completion(tokens, "".join(pieces), stop, logprobs)
