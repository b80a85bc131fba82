import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from llamacli import load_tokenizer
from suite import examples


def test_line_per_token(invoke, model: Path) -> None:
    tokenizer = load_tokenizer(model)
    once = tokenizer.token_id("\u2581once")
    assert invoke("tokenize", model, "once").stdout == f"     1 -> '<s>'\n{once:>6} -> ' once'\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"add_special": True}),
        (("--no-bos",), {"add_special": False}),
        (("--no-special",), {"add_special": False}),
        (("--parse-special",), {"parse_special": True}),
    ],
)
def test_ids(flags: tuple[str, ...], expected: dict[str, bool], invoke, model: Path) -> None:
    text = "a dog</s>"
    ids = load_tokenizer(model).encode(text, **expected)
    assert invoke("tokenize", model, text, "--ids", *flags).stdout == f"{ids}\n"


def test_json(invoke, model: Path) -> None:
    tokens = json.loads(invoke("tokenize", model, "--json", "Once é").stdout)
    assert [token["id"] for token in tokens] == load_tokenizer(model).encode("Once é")
    assert tokens[0] == {"id": 1, "piece": "<s>"}


def test_stdin_keeps_final_newline(invoke, model: Path) -> None:
    assert invoke("tokenize", model, "--ids", input="a\n").stdout == f"{load_tokenizer(model).encode('a' + chr(10))}\n"


@given(text=st.text())
@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_token_is_one_printable_line(text: str, invoke, model: Path) -> None:
    lines = invoke("tokenize", model, input=text.encode()).stdout.split("\n")
    assert len(lines) - 1 == len(load_tokenizer(model).encode(text))
    assert "".join(lines).isprintable()


def test_backslashes_and_newlines_are_escaped(invoke, model: Path) -> None:
    shown = invoke("tokenize", model, "--no-bos", "\\\n").stdout
    assert r"'\\'" in shown
    assert r"'\n'" in shown


def test_bytes_of_a_character_are_hexadecimal(invoke, model: Path) -> None:
    shown = invoke("tokenize", model, "--no-bos", "😀").stdout.splitlines()
    assert [line.partition(" -> ")[2] for line in shown][-4:] == ["'<0xF0>'", "'<0x9F>'", "'<0x98>'", "'<0x80>'"]


def test_vocabulary_only_file(invoke, shared) -> None:
    vocabulary = shared("vocab/ggml-vocab-llama-spm.gguf")
    assert invoke("tokenize", vocabulary, "Hello world", "--ids").stdout == "[1, 15043, 3186]\n"


def test_error_for_invalid_utf8(invoke, model: Path) -> None:
    result = invoke("tokenize", model, input=b"ab\xff")
    assert (result.exit_code, result.stderr) == (
        1,
        "llamacli: error: stdin is not UTF-8: invalid start byte at byte 2\n",
    )


def test_ids_and_json_exclude_each_other(invoke, model: Path) -> None:
    assert invoke("tokenize", model, "--ids", "--json", "a").exit_code == 2
