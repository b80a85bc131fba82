"""Log-probabilities in the shapes of OpenAI's API."""

from __future__ import annotations

import codecs
import collections
from collections.abc import Sequence
from typing import Any

import attrs

from llamacli.sampling import LogProbs
from llamacli.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Log-probability in place of minus infinity, which JSON does not have."""


@attrs.frozen
class TokenLogprob:
    """Log-probability of a token by the model's unmodified logits.

    - `piece`: its bytes, which may be a part of a character; those of all tokens joined are the text.
    - `logprob`: None for the first token of a prompt, which nothing predicts.
    - `top`: the most probable tokens in descending order: id, bytes, log-probability.
    """

    id: int
    piece: bytes
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...] = ()


def token_logprob(tokenizer: Tokenizer, token: int, logprobs: LogProbs | None) -> TokenLogprob:
    """Log-probability of a token, with bytes instead of ids alone."""
    piece = tokenizer.piece_bytes(token)
    if logprobs is None:
        return TokenLogprob(token, piece, None)
    top = tuple((other, tokenizer.piece_bytes(other), value) for other, value in logprobs.top)
    return TokenLogprob(token, piece, logprobs.chosen, top)


Drawn = collections.deque[tuple[int, int, TokenLogprob]]
"""Tokens of a reply, in order, each with the start and stop of what it spells in the reply's text."""


def take_content(drawn: Drawn, start: int, stop: int) -> list[tuple[int, TokenLogprob]]:
    """Take the tokens of content, with their offsets in it.

    The content is the reply's text from `start` to `stop`. Tokens before it are dropped: they are reasoning, markers,
    white space or calls.
    """
    found: list[tuple[int, TokenLogprob]] = []
    while drawn and drawn[0][0] < stop:
        first, end, token = drawn.popleft()
        if first >= start or end > start:
            found.append((max(0, first - start), token))
    return found


def last_tokens(tokens: Sequence[TokenLogprob], text: bytes) -> list[TokenLogprob]:
    """Tokens of a text at the end of a prompt.

    Of a token that begins before the text only the part that belongs to it remains, so that the pieces joined are the
    text.
    """
    found: list[TokenLogprob] = []
    n_bytes = len(text)
    for token in reversed(tokens):
        if n_bytes <= 0:
            break
        found.append(token if len(token.piece) <= n_bytes else attrs.evolve(token, piece=token.piece[-n_bytes:]))
        n_bytes -= len(token.piece)
    return found[::-1]


def chat_logprobs(tokens: Sequence[TokenLogprob], n_top: int) -> dict[str, Any]:
    """Log-probabilities of a chat's tokens, with the `n_top` most probable of each."""
    content = [
        {
            **_entry(token.piece, token.logprob),
            "top_logprobs": [_entry(piece, logprob) for _, piece, logprob in token.top[:n_top]],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Log-probabilities of a completion.

    `offset` counts the characters of the text so far.
    """

    def __init__(self, n_top: int, offset: int = 0):
        self._n_top, self._offset = n_top, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities of the next tokens.

        `top_logprobs` have each token itself too, as OpenAI's have.
        """
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text = _name(token.piece)
            result["tokens"].append(text)
            result["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token.piece))
            if token.logprob is None:
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                continue
            top = {_name(piece): finite(logprob) for _, piece, logprob in reversed(token.top[: self._n_top])}
            result["token_logprobs"].append(finite(token.logprob))
            result["top_logprobs"].append({**dict(reversed(top.items())), text: finite(token.logprob)})
        return result


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, MIN_LOGPROB)


def _entry(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {
        "token": piece.decode("utf-8", "replace"),
        "logprob": finite(MIN_LOGPROB if logprob is None else logprob),
        "bytes": list(piece),
    }


def _name(piece: bytes) -> str:
    """Text of a token.

    Of a part of a character its bytes, so that names differ.
    """
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
