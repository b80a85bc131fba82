"""Text of generated tokens, up to a stop string."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import attrs

from llamacli.sampling import LogProbs, StopStrings
from llamacli.tokenizer import StreamDecoder


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


class TokenText:
    """Generated tokens with their text, up to a stop string.

    - `stop_string`: the stop string that has ended the text, "" until then.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str] = ()):
        self._decoder, self._stops = decoder, StopStrings(stop) if stop else None
        self._held: collections.deque[Token] = collections.deque()
        self._n_certain = 0  # characters of the held tokens that are before any stop string
        self.stop_string = ""

    def feed(self, token: int, logprobs: LogProbs | None = None, *, is_last: bool = False) -> list[Token]:
        """Add a token that was drawn.

        Returns the tokens whose whole text is certain to be before a stop string; others are held back. With `is_last`
        no token follows: an unfinished character comes as U+FFFD.
        """
        piece = self._decoder.feed(token)
        if is_last:
            piece += self._decoder.flush()
        drawn = Token(token, piece, logprobs, not self._decoder.holds_bytes)
        if self._stops is None:
            return [drawn]
        held, certain, n = self._held, list[Token](), 0
        held.append(drawn)
        self._n_certain += len(self._stops.feed(piece))
        self.stop_string = self._stops.found
        for i, one in enumerate([*held]):
            n += len(one.piece)
            if n > self._n_certain:
                break
            if one.complete:
                certain += [held.popleft() for _ in range(i + 1 - len(certain))]
        self._n_certain -= sum(len(one.piece) for one in certain)
        return certain

    def flush(self) -> list[Token]:
        """Tokens held back, at the end of the text.

        After a stop string, they are cut to the text before it.
        """
        held, self._held = [*self._held], collections.deque()
        if not self.stop_string:
            return held
        cut: list[Token] = []
        for one in held:
            if self._n_certain:
                cut.append(attrs.evolve(one, piece=one.piece[: self._n_certain]))
                self._n_certain -= len(cut[-1].piece)
        return cut
