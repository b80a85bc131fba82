from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from llamacli import InvalidRequestError
from llamacli.chat.taint import CharacterMask, TaintedStr, mask_of, tainted_join, untainted

ALPHABET = '<|im_end>[/INST]s"\\é'
TEXTS = st.text('<|im_end>[INST]/sS \n\t"\\éÉßx', max_size=12)
MASK = CharacterMask(ALPHABET, "")


def taint(text: str) -> Any:
    tainted = MASK.taint(text)
    assert str.__str__(tainted) != text or not set(text) & set(ALPHABET)
    return tainted


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
def test_methods_equal_those_of_str(name: str, text: str) -> None:
    assert untainted(outcome(getattr(taint(text), name))) == outcome(getattr(text, name))


@pytest.mark.parametrize("name", ONE_ARGUMENT)
@given(TEXTS, TEXTS.filter(bool))
def test_methods_with_text_arguments_equal_those_of_str(name: str, text: str, other: str) -> None:
    for argument in (other, taint(other)):
        assert untainted(outcome(getattr(taint(text), name), argument)) == outcome(getattr(text, name), other)


@given(TEXTS, TEXTS, TEXTS, st.integers(-1, 3))
def test_operations_equal_those_of_str(text: str, old: str, new: str, n: int) -> None:
    tainted = taint(text)
    assert untainted(tainted.replace(old, new, n)) == text.replace(old, new, n)
    assert untainted(tainted.split(" ", n)) == text.split(" ", n)
    assert untainted(tainted.rsplit("<", n)) == text.rsplit("<", n)
    assert untainted(tainted[n:]) == text[n:]
    assert untainted(list(tainted)) == list(text)
    assert untainted(new + tainted) == new + text
    assert untainted(tainted * n) == text * n
    assert untainted(tainted.join([old, taint(new)])) == text.join([old, new])
    assert untainted(tainted_join(new, [old, tainted])) == new.join([old, text])
    assert {text: 1}[tainted] == {tainted: 1}[text] == 1
    assert (tainted in [text], text in [tainted], tainted != text) == (True, True, False)


@given(TEXTS, TEXTS)
def test_containers_and_html_contain_the_text(text: str, other: str) -> None:
    tainted, markup = taint(text), Markup(other)
    for value in ([text, other], {text: [other, 1, None]}):
        assert MASK.unmask(str(MASK.taint(value))) == str(value)
    assert MASK.unmask(markup + tainted) == markup + text
    assert MASK.unmask(tainted + markup) == text + markup
    assert MASK.unmask(Markup("<%s>") % tainted) == Markup("<%s>") % text


@given(TEXTS, TEXTS)
def test_results_of_tainted_text_are_tainted(text: str, other: str) -> None:
    tainted = taint(text)
    made = [
        tainted + "x", "x" + tainted, tainted * 2, tainted[1:], tainted.upper(), tainted.title(), tainted.swapcase(),
        tainted.strip("i"), *tainted.split(), *tainted.rsplit("n"), *tainted.partition("n"), tainted.replace("n", "x"),
        tainted.removeprefix(other), *tainted, tainted.join(["x", "y"]), tainted_join("x", [tainted]), str(tainted),
    ]  # fmt: skip
    for part in made:
        assert isinstance(part, TaintedStr)
        assert not set(str.__iter__(part)) & set(ALPHABET) - {"x", "y"}


@given(st.recursive(TEXTS | st.integers() | st.none(), lambda v: st.lists(v) | st.dictionaries(TEXTS, v)))
def test_json_values_are_tainted_throughout_and_restored(value: Any) -> None:
    tainted = MASK.taint(value)
    assert tainted == value
    assert untainted(tainted) == value
    assert mask_of(untainted(tainted)) is None
    assert not set(repr(untainted(tainted))) & {chr(c) for c in range(0xF0000, 0xF0100)}


@given(st.text(), st.text())
def test_masking_is_one_to_one(alphabet: str, text: str) -> None:
    mask = CharacterMask(alphabet, text)
    assert mask.unmask(mask.mask(text)) == text
    assert not {c for c in mask.mask(text) if not c.isspace()} & set(alphabet)


def test_exhausted_private_use_characters_raise() -> None:
    with pytest.raises(InvalidRequestError, match="private use"):
        CharacterMask("ab", map(chr, range(0xF0000, 0x110000)))
