"""Token reuse between two renderings of a conversation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence

import attrs

from llamacli.generation.text import Token
from llamacli.kv.prefixes import n_common
from llamacli.media.encoder import Tile

Part = int | str | Tile
"""Part of a rendered conversation: a special token, a run of text, or a tile of a picture."""


@attrs.frozen
class Evaluated:
    """Part as it was evaluated, with its token `ids`.

    `part` is None for what is left of a truncated one, and for tokens at the end of a generated run that have no text,
    or the first bytes of a character.
    """

    part: Part | None
    ids: tuple[int, ...]


@attrs.frozen
class Plan:
    """Tokens of a rendered conversation.

    The first `n_kept` are evaluated already.
    """

    parts: tuple[Evaluated, ...]
    n_kept: int

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [token for part in self.parts for token in part.ids]

    @property
    def new_ids(self) -> list[int]:
        """Tokens to evaluate."""
        return self.ids[self.n_kept :]

    def before_last(self) -> Plan:
        """Plan that evaluates at least one token, and whole tiles."""
        n, start = min(self.n_kept, len(self.ids) - 1), 0
        for part in self.parts:
            stop = start + len(part.ids)
            if isinstance(part.part, Tile) and start < n < stop:
                n = start
            start = stop
        return Plan(self.parts, n)


def plan(held: Sequence[Evaluated], parts: Sequence[Part], encode: Callable[[str, bool], list[int]]) -> Plan:
    """Plan the evaluation of a rendered conversation.

    The session holds the parts `held`. Equal parts keep the tokens that they were evaluated with, which for generated
    text need not be those of `encode(run, continues)`. So does a run of text that continues the last held one: only the
    rest is encoded. After the first difference tokens are compared, and all that follows is encoded.
    """
    done: list[Evaluated] = []
    for have, part in zip(held, parts, strict=False):
        if have.part != part:
            break
        done.append(Evaluated(part, have.ids))  # an equal tile, which may have its pixels again
    n_kept = sum(len(part.ids) for part in done)
    rest = list(parts[len(done) :])
    if rest and isinstance(rest[0], str) and len(held) > len(done):
        have, run = held[len(done)], rest.pop(0)
        assert isinstance(run, str)
        if isinstance(have.part, str) and run.startswith(have.part) and len(held) == len(done) + 1:
            ids = (*have.ids, *encode(run[len(have.part) :], True))
            n_kept += len(have.ids)
        else:
            ids = tuple(encode(run, False))
            n_kept += n_common(have.ids, ids)
        done.append(Evaluated(run, ids))
    position = sum(n_positions(one) for one in done)
    for part in rest:
        one = Evaluated(part, _ids(part, position, encode))
        done.append(one)
        position += n_positions(one)
    return Plan(tuple(done), n_kept)


def n_positions(one: Evaluated) -> int:
    """Number of positions that a part takes."""
    return one.part.n_positions if isinstance(one.part, Tile) else len(one.ids)


def _ids(part: Part, position: int, encode: Callable[[str, bool], list[int]]) -> tuple[int, ...]:
    if isinstance(part, Tile):
        return part.ids_at(position)
    return (part,) if isinstance(part, int) else tuple(encode(part, False))


def truncated(parts: Iterable[Evaluated], n: int) -> list[Evaluated]:
    """Parts of the first `n` tokens."""
    kept: list[Evaluated] = []
    for part in parts:
        if n < len(part.ids):
            return [*kept, Evaluated(None, part.ids[:n])] if n else kept
        kept.append(part)
        n -= len(part.ids)
    return kept


def extended(parts: Sequence[Evaluated], tokens: Iterable[Token], special: Container[int]) -> list[Evaluated]:
    """Append generated tokens to parts.

    Special tokens as parts of their own, text to the last run. The last tokens of a run are not of it if they have no
    text, or bytes of a character that does not come: the same run rendered later has other tokens.
    """
    result = list(parts)
    for is_special, group in itertools.groupby(tokens, key=lambda token: token.id in special):
        run = list(group)
        ids = tuple(token.id for token in run)
        if is_special:
            result += [Evaluated(token, (token,)) for token in ids]
            continue
        if result and result[-1].part is None:
            result[-1] = Evaluated(None, (*result[-1].ids, *ids))
            continue
        n = max((i for i, token in enumerate(run, start=1) if token.piece and token.complete), default=0)
        if n:
            before = result.pop() if result and isinstance(result[-1].part, str) else Evaluated("", ())
            text = "".join((str(before.part), *(token.piece for token in run[:n])))
            result.append(Evaluated(text, (*before.ids, *ids[:n])))
        if n < len(ids):
            result.append(Evaluated(None, ids[n:]))
    return result
