"""Model inputs: token ids, embeddings, positions, bidirectional spans, content keys.

A content key is an int for each token. Two tokens with equal keys after equal keys have equal cells in the KV cache, so
that prefixes are compared by keys. The key of a plain id is the id; all others are negative.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError, StateError
from llamacli.util.numbers import is_integer

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

MAX_POSITION = 1 << 30
"""Positions are below this number."""

N_COMPONENTS = 4
"""Position components of M-RoPE: time, height, width, extra."""

_POSITIONED, _IN_SPAN = 1, 2  # the lowest bits of the digest in a key


def is_positioned(key: int) -> bool:
    """True for the key of a token with an explicit position."""
    return key < 0 and bool(~key & _POSITIONED)


def is_in_span(key: int) -> bool:
    """True for the key of a token in a bidirectional span."""
    return key < 0 and bool(~key & _IN_SPAN)


@attrs.frozen(eq=False)
class Inputs:
    """Tokens to evaluate: ids, or embeddings in their place. Made by `Inputs.of`.

    - `ids`: int32 [n], not read where there is a row of embeddings.
    - `keys`: the content key of each token, n ints.
    - `embeddings`: float32 [m, n_embd], or None; row j is token `rows[j]`, int64 [m], ascending.
    - `positions`: int32 [n, k], or None; -1 where a token follows the one before it.
    - `spans`: ranges (start, stop) of tokens that attend to each other in both directions.

    The arrays are copies and read-only.
    """

    ids: Ids
    keys: list[int]
    embeddings: Floats | None = None
    rows: npt.NDArray[np.int64] = attrs.field(factory=lambda: np.empty(0, np.int64))
    positions: Ids | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        ids: Iterable[int] | None = None,
        *,
        embeddings: npt.ArrayLike | None = None,
        rows: Iterable[int] | None = None,
        positions: npt.ArrayLike | None = None,
        spans: Iterable[tuple[int, int]] = (),
        keys: Sequence[int] | None = None,
    ) -> Inputs:
        """Check and copy the parts of an input.

        - `ids`: n ints from 0 on; None if all tokens are embeddings.
        - `embeddings`: [m, n_embd], finite, in the place of the ids at `rows`, by default of all.
        - `positions`: [n] or [n, k] with k of 1, 3 (time, height, width) or 4 (and one more, as in llama.cpp). A row
          of -1 is the default: one more than the largest of the first three positions of the token before. From one
          token to the next (time, height, width) must grow, compared in this order. Positions may be skipped.
        - `spans`: ranges (start, stop) that do not overlap, in any order. The tokens of a span attend to each other
          in both directions, and are evaluated in one batch.
        - `keys`: one int for each row of embeddings that stands for its content, such as a digest of an image and the
          row's number; by default a digest of the row. Equal keys of different rows make prefixes equal that are not.

        Raises InvalidRequestError that names what is wrong.
        """
        table = None if embeddings is None else _checked_embeddings(embeddings)
        checked = _checked_ids(ids, None if table is None or rows is not None else len(table))
        n = len(checked)
        at = _checked_rows(rows, table, n)
        placed = None if positions is None else _checked_positions(positions, n)
        ranges = _checked_spans(spans, n)
        if keys is not None and (table is None or len(keys) != len(table)):
            m = 0 if table is None else len(table)
            raise InvalidRequestError(f"keys has {len(keys)} content keys for {m} rows of embeddings")
        for key in () if keys is None else keys:
            if not is_integer(key):
                raise InvalidRequestError(f"keys has {key!r}, which is not an int")
        made = checked.tolist() if table is None and placed is None and not ranges else None
        if made is None:
            made = _content_keys(checked, table, at, placed, ranges, keys)
        return cls(_frozen(checked), made, table, _frozen(at), placed, ranges)

    @staticmethod
    def keys_of(keys: Sequence[int], *, bidirectional: bool = False, positions: Ids | None = None) -> list[int]:
        """Content keys of rows of embeddings with these `keys` and `positions`.

        They are those of `Inputs.of`, without the rows. With `bidirectional`, the rows are one span.
        """
        n = len(keys)
        spans = ((0, n),) if bidirectional else ()
        return _content_keys(np.zeros(n, np.int32), None, np.arange(n), positions, spans, keys)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_plain(self) -> bool:
        """True if there is nothing but ids."""
        return self.embeddings is None and self.positions is None and not self.spans

    def part(self, start: int, stop: int) -> Inputs:
        """Tokens `start` to `stop` - 1; spans are clipped, keys are kept."""
        first, last = np.searchsorted(self.rows, (start, stop)).tolist()
        return Inputs(
            self.ids[start:stop],
            self.keys[start:stop],
            None if self.embeddings is None or first == last else self.embeddings[first:last],
            self.rows[first:last] - start,
            None if self.positions is None else self.positions[start:stop],
            tuple((max(a, start) - start, min(b, stop) - start) for a, b in self.spans if a < stop and b > start),
        )

    def placed(self, first: int, n_components: int) -> Inputs:
        """Inputs with the position of each token.

        Positions become int32 [n, 1], or [n, 4] for a model that has several components, if any is given; `first` is
        the default of the first token. On text all components but the last are equal, and the last is 0. Raises
        InvalidRequestError if the model has one position a token and several are given.
        """
        if self.positions is None:
            return self
        n, k = self.positions.shape
        if k > 1 and n_components == 1:
            raise InvalidRequestError(f"positions have {k} components, and the model has one position a token")
        out = np.zeros((n, N_COMPONENTS if n_components > 1 else 1), np.int64)
        number, given = np.arange(n), self.positions[:, 0] >= 0
        last = np.maximum.accumulate(np.where(given, number, -1))
        largest = self.positions[:, :3].max(1).astype(np.int64)
        out[:, :3] = np.where(last >= 0, largest[last] + number - last, first + number)[:, None]
        if k == 1:
            out[given, :3] = self.positions[given]
        else:
            out[given, :k] = self.positions[given]
        _expect_growing(out)
        return attrs.evolve(self, positions=_frozen(out.astype(np.int32)))

    def largest_piece(self, start: int, room: int) -> int:
        """Number of tokens from `start` on that cut no span.

        At most `room`; 0 if the first span is longer.
        """
        stop = min(len(self), start + room)
        for a, b in self.spans:
            if a < stop < b:
                return max(0, a - start)
        return stop - start


@attrs.frozen(eq=False)
class _Cell:
    """Content of a token that is not a plain id.

    `span`: the token's index in its span, and the span's length.
    """

    id: int
    row: Floats | None
    position: tuple[int, ...] | None
    span: tuple[int, int] | None

    def equals(self, other: _Cell) -> bool:
        same_row = self.row is other.row or (
            self.row is not None and other.row is not None and self.row.tobytes() == other.row.tobytes()
        )
        same_id = self.row is not None or self.id == other.id
        return same_row and same_id and (self.position, self.span) == (other.position, other.span)


class Contents:
    """Contents of the tokens that are not plain ids, by content key.

    The owner of a list of keys keeps it, so that the tokens can be evaluated again. Of plain ids nothing is stored.

    - `cells`: the content of each key; empty if all tokens are plain ids.
    """

    def __init__(self) -> None:
        self.cells: dict[int, _Cell] = {}
        self._known = 0, 0  # a number of the owner's first keys, and the position after them

    def __len__(self) -> int:
        return len(self.cells)

    def copy(self) -> Contents:
        """Contents that change independently."""
        other = Contents()
        other.cells = dict(self.cells)
        return other

    def add(self, inputs: Inputs, before: Sequence[int] = ()) -> list[int]:
        """Add tokens that follow those with the keys `before`; their keys.

        Raises InvalidRequestError, changing nothing, if positions run backwards, or a key is known with another
        content.
        """
        if inputs.is_plain:
            return inputs.keys
        if inputs.positions is not None and (given := np.flatnonzero(inputs.positions[:, 0] >= 0)).size:
            i = int(given[0])
            own = _three(tuple(inputs.positions[i].tolist()))
            last = (self.next_position(before) + i - 1,) * 3 if i else self._last_position(before)
            if last >= own:
                raise InvalidRequestError(
                    f"position {_text(own)} at index {i} is not behind {_text(last)}, that of the token before it"
                )
        new = {key: cell for key, cell in zip(inputs.keys, _cells(inputs), strict=True) if key < 0}
        for i, (key, cell) in enumerate(zip(inputs.keys, _cells(inputs), strict=True)):
            known = self.cells.get(key, new.get(key))
            if known is not None and not known.equals(cell):
                raise InvalidRequestError(f"the content key of the token at index {i} is that of another content")
        self.cells |= new
        return inputs.keys

    @property
    def has_positions(self) -> bool:
        """True if a token has an explicit position."""
        return any(map(is_positioned, self.cells))

    def set_rows(self, rows: Mapping[int, Floats]) -> None:
        """Replace the rows of embeddings of some keys.

        For rows that are made after their keys, such as those of pictures.
        """
        self.cells |= {key: attrs.evolve(self.cells[key], row=row) for key, row in rows.items()}

    def span_at(self, keys: Sequence[int], stop: int) -> tuple[int, int] | None:
        """Span that a cut before token `stop` would divide, as (start, stop)."""
        if not 0 < stop < len(keys) or not is_in_span(keys[stop - 1]):
            return None
        index, length = self.cells[keys[stop - 1]].span or (0, 1)
        start = stop - 1 - index
        return (start, start + length) if index + 1 < length else None

    def slice(self, keys: Sequence[int], start: int = 0, stop: int | None = None) -> Inputs:
        """Inputs of the keys `start` to `stop` - 1, to be evaluated.

        They have the positions that follow from all keys before. Raises InvalidRequestError if the end would cut a
        span.
        """
        stop = len(keys) if stop is None else stop
        part = list(keys[start:stop])
        if not self.cells:
            return Inputs(_frozen(np.array(part, np.int32)), part)
        cells = [self.cells[key] if key < 0 else None for key in part]
        self.expect_whole(keys, stop)
        held = [(i, cell.row) for i, cell in enumerate(cells) if cell is not None and cell.row is not None]
        spans: list[tuple[int, int]] = []
        for i, cell in enumerate(cells):
            if cell is not None and cell.span is not None and (cell.span[0] == 0 or i == 0):
                spans.append((i, i - cell.span[0] + cell.span[1]))
        positions = [None if cell is None else cell.position for cell in cells]
        first, table = self.next_position(keys, start), None
        if first != start or any(positions):
            k = max((len(one) for one in positions if one), default=1)
            if k > 1:
                positions = [one and (*_three(one), *one[3:], 0)[:k] for one in positions]
            table = np.array([(-1,) * k if one is None else one for one in positions], np.int32).reshape(-1, k)
        ids = [key if cell is None else cell.id for key, cell in zip(part, cells, strict=True)]
        inputs = Inputs(
            _frozen(np.array(ids, np.int32)),
            part,
            _frozen(np.array([row for _, row in held], np.float32)) if held else None,
            _frozen(np.array([i for i, _ in held], np.int64)),
            table if table is None else _frozen(table),
            tuple(spans),
        )
        return inputs if table is None else inputs.placed(first, table.shape[1])

    def next_position(self, keys: Sequence[int], stop: int | None = None) -> int:
        """Default position of a token after the keys, or the first `stop`."""
        stop = len(keys) if stop is None else stop
        if self.cells:
            for i in range(stop - 1, -1, -1):
                if is_positioned(keys[i]):
                    position = self.cells[keys[i]].position
                    assert position is not None
                    return max(position[:3]) + stop - i
        return stop

    def following(self, keys: Sequence[int], ids: list[int]) -> Inputs:
        """Inputs of plain ids after all of the owner's keys.

        Of these, those behind the ones of the last call are looked at.
        """
        n, position = self._known
        for key in keys[n:]:
            cell = self.cells[key].position if is_positioned(key) else None
            position = position + 1 if cell is None else 1 + max(cell[:3])
        self._known = len(keys), position
        positions = None if position == len(keys) else position + np.arange(len(ids), dtype=np.int32)[:, None]
        return Inputs(_frozen(np.array(ids, np.int32)), ids, positions=positions)

    def expect_whole(self, keys: Sequence[int], n: int) -> None:
        """Raise InvalidRequestError if the first n tokens end within a span."""
        if 0 < n < len(keys) + 1 and is_in_span(keys[n - 1]):
            index, length = self.cells[keys[n - 1]].span or (0, 1)
            if index + 1 < length:
                start = n - 1 - index
                raise InvalidRequestError(
                    f"{n} tokens end within the span of tokens {start} to {start + length - 1}, which attend to each "
                    f"other: give {start} or {start + length}"
                )

    def keep(self, keys: Iterable[int]) -> None:
        """Forget the contents of all other keys."""
        kept = {key for key in keys if key < 0}
        self._known = 0, 0
        self.cells = {key: cell for key, cell in self.cells.items() if key in kept}

    def save(self, keys: Sequence[int]) -> tuple[dict[str, Floats], list[Any]]:
        """Contents of the keys as arrays and JSON, for `load`."""
        cells = {key: self.cells[key] for key in keys if key < 0}
        rows = [cell.row for cell in cells.values() if cell.row is not None]
        saved = [
            [key, cell.id, cell.row is not None, cell.position and list(cell.position), cell.span and list(cell.span)]
            for key, cell in cells.items()
        ]
        return ({"embeddings": np.array(rows, np.float32)} if rows else {}), saved

    @classmethod
    def load(cls, arrays: Mapping[str, Floats], saved: Any, keys: Sequence[int]) -> Contents:
        """Contents that `save` returned, of at least the keys.

        Raises StateError if they are inconsistent.
        """
        contents = cls()
        try:
            rows = iter(arrays.get("embeddings", ()))
            for key, number, has_row, position, span in saved:
                if not is_integer(key) or not is_integer(number) or key >= 0:
                    raise StateError(f"the state has an invalid content key, {key!r}")
                row = _frozen(np.array(next(rows), np.float32)) if has_row else None
                if row is not None and not np.isfinite(row).all():
                    raise StateError("the state has embeddings that are not finite")
                at = None if position is None else tuple(int(one) for one in position)
                within = None if span is None else (int(span[0]), int(span[1]))
                valid = at is None or (len(at) in (1, 3, 4) and all(0 <= one < MAX_POSITION for one in at))
                if not valid or (within is not None and not 0 <= within[0] < within[1]):
                    raise StateError(f"the state has an invalid position or span of content key {key}")
                if ((at is not None), (within is not None)) != (is_positioned(key), is_in_span(key)):
                    raise StateError(f"the state's content key {key} does not fit its content")
                contents.cells[key] = _Cell(int(number), row, at, within)
        except (TypeError, ValueError, StopIteration) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the state's contents are inconsistent: {type(error).__name__}: {error}") from None
        if any(key < 0 and key not in contents.cells for key in keys):
            raise StateError("the state lacks the content of a token")
        return contents

    def _last_position(self, before: Sequence[int]) -> tuple[int, ...]:
        """Position of the last of the tokens, as three components.

        -1 if there is none.
        """
        if before and is_positioned(before[-1]):
            return _three(self.cells[before[-1]].position or (0,))
        return (self.next_position(before) - 1,) * 3


def _three(position: tuple[int, ...]) -> tuple[int, ...]:
    return position * 3 if len(position) == 1 else position[:3]


def _cells(inputs: Inputs) -> Iterator[_Cell]:
    held = dict(zip(inputs.rows.tolist(), inputs.embeddings, strict=True)) if inputs.embeddings is not None else {}
    span_of = {i: (i - a, b - a) for a, b in inputs.spans for i in range(a, b)}
    for i, token in enumerate(inputs.ids.tolist()):
        position = None
        if inputs.positions is not None and inputs.positions[i, 0] >= 0:
            position = tuple(inputs.positions[i].tolist())
        yield _Cell(token, held.get(i), position, span_of.get(i))


def _content_keys(
    ids: Ids,
    embeddings: Floats | None,
    rows: npt.NDArray[np.int64],
    positions: Ids | None,
    spans: tuple[tuple[int, int], ...],
    keys: Sequence[int] | None,
) -> list[int]:
    contents = [b"id %d" % token for token in ids.tolist()]
    flags = [0] * len(contents)
    out = ids.tolist()
    plain = [True] * len(contents)
    for j, i in enumerate(rows.tolist()):
        if keys is not None:
            contents[i] = b"key %d" % keys[j]
        elif embeddings is not None:
            contents[i] = b"row " + embeddings[j].tobytes()
        plain[i] = False
    if positions is not None:
        for i in np.flatnonzero(positions[:, 0] >= 0).tolist():
            contents[i] += b" at " + _text(tuple(positions[i].tolist())).encode()
            plain[i], flags[i] = False, _POSITIONED
    for a, b in spans:
        whole = hashlib.blake2b(b"".join(hashlib.blake2b(one).digest() for one in contents[a:b])).digest()
        for i in range(a, b):
            contents[i], plain[i] = b"%d of " % (i - a) + whole, False
            flags[i] |= _IN_SPAN
    for i, content in enumerate(contents):
        if not plain[i]:
            digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 2
            out[i] = ~(digest & ~3 | flags[i])
    return out


def _checked_ids(ids: Iterable[int] | None, n: int | None) -> Ids:
    if ids is None:
        if n is None:
            raise InvalidRequestError("ids are missing: only embeddings without rows can do without")
        return np.zeros(n, np.int32)
    text = cast(object, ids)
    if isinstance(text, str):
        raise InvalidRequestError(f"ids are ints, not the text {text[:40]!r}: use encode(text)")
    try:
        given = list(ids)
    except TypeError:
        raise InvalidRequestError(f"ids are a sequence of ints, not {ids!r}") from None
    for i, token in enumerate(given):
        if isinstance(cast(object, token), np.ndarray | list | tuple):
            raise InvalidRequestError("ids are a sequence of ints, and these have rows: give rows as `embeddings`")
        if not is_integer(token) or not 0 <= token < 1 << 31:
            raise InvalidRequestError(f"token {token!r} at index {i} is not an id")
    if n is not None and len(given) != n:
        raise InvalidRequestError(f"{n} rows of embeddings without rows take the place of {len(given)} ids")
    return np.array(given, np.int32)


def _checked_embeddings(embeddings: npt.ArrayLike) -> Floats:
    try:
        with np.errstate(over="ignore"):  # found below
            table = np.array(embeddings, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"embeddings are not an array of numbers: {error}") from None
    if table.ndim != 2 or not table.shape[1]:
        raise InvalidRequestError(f"embeddings have the shape {table.shape}, expected [m, n_embd]")
    wrong = np.flatnonzero(~np.isfinite(table).all(1))
    if len(wrong):
        raise InvalidRequestError(f"embeddings have numbers in row {wrong[0]} that are NaN, infinite or too large")
    return _frozen(table)


def _checked_rows(rows: Iterable[int] | None, table: Floats | None, n: int) -> npt.NDArray[np.int64]:
    if table is None:
        if rows is not None:
            raise InvalidRequestError("rows are given without embeddings")
        return np.empty(0, np.int64)
    given = list(range(n) if rows is None else rows)
    if len(given) != len(table):
        raise InvalidRequestError(f"rows has {len(given)} indices for {len(table)} rows of embeddings")
    last = -1
    for row in given:
        if not is_integer(row) or not last < row < n:
            raise InvalidRequestError(f"rows has the index {row!r}: expected ascending ints below {n}, the tokens")
        last = int(row)
    return np.array(given, np.int64)


def _checked_positions(positions: npt.ArrayLike, n: int) -> Ids:
    try:
        given = np.array(positions)
    except ValueError as error:
        raise InvalidRequestError(f"positions are not an array: {error}") from None
    if given.dtype.kind not in "iu" and given.size:
        raise InvalidRequestError(f"positions are integers, not {given.dtype}")
    table = given.reshape(len(given), 1) if given.ndim == 1 else given
    if table.ndim != 2 or len(table) != n or table.shape[1] not in (1, 3, N_COMPONENTS):
        raise InvalidRequestError(f"positions have the shape {given.shape}, expected [{n}], [{n}, 3] or [{n}, 4]")
    is_default = (table == -1).all(1)
    wrong = np.flatnonzero(~is_default & ((table < 0) | (table >= MAX_POSITION)).any(1))
    if len(wrong):
        at = _text(tuple(table[wrong[0]].tolist()))
        raise InvalidRequestError(f"position {at} at index {wrong[0]} is not from 0 to {MAX_POSITION - 1}")
    table = table.astype(np.int32)
    given_at = np.flatnonzero(~is_default)
    if len(given_at):  # what is before the first one is checked where it is known
        first = int(given_at[0])
        start = Inputs(np.zeros(n - first, np.int32), [0] * (n - first), positions=table[first:])
        start.placed(0, table.shape[1])
    return _frozen(table)


def _expect_growing(positions: npt.NDArray[np.int64]) -> None:
    """Raise InvalidRequestError unless (time, height, width) grow from token to token."""
    steps = np.diff(positions[:, :3], axis=0)
    signs = np.sign(steps) * np.array([4, 2, 1])[: steps.shape[1]]  # the first component that differs decides
    wrong = np.flatnonzero(signs.sum(1) <= 0)
    if len(wrong):
        before, own = (_text(tuple(positions[i].tolist())) for i in (wrong[0], wrong[0] + 1))
        raise InvalidRequestError(f"position {own} at index {wrong[0] + 1} is not behind {before}, the one before it")
    if positions.size and positions.max() >= 1 << 31:
        raise InvalidRequestError(f"position {positions.max()} is too large")


def _checked_spans(spans: Iterable[tuple[int, int]], n: int) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for span in spans:
        pair = tuple(span)
        if len(pair) != 2 or not all(map(is_integer, pair)) or not 0 <= pair[0] < pair[1] <= n:
            raise InvalidRequestError(f"span {pair} is not a range of the {n} tokens")
        ranges.append((int(pair[0]), int(pair[1])))
    ranges.sort()
    for one, other in itertools.pairwise(ranges):
        if other[0] < one[1]:
            raise InvalidRequestError(f"spans {one} and {other} overlap")
    return tuple(ranges)


def _text(position: tuple[int, ...]) -> str:
    return str(position[0]) if len(position) == 1 else "/".join(map(str, position))


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
