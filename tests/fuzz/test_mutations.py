"""Mutations of bytes and fields of GGUF files."""

import random

import gguf_builder as b
from fuzz.mutations import Field, Fields, draw_edits, edited, gguf_fields
from gguf_builder import Kind, Tensor

DATA = b.gguf_bytes(
    [
        b.pair("key", Kind.STRING, "text"),
        b.pair("eps", Kind.F32, 0.5),
        b.array_pair("numbers", Kind.I32, [1, 2, 3, 4, 5, 6]),
    ],
    [Tensor("w", [4, 2])],
)


def test_fields_of_a_gguf_file() -> None:
    fields = gguf_fields(DATA, per_array=2)
    number = {kind: [int.from_bytes(DATA[f.start : f.stop], "little") for f in fields if f.kind == kind] for kind in
              ("count", "type", "value", "dim", "offset")}  # fmt: skip
    assert number["count"] == [3, 1, 3, 2]
    assert number["type"] == [Kind.STRING, Kind.F32, Kind.ARRAY, Kind.I32, 0]
    assert number["value"] == [1, 2]
    assert number["dim"] == [4, 2]
    assert number["offset"] == [0]
    letters = bytes(DATA[field.start] for field in fields if field.kind == "letter")
    assert letters == b"keytextepsnumbersw"


def test_edits() -> None:
    assert edited(b"abc", [("bit", 1, 0)]) == b"acc"
    assert edited(b"abc", [("byte", 4, 0x78)]) == b"axc"
    assert edited(b"abc", [("cut", 1, 0)]) == b"a"
    assert edited(b"abcd", [("drop", 1, 1)]) == b"ad"
    assert edited(b"abcd", [("repeat", 2, 1)]) == b"abcdcd"
    assert edited(b"abc", [("cut", 0, 0), ("byte", 5, 5)]) == b""
    fields = Fields.of([Field(0, 2, "value"), Field(2, 4, "value")])
    assert edited(b"abcd", [("copy", 0, 1)], fields) == b"cdcd"
    assert edited(b"abcd", [("value", 1, 3 * 513)], fields) == b"ab\x01\x02"
    assert edited(b"abcd", [("value", 1, 3), ("cut", 3, 0), ("value", 1, 3)], fields) == b"ab\x01"


def test_drawn_edits_follow_from_the_seed() -> None:
    kinds = ("bit", "field", "copy")
    drawn = [draw_edits(random.Random(seed), kinds, 3) for seed in (1, 1, *range(2, 60))]
    assert drawn[0] == drawn[1]
    assert {len(changes) for changes in drawn} == {1, 2, 3}
    assert {kind for changes in drawn for kind, _, _ in changes} == set(kinds)
    for changes in drawn:
        assert edited(DATA, changes, gguf_fields(DATA)) == edited(DATA, changes, gguf_fields(DATA))
