import json
import math

import click
import click.testing
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.cli.output import human_bytes, human_count, print_json, print_table, printable, write


def output_of(function, *args) -> str:
    command = click.Command("output", callback=lambda: function(*args))
    result = click.testing.CliRunner().invoke(command, catch_exceptions=False)
    return result.stdout


@given(st.text())
def test_printable_text_is_one_harmless_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1


def test_printable_escapes_what_commands_a_terminal_and_nothing_else() -> None:
    assert printable("\x1b[2J\r\n\u202e é 日本 \ud800") == r"\x1b[2J\r\n\u202e é 日本 \ud800"


def test_text_is_written_as_it_is() -> None:
    assert output_of(write, "a\x1b[31mb") == "a\x1b[31mb"


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 << 10, "1.50 MiB"), (5 << 50, "5120.00 TiB")],
)
def test_human_bytes(n: int, shown: str) -> None:
    assert human_bytes(n) == shown


@pytest.mark.parametrize(("n", "shown"), [(999, "999"), (1000, "1.00 K"), (1_235_814_400, "1.24 B")])
def test_human_count(n: int, shown: str) -> None:
    assert human_count(n) == shown


def test_tables_align_text_left_and_numbers_right() -> None:
    assert output_of(print_table, ("name", "size:"), [("a", "1"), ("long\nname", "100")]) == (
        "name        size\na              1\nlong\\nname   100\n"
    )


def test_json_is_ascii_and_has_no_numbers_that_json_lacks() -> None:
    printed = output_of(print_json, {"é": [math.nan, -math.inf, 1.5], "t": (1, "\ud800")})
    assert printed.isascii()
    assert json.loads(printed, parse_constant=pytest.fail) == {"é": ["nan", "-inf", 1.5], "t": [1, "\ud800"]}
