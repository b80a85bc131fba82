"""Texts of notations, with any white space, in texts that go on."""

import pytest

from call_texts import BYTES, allows
from llamacli.chat.call_text import ID, CallText, IncompleteCallError, at_once, expression
from llamacli.chat.rules import Rules


@pytest.mark.parametrize(
    ("notation", "text", "place", "final"),
    [
        ("<a> b", "<a> b", 5, 5),
        ("<a> b", "<a>b c", 4, 4),
        ("a", " \n a", 4, 4),
        ("<a> b", "<a> c", -1, -1),
        ("<a> b", "<b", -1, -1),
        ("<a> b", "<", None, None),
        ("<a> b", "<a> ", None, None),
        ("a", " ", None, -1),
        ("a", "", None, -1),
        ("", "x", 0, 0),
        ("]```", "] ```", 5, 5),
        ("]```", "]``", None, None),
        (f"<{ID}>", "<a.b:c-1>", 9, 9),
        (f"<{ID}>", "<>", 2, 2),
        (f"<{ID}>", "<a", None, None),
        (f"<{ID}>", "<a b", -1, -1),
        (f"<{ID}", "<ab", None, 3),
        (f"<{ID}", "<ab ", 3, 3),
        (f"<{ID}:{ID}>", "<a:b>", -1, -1),
        (f"<{ID}({ID})", "<a(b)", 5, 5),
    ],
)
def test_place_after_a_text(notation: str, text: str, place: int | None, final: int | None) -> None:
    assert CallText(text).fits(notation) == place
    assert CallText(text, final=True).fits(notation) == final
    assert CallText("x" + text, 1).fits(notation) == (place + 1 if place and place > 0 else 1 if place == 0 else place)
    assert CallText("x" + text).fits(notation, 1) == CallText("x" + text, 1).fits(notation)


def test_what_is_there_is_taken() -> None:
    source = CallText("a b", final=True)
    assert at_once(source.take("b")) is False
    assert source.at == 0
    assert at_once(source.take("a")) is True
    assert source.at == 1
    at_once(source.expect("b"))
    assert (source.at, source.next) == (3, "")
    with pytest.raises(IncompleteCallError):
        at_once(source.space())
    with pytest.raises(ValueError, match="'b' is not part"):
        at_once(CallText("b", final=True).expect("a"))


def test_what_comes_is_not_taken() -> None:
    source = CallText(" b")
    assert at_once(source.comes(["a", "b"])) is True
    assert at_once(source.comes(["a"])) is False
    assert at_once(source.comes([])) is False
    waiting = source.comes(["a", "bc"])
    assert next(waiting) is None
    source.final = True
    assert at_once(waiting) is False
    assert source.at == 0


def test_what_must_follow() -> None:
    source = CallText(" a")
    at_once(source.followed(["b", "a"]))
    with pytest.raises(ValueError, match="' a' is not part"):
        at_once(source.followed(["b", ""]))
    waiting = source.followed(["ab"])
    assert next(waiting) is None
    source.final = True
    with pytest.raises(IncompleteCallError):
        next(waiting)
    waiting = CallText("  ").followed(["b"])
    assert next(waiting) is None


def test_ids_in_grammars() -> None:
    rules = Rules(BYTES)
    made = expression(rules, f"<t>{ID}(")
    assert allows(rules, made, "<t>a.B_1:c-2(")
    assert not allows(rules, made, "<t>(")
    assert not allows(rules, made, "<t>" + "a" * 65 + "(")
    assert allows(rules, expression(rules, ID), "a" * 64)
