from pathlib import Path
from typing import Literal, Optional

import pytest

from llamacli import InvalidRequestError
from llamacli.chat.messages import ToolCall
from llamacli.cli.functions import call, describe, load_functions


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> str:
    """Forecast for a city,
    in one line.

    More that is not shown.
    """
    return f"{city} {days} {unit} {tags}"


def test_description_from_signature_and_docstring() -> None:
    assert describe(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast for a city, in one line.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }


def test_types_without_a_schema_are_errors() -> None:
    def untyped(a) -> str: ...
    def foreign(a: Path) -> str: ...
    def many(*a: str) -> str: ...
    def optional(a: Optional[float]) -> str: ...  # noqa: UP045 - the older spelling works too

    with pytest.raises(InvalidRequestError, match="untyped: the parameter a needs a type, such as str"):
        describe(untyped)
    with pytest.raises(InvalidRequestError, match="foreign: the type of a is not one of str, int, float, bool"):
        describe(foreign)
    with pytest.raises(InvalidRequestError, match="many: a tool cannot have the parameter"):
        describe(many)
    assert describe(optional)["function"]["parameters"]["properties"] == {"a": {"type": "number"}}


def test_calls_return_results_or_errors() -> None:
    functions = {"weather": weather, "bad": lambda: object()}
    assert call(functions, ToolCall("weather", {"city": "Bonn", "days": 2})) == "Bonn 2 C None"
    assert "TypeError" in call(functions, ToolCall("weather", {"town": "Bonn"}))["error"]
    assert "not JSON serializable" in call(functions, ToolCall("bad", {}))["error"]
    assert call(functions, ToolCall("time", {})) == {"error": "there is no function time; known are weather, bad"}


def test_public_functions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("from os.path import join\ndef a(x: int): return x + 1\ndef _b(): ...\n")
    functions = load_functions(str(path))
    assert list(functions) == ["a"]
    assert call(functions, ToolCall("a", {"x": 1})) == 2


@pytest.mark.parametrize(
    ("source", "said"),
    [("x = 1", "defines no function"), ("1/0", "ZeroDivisionError"), ("def a(x): ...", "needs a type")],
)
def test_files_without_tools_are_errors(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(source)
    with pytest.raises(InvalidRequestError, match=said):
        load_functions(str(tmp_path / "tools.py"))
    with pytest.raises(FileNotFoundError):
        load_functions(str(tmp_path / "nowhere.py"))
