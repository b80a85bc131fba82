"""Text of drawn tokens, up to its end."""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from typing import Any, Generic, Literal, TypeVar

import attrs

from llamacli.sampling import LogProbs, StopStrings
from llamacli.tokenizer import StreamDecoder

Item = TypeVar("Item")


@attrs.frozen
class Token:
    """Generated token.

    Its `id`, and `piece`, the text that is complete with it. Bytes of an incomplete character are held back and come
    with the token that completes it: pieces joined are the text, and continue that of the prompt. `complete` is False
    while there are such bytes after it. `logprobs` are those that `n_probs` asks for.
    """

    id: int
    piece: str
    logprobs: LogProbs | None = None
    complete: bool = True


class DrawnText(ABC, Generic[Item]):
    """Text of drawn tokens, up to its end.

    That is an end token, a stop string, or a number of tokens. What becomes of a token is a subclass's: `TokenText`
    gives tokens with their text, the server's `ChoiceText` events.

    - `end_ids`: tokens that end the text. `n_tokens`: tokens so far, without such a one. `n_left`: the most to come.
    - `finish_reason`: "stop" after an end token or stop string, "length" after `limit` tokens; "" before.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str], end_ids: Set[int], limit: int):
        self._decoder, self._stops = decoder, StopStrings(stop)
        self.end_ids, self.n_tokens, self.n_left = end_ids, 0, limit
        self._held: collections.deque[tuple[int, Any]] = collections.deque()
        self._n_certain = 0
        self.finish_reason: Literal["", "stop", "length"] = "" if limit > 0 else "length"

    @property
    def stop_string(self) -> str:
        """Stop string that has ended the text, "" until then."""
        return self._stops.found

    def take(self, token: int, logprobs: LogProbs | None = None, *, is_last: bool = False) -> list[Item]:
        """Add a token that was drawn; what is certain now.

        With `is_last`, no token follows even if the text does not end here.
        """
        if token in self.end_ids:
            self.finish_reason = "stop"
            return []
        self.n_tokens, self.n_left = self.n_tokens + 1, self.n_left - 1
        is_full = self.n_left <= 0
        items = self._add(token, logprobs, is_full or is_last)
        if self._stops.found:
            self.finish_reason = "stop"
        elif is_full:
            self.finish_reason = self.finish_reason or "length"
        return items

    @abstractmethod
    def _add(self, token: int, logprobs: LogProbs | None, is_last: bool) -> list[Item]:
        """Add a token; set `finish_reason` if it ends the text."""

    def _release(self, certain: str) -> list[Any]:
        """Items of `_held` that come with more certain text.

        Certain text is before any stop string. Each item is held with the number of characters that it waits for.
        """
        self._n_certain += len(certain)
        released = []
        while self._held and self._held[0][0] <= self._n_certain:
            released.append(self._held.popleft()[1])
        return released


class TokenText(DrawnText[Token]):
    """Generated tokens with their text.

    A token comes once its whole text is certain to be before a stop string; until then it is held back. The last one
    has an unfinished character as U+FFFD.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str], end_ids: Set[int], limit: int):
        super().__init__(decoder, stop, end_ids, limit)
        self._holds, self._n_text = bool(stop), 0
        self._begun: list[Token] = []  # tokens of a character that is not complete

    def _add(self, token: int, logprobs: LogProbs | None, is_last: bool) -> list[Token]:
        piece = self._decoder.feed(token)
        if is_last:
            piece += self._decoder.flush()
        drawn = Token(token, piece, logprobs, not self._decoder.holds_bytes)
        if not self._holds:
            return [drawn]
        self._n_text += len(piece)
        self._begun.append(drawn)
        if drawn.complete:
            self._held += [(self._n_text, one) for one in self._begun]
            self._begun = []
        return self._release(self._stops.feed(piece))

    def flush(self) -> list[Token]:
        """Tokens held back, at the end of the text.

        After a stop string, they are cut to the text before it.
        """
        held = [*(one for _, one in self._held), *self._begun]
        self._held.clear()
        self._begun = []
        if not self.stop_string:
            return held
        n = self._n_certain - self._n_text + sum(len(one.piece) for one in held)
        cut: list[Token] = []
        for one in held:
            if n > 0:
                cut.append(attrs.evolve(one, piece=one.piece[:n]))
                n -= len(cut[-1].piece)
        return cut
