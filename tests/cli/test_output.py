import contextlib
import io
import json
import math
import subprocess
import sys
import unicodedata
from unittest.mock import patch

import click
import click.testing
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.cli.output import (
    human_bytes,
    human_count,
    one_line,
    print_field,
    print_json,
    print_table,
    printable,
    write,
)


def output_of(function, *args) -> str:
    command = click.Command("output", callback=lambda: function(*args))
    result = click.testing.CliRunner().invoke(command, catch_exceptions=False)
    return result.stdout


@given(st.text())
def test_printable_text_is_one_line_without_controls(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1


def test_printable_escapes_only_controls() -> None:
    assert printable("\x1b[2J\r\n\u202e é 日本 \ud800") == r"\x1b[2J\r\n\u202e é 日本 \ud800"


def test_text_is_unchanged_in_a_pipe() -> None:
    assert output_of(write, "a\x1b[31mb\r\x9b") == "a\x1b[31mb\r\x9b"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_by_terminal(text: str, **how: bool) -> str:
    with contextlib.redirect_stdout(Terminal()) as terminal:
        write(text, **how)
    return terminal.getvalue()


@given(st.text())
def test_no_terminal_commands_from_generated_text(text: str) -> None:
    shown = shown_by_terminal(text).replace("\r\n", "")
    assert {c for c in shown if unicodedata.category(c) == "Cc"} <= {"\n", "\t"}


def test_controls_are_escaped_on_a_terminal() -> None:
    assert shown_by_terminal("a\tb\r\nc\nd\x1b]0;e\x07\rf\x9b2Jé日") == "a\tb\r\nc\nd\\x1b]0;e\\x07\\rf\\x9b2Jé日"


def test_dimmed_text_respects_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown_by_terminal("a", dim=True) == "\x1b[2ma\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown_by_terminal("a", dim=True) == "a"


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 << 10, "1.50 MiB"), (5 << 50, "5120.00 TiB")],
)
def test_human_bytes(n: int, shown: str) -> None:
    assert human_bytes(n) == shown


@pytest.mark.parametrize(("n", "shown"), [(999, "999"), (1000, "1.00 K"), (1_235_814_400, "1.24 B")])
def test_human_count(n: int, shown: str) -> None:
    assert human_count(n) == shown


def test_table_alignment() -> None:
    assert output_of(print_table, ("name", "size:"), [("a", "1"), ("long\nname", "100")]) == (
        "name        size\na              1\nlong\\nname   100\n"
    )


def test_json_is_ascii_without_nan_and_infinity() -> None:
    printed = output_of(print_json, {"é": [math.nan, -math.inf, 1.5], "t": (1, "\ud800")})
    assert printed.isascii()
    assert json.loads(printed, parse_constant=pytest.fail) == {"é": ["nan", "-inf", 1.5], "t": [1, "\ud800"]}


def test_middle_of_a_long_error_is_left_out() -> None:
    text = one_line(ValueError("unknown architecture " + 100_000 * "x" + " (installed: llama)"))
    assert len(text) < 2100
    assert text.startswith("unknown architecture xxx")
    assert "(100040 characters)" in text
    assert text.endswith("xxx (installed: llama)")
    assert one_line(ValueError("x" * 2000)) == "x" * 2000


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "target", "reason"),
    [
        ("plugins", "&-", "stdout: Bad file descriptor"),
        pytest.param("--help", "&-", "stdout: Bad file descriptor", marks=pytest.mark.slow),
        pytest.param("--version", "&-", "stdout: Bad file descriptor", marks=pytest.mark.slow),
        pytest.param("run --help", "&-", "stdout: Bad file descriptor", marks=pytest.mark.slow),
        pytest.param("--help", "/dev/full", "No space left on device", marks=pytest.mark.slow),
    ],
)
def test_text_that_cannot_be_written_is_an_error(arguments: str, target: str, reason: str) -> None:
    command = f"{sys.executable} -m llamacli {arguments} >{target}"
    result = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (1, f"llamacli: error: {reason}\n")


def shown_in_24_columns(function, *args) -> str:
    with contextlib.redirect_stdout(Terminal()) as terminal, patch.dict("os.environ", COLUMNS="24"):
        function(*args)
    return terminal.getvalue()


def test_tables_fit_the_terminal() -> None:
    rows = [("a", "1", "one two three"), ("b-and-c", "22", "unbreakable")]
    assert shown_in_24_columns(print_table, ("name", "size:", "what it is"), rows) == (
        "name     size  what it is\na           1  one two\n               three\nb-and-c    22  unbreakable\n"
    )


def test_fields_fit_the_terminal() -> None:
    shown = shown_in_24_columns(print_field, "plugin", "one two three four", 8)
    assert shown == "plugin  one two three\n        four\n"
    assert output_of(print_field, "plugin", "one two three four\n") == "plugin          one two three four\\n\n"
