from hypothesis import given
from hypothesis import strategies as st

from llamacli.chat.context import Evaluated, extended, plan, truncated

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


def test_generated_tokens_extend_the_text_before_them() -> None:
    held = [Evaluated(1, (1,)), Evaluated("a", (9,))]
    grown = extended(held, [("", 7), ("b", 8), (2, 2), ("c", 5)])
    assert grown == [Evaluated(1, (1,)), Evaluated("ab", (9, 7, 8)), Evaluated(2, (2,)), Evaluated("c", (5,))]
    assert extended([Evaluated(None, (1,))], [("b", 7)]) == [Evaluated(None, (1, 7))]
    assert extended([], []) == []
    planned = plan(grown, [1, "ab", 2, "cd", 3], encode)
    assert (planned.n_kept, planned.new_ids) == (6, [ord("d"), 3])


def test_tokens_without_text_at_the_end_of_a_run_are_not_of_it() -> None:
    held = [Evaluated(1, (1,)), Evaluated("a", (9,))]
    assert extended(held, [("", 7)]) == [*held, Evaluated(None, (7,))]
    assert extended(held, [("b", 7), ("", 8)])[1:] == [Evaluated("ab", (9, 7)), Evaluated(None, (8,))]
    assert extended(held[:1], [("", 7), (2, 2)]) == [held[0], Evaluated(None, (7,)), Evaluated(2, (2,))]
    assert plan(extended(held, [("", 7)]), [1, "a"], encode).ids == [1, 9]
