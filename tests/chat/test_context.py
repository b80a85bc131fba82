import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.chat.context import Evaluated, extended, plan, truncated
from llamacli.generation.text import Token

PARTS = st.lists(st.tuples(st.integers(0, 3), st.text("ab", max_size=3)), max_size=3).map(
    lambda pairs: [part for pair in pairs for part in pair if part != ""]
)


def encode(run: str, continues: bool) -> list[int]:
    return [ord(letter) for letter in run]


@given(PARTS, PARTS, st.integers(0, 20))
def test_plan_gives_the_tokens_of_the_rendering(before, after, n: int) -> None:
    held = truncated(plan([], before, encode).parts, n)
    planned = plan(held, after, encode)
    assert planned.ids == [
        token for part in after for token in ([part] if isinstance(part, int) else encode(part, True))
    ]
    there = [token for part in held for token in part.ids]
    assert planned.ids[: planned.n_kept] == there[: planned.n_kept]
    if planned.n_kept < min(len(there), len(planned.ids)):
        assert planned.ids[planned.n_kept] != there[planned.n_kept]


def grow(held: list[Evaluated], *tokens: Token) -> list[Evaluated]:
    return extended(held, tokens, {2})


def test_generated_tokens_extend_the_text_before_them() -> None:
    held = [Evaluated(1, (1,)), Evaluated("a", (9,))]
    grown = grow(held, Token(7, ""), Token(8, "b"), Token(2, ""), Token(5, "c"))
    assert grown == [Evaluated(1, (1,)), Evaluated("ab", (9, 7, 8)), Evaluated(2, (2,)), Evaluated("c", (5,))]
    assert grow([Evaluated(None, (1,))], Token(7, "b")) == [Evaluated(None, (1, 7))]
    assert grow([]) == []
    planned = plan(grown, [1, "ab", 2, "cd", 3], encode)
    assert (planned.n_kept, planned.new_ids) == (6, [ord("d"), 3])


@pytest.mark.parametrize("last", [Token(8, ""), Token(8, "", complete=False), Token(8, "c", complete=False)])
def test_tokens_without_whole_text_at_the_end_of_a_run_are_not_of_it(last: Token) -> None:
    held = [Evaluated(1, (1,)), Evaluated("a", (9,))]
    assert grow(held, last) == [*held, Evaluated(None, (8,))]
    assert grow(held, Token(7, "b"), last)[1:] == [Evaluated("ab", (9, 7)), Evaluated(None, (8,))]
    assert grow(held[:1], last, Token(2, "")) == [held[0], Evaluated(None, (8,)), Evaluated(2, (2,))]
    assert plan(grow(held, last), [1, "a"], encode).ids == [1, 9]
