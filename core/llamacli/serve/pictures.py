"""Encode pictures of prompts in pieces between the scheduler's steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence

from llamacli.media.encoder import LoadedEncoder, Rows, Tile
from llamacli.serve.sequences import SequenceState


class ServedPictures:
    """Encoder of the tiles that prompts wait for, one at a time.

    All methods are for the scheduler's thread. A request has the tiles of its prompts by content key, and rows of zeros
    in its contents until they are encoded. `n_pieces` are the pieces so far.
    """

    def __init__(self, encoder: Callable[[], LoadedEncoder], clock: Callable[[], float]):
        self._encoder, self._clock = encoder, clock
        self.tile: Tile | None = None
        self._pieces: Generator[None, None, Rows] | None = None
        self.n_pieces = 0

    @staticmethod
    def room(sequence: SequenceState) -> int:
        """Next tokens of a sequence before the first missing row."""
        missing, start = sequence.request.missing_rows, len(sequence.cache.tokens)
        if not missing:
            return sequence.n_missing
        return next((i for i, key in enumerate(sequence.context[start:]) if key in missing), sequence.n_missing)

    def encode(self, waiting: Sequence[SequenceState], seconds: float) -> list[tuple[SequenceState, Exception]]:
        """Encode for about so many seconds; 0 sets no limit.

        The tile is one that was begun, else the one that the first sequence waits for. All sequences that wait for it
        get its rows; if it cannot be encoded, they are returned with the error.
        """
        until = self._clock() + (seconds or math.inf)
        if self.tile is None:
            first = waiting[0]
            self.tile, _ = first.request.missing_rows[first.context[len(first.cache.tokens)]]
        tile = self.tile
        try:
            if self._pieces is None:
                self._pieces = self._encoder().encode_in_pieces(tile)
            while True:
                started = self._clock()
                next(self._pieces)
                self.n_pieces += 1
                now = self._clock()
                if now + (now - started) > until:
                    return []
        except StopIteration as end:
            self.close()
            for sequence in waiting:
                _give(sequence, tile, end.value)
        except Exception as error:
            self.close()
            return [(sequence, error) for sequence in waiting if _wants(sequence, tile)]
        return []

    def drop_unwanted(self, sequences: Iterable[SequenceState]) -> None:
        """Give up a tile that no sequence waits for."""
        tile = self.tile
        if tile is not None and not any(_wants(one, tile) for one in sequences):
            self.close()

    def close(self) -> None:
        """Give up the tile that was begun."""
        if self._pieces is not None:
            self._pieces.close()
        self.tile = self._pieces = None


def _wants(sequence: SequenceState, tile: Tile) -> bool:
    return any(other == tile for other, _ in sequence.request.missing_rows.values())


def _give(sequence: SequenceState, tile: Tile, rows: Rows) -> None:
    request = sequence.request
    found = {key: rows[i] for key, (other, i) in request.missing_rows.items() if other == tile}
    if found and request.message.contents is not None:
        request.message.contents.set_rows(found)
        for key in found:
            del request.missing_rows[key]
