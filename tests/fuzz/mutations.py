"""Mutations of bytes, aware of fields: counts, lengths, types, numbers."""

import random
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
from hypothesis import strategies as st

Edit = tuple[str, int, int]
"""Kind of an edit, its place and its value, both reduced to what the data allows."""

_EDGES = (0, 1, 2, 3, 7, 8, 9, 31, 63, 64, 127, 128, 255, 256, 1 << 15, 1 << 16, 1 << 20, 1 << 30)
_WIDE = tuple(1 << n for n in (31, 32, 33, 40, 47, 48, 61, 62, 63))
NUMBERS = (*_EDGES, *_WIDE, *(n - 1 for n in _WIDE), *(-n for n in (1, 2, 8, 128, 1 << 31, 1 << 63)))
"""Integers at the edges of types and limits."""

FLOATS = (
    0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 1e30, 3e38, -3e38, float("inf"), float("-inf"),
    float("nan"), 65504.0, 65520.0,
)  # fmt: skip
"""Floats at the edges of float32 and float16."""


@attrs.frozen
class Field:
    """Bytes `start` to `stop` - 1, a number of one kind."""

    start: int
    stop: int
    kind: str

    def encoded(self, value: int) -> bytes:
        """The value as this field's bytes; large values choose edges."""
        width = self.stop - self.start
        if self.kind == "float":
            return struct.pack("<f", FLOATS[value % len(FLOATS)]) if width == 4 else bytes(width)
        number = NUMBERS[value % len(NUMBERS)] if value % 3 else value // 3
        return (number % (1 << 8 * width)).to_bytes(width, "little")


@attrs.frozen
class Fields:
    """Fields of data, by kind and by width.

    Those of the kinds "field" and "copy" are all.
    """

    of_kind: Mapping[str, Sequence[Field]] = attrs.field(factory=dict)
    of_width: Mapping[int, Sequence[Field]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, fields: Iterable[Field]) -> "Fields":
        """Sort fields."""
        every = [*fields]
        kinds: dict[str, list[Field]] = {"field": every, "copy": every}
        widths: dict[int, list[Field]] = {}
        for field in every:
            kinds.setdefault(field.kind, []).append(field)
            widths.setdefault(field.stop - field.start, []).append(field)
        return cls(kinds, widths)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.of_kind.get("field", ()))


def edits(kinds: Sequence[str], max_size: int = 5) -> st.SearchStrategy[list[Edit]]:
    """Lists of edits; `kinds` are those of `edited`."""
    number = st.integers(0, (1 << 32) - 1)
    return st.lists(st.tuples(st.sampled_from(kinds), number, number), min_size=1, max_size=max_size)


def draw_edits(chance: random.Random, kinds: Sequence[str], max_size: int = 5) -> list[Edit]:
    """Draw such a list a hundred times as fast as Hypothesis.

    Half of the numbers are small.
    """
    return [
        (kinds[int(chance.random() * len(kinds))], chance.getrandbits(32), chance.getrandbits(chance.choice((8, 32))))
        for _ in range(1 + int(chance.random() * max_size))
    ]


def edited(data: bytes, changes: Sequence[Edit], fields: Fields = Fields()) -> bytes:
    """Apply edits to data.

    - "bit", "byte": flip a bit, write a byte.
    - "field", or a field's kind: write a number into one of these fields.
    - "copy": copy a field's bytes to another field of its width.
    - "cut", "drop", "repeat": end the data, remove some bytes, repeat some.
    """
    result = bytearray(data)
    for kind, place, value in changes:
        if not result:
            break
        at = place % len(result)
        of_kind = fields.of_kind.get(kind, ())
        if kind == "bit":
            result[at] ^= 1 << value % 8
        elif kind == "byte":
            result[at] = value % 256
        elif kind == "cut":
            del result[at:]
        elif kind == "drop":
            del result[at : at + 1 + value % 64]
        elif kind == "repeat":
            result[at:at] = result[at : at + 1 + value % 256]
        elif of_kind:
            field = of_kind[place % len(of_kind)]
            if field.stop > len(result):
                continue
            if kind == "copy":
                alike = fields.of_width[field.stop - field.start]
                source = alike[value % len(alike)]
                result[field.start : field.stop] = data[source.start : source.stop]
            else:
                result[field.start : field.stop] = field.encoded(value)
    return bytes(result)


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _F32 = 8, 9, 6


def gguf_fields(data: bytes, per_array: int = 4) -> Fields:
    """Fields of a valid GGUF file.

    Those of the header, metadata, tensor infos, and some floats of data. Of an array the first `per_array` elements are
    fields.
    """
    walker = _Walker(data)
    walker.number(4, "count")  # version
    n_tensors, n_pairs = (walker.number(8, "count") for _ in range(2))
    for _ in range(n_pairs):
        walker.text()
        kind = walker.number(4, "type")
        if kind == _ARRAY:
            kind, n = walker.number(4, "type"), walker.number(8, "length")
            for i in range(n):
                walker.value(kind, keep=i < per_array)
        else:
            walker.value(kind)
    for _ in range(n_tensors):
        walker.text()
        for _ in range(walker.number(4, "count")):
            walker.number(8, "dim")
        walker.number(4, "type")
        walker.number(8, "offset")
    step = max(4, (len(data) - walker.at) // 64 // 4 * 4)
    walker.fields += [Field(at, at + 4, "float") for at in range(walker.at + 64, len(data) - 4, step)]
    return Fields.of(walker.fields)


class _Walker:
    def __init__(self, data: bytes):
        self.data, self.at, self.fields = data, 4, list[Field]()

    def number(self, width: int, kind: str) -> int:
        self.fields.append(Field(self.at, self.at + width, kind))
        self.at += width
        return int.from_bytes(self.data[self.at - width : self.at], "little")

    def text(self, keep: bool = True) -> None:
        length = int.from_bytes(self.data[self.at : self.at + 8], "little")
        if keep:
            self.fields.append(Field(self.at, self.at + 8, "length"))
            self.fields += [Field(at, at + 1, "letter") for at in range(self.at + 8, self.at + 8 + min(length, 32))]
        self.at += 8 + length

    def value(self, kind: int, *, keep: bool = True) -> None:
        if kind == _STRING:
            self.text(keep)
            return
        width = _SIZES[kind]
        if keep:
            self.fields.append(Field(self.at, self.at + width, "float" if kind == _F32 else "value"))
        self.at += width
