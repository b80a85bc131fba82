"""Jobs of rendering, in this process."""

from typing import Any

import pytest

from llamacli.chat import rendering
from llamacli.chat.rendering import MAX_TEXT, characters_of, execute

USER = {"role": "user", "content": "Hi"}
SHOWN = "{{ messages[0].content }}"


def run(source: str, **job: Any) -> dict[str, Any]:
    given = {"special": {}, "given": {}, "alphabet": "", "now": "2026-01-02T03:04:05"}
    limits = {"seconds": 5, "characters": 10**7}
    return execute({"source": source, **limits, **({**given, **job} if "messages" in job else {})})


def test_a_job_without_messages_compiles_only() -> None:
    assert run("{{ 1 // 0 }}") == {}


def test_texts_are_masked_where_they_have_characters_of_special_tokens() -> None:
    messages = [{**USER, "content": "<a>"}]
    answer = run(f"<{SHOWN}{{{{ n }}}}>", messages=messages, alphabet="<>", given={"n": "b>"})
    text, original = answer["text"], answer["original"]
    assert (text[0], text[-1]) == ("<", ">")
    assert not {"<", ">"} & set(text[1:-1])
    assert "".join(original.get(character, character) for character in text) == "<<a>b>>"


def test_placeholders_are_no_characters_of_the_conversation_or_source() -> None:
    messages = [{**USER, "content": "<"}]
    (placeholder,) = run(SHOWN, messages=messages, alphabet="<")["original"]
    for source, given in ((placeholder, {}), ("", {"n": {placeholder: 1}}), ("", {"n": [(placeholder,)]})):
        assert placeholder not in run(source + SHOWN, messages=messages, alphabet="<", given=given)["original"]


def test_characters_of_values() -> None:
    assert characters_of(["ab", {"c": ("d", 5, None)}, 7]) == set("abcd")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("\n{% if %}", ("Expected an expression, got 'end of statement block'", 2, "compiled")),
        ("\n\n{{ 1 // 0 }}", ("ZeroDivisionError: integer division or modulo by zero", 3, "rendered")),
        ("{{ raise_exception('no') }}", ("no", 1, "rendered")),
    ],
)
def test_errors_have_their_line(source: str, error: tuple[str, int, str]) -> None:
    found = run(source, messages=[USER])
    assert (found["error"], found["line"], found["failed"]) == error


def test_reasons_are_cut() -> None:
    assert len(run("{{ raise_exception('x' * 5000) }}", messages=[USER])["error"]) == 2000


def test_text_has_a_limit_beyond_that_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TEXT == 4 << 20
    monkeypatch.setattr(rendering, "MAX_TEXT", 10)
    more = len("rolecontentuser") + len("nkm")  # names of keys and roles count too
    for n, text in ((10, "Hiabc" + "x" * (10 + more)), (11, None)):
        given = {"n": [{"k": "abc"}], "m": n + more}
        assert run(SHOWN + "{{ n[0].k }}{{ 'x' * m }}", messages=[USER], given=given).get("text") == text
