"""Requests and results of OpenAI's API, as library and server share them."""

import pickle
from typing import Any

import pytest

from llamacli.chat.constraints import ToolUse
from llamacli.chat.messages import ToolCall
from llamacli.chat.openai import FieldError, choice, message, schema_of, text_of_parts, tool_use, usage
from llamacli.serve.http.errors import as_serve_error

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
ANY = {"type": "object"}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, ToolUse(TOOLS)),
        ("auto", ToolUse(TOOLS)),
        ("none", None),
        ("required", ToolUse(TOOLS, required=True)),
        ({"type": "function", "function": {"name": "b"}}, ToolUse(TOOLS[1:], required=True, parallel=False)),
    ],
)
def test_tool_choice(wanted: Any, expected: ToolUse | None) -> None:
    assert tool_use(TOOLS, wanted) == expected
    assert tool_use([], None) is None


def test_calls_in_parallel_can_be_turned_off() -> None:
    assert tool_use(TOOLS, "auto", parallel=False) == ToolUse(TOOLS, parallel=False)


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        (None, None),
        ({"type": "text", "schema": ANY}, None),
        ({"type": "json_object"}, ANY),
        ({"type": "json_object", "schema": None}, ANY),
        ({"type": "json_object", "schema": {"enum": [1]}}, {"enum": [1]}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": True}}, True),
    ],
)
def test_schemas_of_response_formats(given: Any, schema: Any) -> None:
    assert schema_of(given) == schema


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({}, "response_format.type", None),
        ({"type": "xml"}, "response_format.type", None),
        ({"type": "json_schema"}, "response_format.json_schema", "missing_required_parameter"),
        ({"type": "json_schema", "json_schema": "x"}, "response_format.json_schema", "missing_required_parameter"),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema",
            "missing_required_parameter",
        ),
        ({"type": "json_object", "schema": [1]}, "response_format", "invalid_schema"),
    ],
)
def test_errors_name_the_field(given: Any, param: str, code: str | None) -> None:
    with pytest.raises(FieldError) as error:
        schema_of(given)
    again = pickle.loads(pickle.dumps(error.value))
    assert (error.value.param, error.value.code) == (again.param, again.code) == (param, code)
    served = as_serve_error(error.value, "")
    assert (served.status, served.param, served.code) == (400, param, code or "invalid_value")


def test_texts_of_parts() -> None:
    assert text_of_parts([("text", "a"), ("text", "b")], "content") == "a\nb"
    with pytest.raises(FieldError, match=r"content\[1\]: parts of type 'image' are not supported, only text"):
        text_of_parts([("text", "a"), ("image", None)], "content")


def test_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert message("", "", []) == {"role": "assistant", "content": ""}
    assert message("", "why", [("1", ToolCall("f", {"x": "é"}))], refusal=None) == {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": "why", "tool_calls": [call],
    }  # fmt: skip
    assert message("a", "", [("1", ToolCall("f", {}))])["content"] == "a"


def test_choices_and_usage() -> None:
    assert choice(2, "text", "a", finish="stop") == {
        "index": 2, "text": "a", "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    assert usage(3, 4) == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
