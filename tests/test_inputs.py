"""Inputs: checks, positions, content keys, and contents by key."""

from typing import Any

import numpy as np
import pytest

from llamacli import Inputs, InvalidRequestError, StateError
from llamacli.inputs import Contents, is_in_span, is_positioned

ROWS = np.random.RandomState(0).normal(size=(3, 8)).astype(np.float32)
GRID = [(4, 4, 4), (4, 4, 5), (4, 5, 4)]


def image(**more: Any) -> Inputs:
    """Text of four tokens, three rows of embeddings, text of two tokens."""
    positions = np.full((9, 3), -1)
    positions[4:7] = GRID
    given = {"embeddings": ROWS, "rows": [4, 5, 6], "positions": positions, "spans": [(4, 7)]} | more
    return Inputs.of([1, 2, 3, 4, 0, 0, 0, 5, 6], **given)


def test_plain_ids_are_their_own_keys() -> None:
    inputs = Inputs.of(range(3))
    assert (inputs.keys, len(inputs), inputs.is_plain, inputs.ids.dtype) == ([0, 1, 2], 3, True, np.int32)


def test_embeddings_alone_need_no_ids() -> None:
    inputs = Inputs.of(embeddings=ROWS)
    assert inputs.rows.tolist() == [0, 1, 2]
    assert all(key < 0 for key in inputs.keys)


def test_arrays_are_copies_that_cannot_change() -> None:
    rows, positions = ROWS.copy(), np.arange(3)
    inputs = Inputs.of(embeddings=rows, positions=positions)
    rows[0], positions[0] = 7, 0
    np.testing.assert_array_equal(inputs.embeddings, ROWS)
    for array in (inputs.ids, inputs.embeddings, inputs.rows, inputs.positions):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1  # type: ignore[index]


def test_keys_of_text_around_embeddings_are_its_ids() -> None:
    assert [key for key in image().keys if key >= 0] == [1, 2, 3, 4, 5, 6]


def test_key_follows_from_the_content_alone() -> None:
    first, other = Inputs.of([1, 0], embeddings=ROWS[:1], rows=[1]), Inputs.of([2, 3, 9], embeddings=ROWS[:1], rows=[2])
    assert first.keys[1] == other.keys[2] < 0


@pytest.mark.parametrize(
    "more",
    [
        {"embeddings": ROWS + 1e-6},
        {"positions": None},
        {"positions": np.array([0, 1, 2, 3, 4, 5, 6, 7, 8])},
        {"spans": []},
        {"spans": [(4, 6)]},
        {"keys": [1, 2, 3]},
    ],
    ids=["row", "no position", "position", "no span", "span", "given"],
)
def test_other_content_has_another_key(more: dict[str, Any]) -> None:
    assert not {*image().keys[4:6]} & {*image(**more).keys[4:6]}


def test_whole_span_is_a_part_of_each_key() -> None:
    changed = ROWS.copy()
    changed[2] += 1
    assert image().keys[4] != image(embeddings=changed).keys[4]


def test_given_keys_stand_for_rows() -> None:
    assert image(keys=[1, 2, 3]).keys == image(keys=[1, 2, 3], embeddings=ROWS + 1).keys


def test_keys_tell_positions_and_spans() -> None:
    found = [(is_positioned(key), is_in_span(key)) for key in (image().keys[4], Inputs.of(embeddings=ROWS).keys[0], 7)]
    assert found == [(True, True), (False, False), (False, False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": [1, -2]}, "token -2 at index 1"),
        ({"ids": [1.5]}, "token 1.5 at index 0"),
        ({"ids": "text"}, "not the text 'text'"),
        ({"ids": None}, "ids are missing"),
        ({"ids": np.zeros((2, 4), np.float32)}, "give rows as `embeddings`"),
        ({"ids": [1], "rows": [0]}, "rows are given without embeddings"),
        ({"ids": [1], "embeddings": ROWS}, "3 rows of embeddings without rows take the place of 1 ids"),
        ({"ids": [1, 2, 3], "embeddings": ROWS[0]}, r"shape \(8,\), expected \[m, n_embd\]"),
        ({"embeddings": ROWS + np.float32("nan")}, "in row 0 that are NaN"),
        ({"embeddings": np.full((2, 8), 1e39)}, "in row 0 that are NaN, infinite or too large"),
        ({"embeddings": [["a"]]}, "not an array of numbers"),
        ({"ids": [1, 2, 3], "embeddings": ROWS, "rows": [0, 2, 1]}, "the index 1: expected ascending ints below 3"),
        ({"ids": [1, 2, 3], "embeddings": ROWS, "rows": [0, 1, 3]}, "the index 3: expected ascending ints below 3"),
        ({"ids": [1, 2, 3], "embeddings": ROWS, "rows": [0, 1]}, "rows has 2 indices for 3 rows"),
        ({"embeddings": ROWS, "keys": [1]}, "keys has 1 content keys for 3 rows"),
        ({"ids": [1], "keys": [1]}, "keys has 1 content keys for 0 rows"),
        ({"embeddings": ROWS, "keys": [1, 2, "a"]}, "keys has 'a'"),
        ({"ids": [1, 2], "positions": [0]}, r"shape \(1,\), expected \[2\]"),
        ({"ids": [1, 2], "positions": [(0, 0), (1, 1)]}, r"shape \(2, 2\)"),
        ({"ids": [1], "positions": [0.5]}, "positions are integers, not float64"),
        ({"ids": [1, 2], "positions": [3, 3]}, "position 3 at index 1 is not behind 3"),
        ({"ids": [1, 2], "positions": [3, 2]}, "position 2 at index 1 is not behind 3"),
        ({"ids": [1, 2], "positions": [(3, 4, 4), (3, 3, 9)]}, "position 3/3/9/0 at index 1 is not behind 3/4/4/0"),
        ({"ids": [1, 2, 3], "positions": [3, -1, 4]}, "position 4 at index 2 is not behind 4"),
        ({"ids": [1], "positions": [-2]}, "position -2 at index 0 is not from 0"),
        ({"ids": [1], "positions": [1 << 30]}, "position 1073741824 at index 0"),
        ({"ids": [1], "positions": [(-1, 0, 0)]}, "position -1/0/0 at index 0"),
        ({"ids": [1, 2], "spans": [(0, 3)]}, r"span \(0, 3\) is not a range of the 2 tokens"),
        ({"ids": [1, 2], "spans": [(1, 1)]}, r"span \(1, 1\)"),
        ({"ids": [1, 2, 3], "spans": [(1, 3), (0, 2)]}, r"spans \(0, 2\) and \(1, 3\) overlap"),
    ],
)
def test_invalid_inputs_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Inputs.of(**arguments)


def test_default_positions_follow_the_largest_component() -> None:
    placed = image().placed(0, 4).positions
    assert placed is not None
    assert placed[3:].tolist() == [[3, 3, 3, 0], *[[*at, 0] for at in GRID], [6, 6, 6, 0], [7, 7, 7, 0]]


def test_positions_of_one_component_are_those_of_text_in_all() -> None:
    assert Inputs.of([1, 2], positions=[4, -1]).placed(0, 4).positions.tolist() == [[4, 4, 4, 0], [5, 5, 5, 0]]  # type: ignore[union-attr]


def test_several_components_need_a_model_that_has_them() -> None:
    with pytest.raises(InvalidRequestError, match="3 components, and the model has one"):
        image().placed(0, 1)


def test_text_in_front_of_a_lower_position_is_refused_when_placed() -> None:
    with pytest.raises(InvalidRequestError, match="position 4/4/4/0 at index 4 is not behind 4/4/4/0"):
        image().placed(1, 4)


@pytest.mark.parametrize(("start", "room", "n"), [(0, 9, 9), (0, 6, 4), (4, 2, 0), (4, 3, 3), (2, 4, 2), (7, 1, 1)])
def test_pieces_cut_no_span(start: int, room: int, n: int) -> None:
    assert image().largest_piece(start, room) == n


class TestContents:
    """Contents by key."""

    def test_of_plain_ids_are_not_stored(self) -> None:
        contents = Contents()
        assert contents.add(Inputs.of([1, 2])) == [1, 2]
        assert (len(contents), contents.slice([1, 2]).ids.tolist()) == (0, [1, 2])

    @pytest.mark.parametrize("start", range(9))
    def test_slice_is_the_same_input(self, start: int) -> None:
        contents, whole = Contents(), image().placed(0, 4)
        part = contents.slice(contents.add(image()), start).placed(start, 4)
        assert part.keys == whole.keys[start:]
        for name in ("ids", "positions"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[start:])
        n = max(0, min(3, 7 - start))
        assert part.rows.tolist() == list(range(max(0, 4 - start), max(0, 7 - start)))
        assert part.spans == (((max(0, 4 - start), 7 - start),) if n else ())
        assert (None if part.embeddings is None else part.embeddings.tolist()) == (
            ROWS[3 - n :].tolist() if n else None
        )

    def test_position_after_other_tokens(self) -> None:
        contents = Contents()
        keys = contents.add(image())
        assert [contents.next_position(keys, n) for n in (0, 4, 7, 9)] == [0, 4, 6, 8]
        assert contents.slice([*keys, 8], 9).positions.tolist() == [[8]]  # type: ignore[union-attr]

    @pytest.mark.parametrize(("n", "last"), [(9, "7/7/7"), (7, "4/5/4"), (4, "3/3/3")])
    def test_positions_that_run_backwards(self, n: int, last: str) -> None:
        contents = Contents()
        keys = contents.add(image())
        same = tuple(map(int, last.split("/")))
        with pytest.raises(InvalidRequestError, match=f"position {last} at index 0 is not behind {last}, that of the"):
            contents.add(Inputs.of([1], positions=[same]), keys[:n])
        assert len(contents) == 3
        contents.add(Inputs.of([1], positions=[(7, 7, 8)]), keys[:n])

    def test_equal_keys_of_other_rows_are_refused(self) -> None:
        contents = Contents()
        contents.add(image(keys=[1, 2, 3]))
        with pytest.raises(InvalidRequestError, match="content key of the token at index 4 is that of another content"):
            contents.add(image(keys=[1, 2, 3], embeddings=ROWS + 1))

    def test_equal_keys_within_an_input_are_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="index 0 is that of another content"):
            Contents().add(Inputs.of(embeddings=ROWS, keys=[7, 7, 7]))

    @pytest.mark.parametrize("n", [5, 6])
    def test_spans_are_not_cut(self, n: int) -> None:
        contents = Contents()
        keys = contents.add(image())
        with pytest.raises(InvalidRequestError, match=rf"{n} tokens end within .* tokens 4 to 6.* give 4 or 7"):
            contents.expect_whole(keys, n)
        with pytest.raises(InvalidRequestError, match="end within the span"):
            contents.slice(keys, 0, n)
        contents.expect_whole(keys, 7)

    def test_forget_others(self) -> None:
        contents = Contents()
        keys = contents.add(image())
        contents.keep(keys[:5])
        assert len(contents) == 1

    def test_save_and_load(self) -> None:
        contents = Contents()
        keys = contents.add(image())
        arrays, saved = contents.save(keys)
        loaded = Contents.load(arrays, saved, keys).slice(keys)
        assert attributes(loaded) == attributes(contents.slice(keys))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda arrays, saved: saved.pop(), "lacks the content of a token"),
            (lambda arrays, saved: arrays.pop("embeddings"), "inconsistent"),
            (lambda arrays, saved: arrays.update(embeddings=np.full_like(ROWS, np.nan)), "not finite"),
            (lambda arrays, saved: saved[0].__setitem__(0, 5), "invalid content key, 5"),
            (lambda arrays, saved: saved[0].__setitem__(3, [-1, 0, 0]), "invalid position or span"),
            (lambda arrays, saved: saved[0].__setitem__(4, [3, 3]), "invalid position or span"),
            (lambda arrays, saved: saved[0].__setitem__(3, None), "does not fit its content"),
            (lambda arrays, saved: saved.append(3), "inconsistent"),
        ],
    )
    def test_damaged_states_are_refused(self, change: Any, message: str) -> None:
        contents = Contents()
        keys = contents.add(image())
        arrays, saved = contents.save(keys)
        change(arrays, saved)
        with pytest.raises(StateError, match=message):
            Contents.load(arrays, saved, keys)


def attributes(inputs: Inputs) -> list[Any]:
    """All of an input, comparable."""
    arrays = (inputs.ids, inputs.embeddings, inputs.rows, inputs.positions)
    return [None if array is None else array.tolist() for array in arrays] + [inputs.keys, inputs.spans]
