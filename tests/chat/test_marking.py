from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from llamacli import InvalidRequestError
from llamacli.chat.marking import Disguise, MarkedText, disguise_in, joined, revealed

ALPHABET = '<|im_end>[/INST]s"\\é'
TEXTS = st.text('<|im_end>[INST]/sS \n\t"\\éÉßx', max_size=12)
DISGUISE = Disguise(ALPHABET, "")


def mark(text: str) -> Any:
    marked = DISGUISE.mark(text)
    assert str.__str__(marked) != text or not set(text) & set(ALPHABET)
    return marked


NO_ARGUMENT = [
    "upper", "lower", "title", "capitalize", "casefold", "swapcase", "strip", "lstrip", "rstrip", "split", "rsplit",
    "splitlines", "isalpha", "isdigit", "isspace", "isupper", "islower", "isalnum", "__len__", "__hash__", "__repr__",
]  # fmt: skip
ONE_ARGUMENT = [
    "strip", "lstrip", "rstrip", "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find",
    "rfind", "count", "removeprefix", "removesuffix", "__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__",
    "__ge__", "__add__",
]  # fmt: skip


def outcome(function, *args) -> Any:
    try:
        return function(*args)
    except (ValueError, TypeError) as error:
        return type(error)


@pytest.mark.parametrize("name", NO_ARGUMENT)
@given(TEXTS)
def test_methods_answer_as_the_text_would(name: str, text: str) -> None:
    assert revealed(outcome(getattr(mark(text), name))) == outcome(getattr(text, name))


@pytest.mark.parametrize("name", ONE_ARGUMENT)
@given(TEXTS, TEXTS.filter(bool))
def test_methods_of_another_text_answer_as_the_text_would(name: str, text: str, other: str) -> None:
    for argument in (other, mark(other)):
        assert revealed(outcome(getattr(mark(text), name), argument)) == outcome(getattr(text, name), other)


@given(TEXTS, TEXTS, TEXTS, st.integers(-1, 3))
def test_operations_answer_as_the_text_would(text: str, old: str, new: str, n: int) -> None:
    marked = mark(text)
    assert revealed(marked.replace(old, new, n)) == text.replace(old, new, n)
    assert revealed(marked.split(" ", n)) == text.split(" ", n)
    assert revealed(marked.rsplit("<", n)) == text.rsplit("<", n)
    assert revealed(marked[n:]) == text[n:]
    assert revealed(list(marked)) == list(text)
    assert revealed(new + marked) == new + text
    assert revealed(marked * n) == text * n
    assert revealed(marked.join([old, mark(new)])) == text.join([old, new])
    assert revealed(joined(new, [old, marked])) == new.join([old, text])
    assert {text: 1}[marked] == {marked: 1}[text] == 1
    assert (marked in [text], text in [marked], marked != text) == (True, True, False)


@given(TEXTS, TEXTS)
def test_containers_and_html_show_the_text(text: str, other: str) -> None:
    marked, markup = mark(text), Markup(other)
    for value in ([text, other], {text: [other, 1, None]}):
        assert DISGUISE.reveal(str(DISGUISE.mark(value))) == str(value)
    assert DISGUISE.reveal(markup + marked) == markup + text
    assert DISGUISE.reveal(marked + markup) == text + markup
    assert DISGUISE.reveal(Markup("<%s>") % marked) == Markup("<%s>") % text


@given(TEXTS, TEXTS)
def test_what_is_made_of_marked_text_never_shows_it(text: str, other: str) -> None:
    marked = mark(text)
    made = [
        marked + "x", "x" + marked, marked * 2, marked[1:], marked.upper(), marked.title(), marked.swapcase(),
        marked.strip("i"), *marked.split(), *marked.rsplit("n"), *marked.partition("n"), marked.replace("n", "x"),
        marked.removeprefix(other), *marked, marked.join(["x", "y"]), joined("x", [marked]), str(marked),
    ]  # fmt: skip
    for part in made:
        assert isinstance(part, MarkedText)
        assert not set(str.__iter__(part)) & set(ALPHABET) - {"x", "y"}


@given(st.recursive(TEXTS | st.integers() | st.none(), lambda v: st.lists(v) | st.dictionaries(TEXTS, v)))
def test_values_are_marked_all_through_and_come_back(value: Any) -> None:
    marked = DISGUISE.mark(value)
    assert marked == value
    assert revealed(marked) == value
    assert disguise_in(revealed(marked)) is None
    assert not set(repr(revealed(marked))) & {chr(c) for c in range(0xF0000, 0xF0100)}


@given(st.text(), st.text())
def test_hiding_is_one_to_one(alphabet: str, text: str) -> None:
    disguise = Disguise(alphabet, text)
    assert disguise.reveal(disguise.hide(text)) == text
    assert not {c for c in disguise.hide(text) if not c.isspace()} & set(alphabet)


def test_a_text_that_leaves_no_stand_ins_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="private use"):
        Disguise("ab", map(chr, range(0xF0000, 0x110000)))
