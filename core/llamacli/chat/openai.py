"""OpenAI's requests and results, for library and server: choices, messages, tools, formats.

Requests are dictionaries of JSON. Errors name the field as OpenAI's API does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llamacli.chat.constraints import ToolUse
from llamacli.chat.messages import ToolCall
from llamacli.errors import InvalidRequestError

Json = dict[str, Any]

FORMATS = ("text", "json_object", "json_schema")
"""Types of a `response_format`."""


class FieldError(InvalidRequestError):
    """Invalid field of a request, with OpenAI's `param` and `code`."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        self.param, self.code = param, code
        super().__init__(message)


# --- requests


def tool_use(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, *, parallel: bool = True
) -> ToolUse | None:
    """Tools that a reply may or must call. Raises FieldError."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            raise FieldError(f"tool_choice: there is no tool {name!r}", "tool_choice")
        return ToolUse(named, required=True, parallel=False)
    if choice not in (None, "none", "auto", "required"):
        allowed = "it must be none, auto, required or a function's name in an object"
        raise FieldError(f"tool_choice is {choice!r}; {allowed}", "tool_choice")
    if choice == "required" and not tools:
        raise FieldError("tool_choice: required needs tools", "tool_choice")
    return ToolUse(tools, choice == "required", parallel) if tools and choice != "none" else None


def schema_of(response_format: Any) -> Json | bool | None:
    """JSON Schema of a `response_format`, which may be a Pydantic model.

    Raises FieldError.
    """
    if hasattr(response_format, "model_json_schema"):
        return checked_schema(response_format.model_json_schema())
    if response_format is not None and not isinstance(response_format, Mapping):
        raise FieldError(
            f"response_format must be an object or a Pydantic model, not {response_format!r}", "response_format"
        )
    kind = "text" if response_format is None else response_format.get("type")
    if kind not in FORMATS:
        allowed = "it must be text, json_object or json_schema"
        raise FieldError(f"response_format.type is {kind!r}; {allowed}", "response_format.type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        given = response_format.get("schema")
        return checked_schema({"type": "object"} if given is None else given)
    inner, path = response_format.get("json_schema"), "response_format.json_schema"
    if inner is None and (given := response_format.get("schema")) is not None:
        return checked_schema(given)
    if isinstance(inner, Mapping) and "schema" in inner:
        return checked_schema(inner["schema"])
    path = f"{path}.schema" if isinstance(inner, Mapping) else path
    raise FieldError(f"{path}: it is required", path, "missing_required_parameter")


def checked_schema(schema: Any, param: str = "response_format") -> Json | bool | None:
    """A JSON Schema, or None for none. Raises FieldError."""
    if schema is not None and not isinstance(schema, dict | bool):
        raise FieldError("a JSON Schema must be an object or a boolean", param, "invalid_schema")
    return schema


def text_of_parts(parts: Iterable[tuple[str, str | None]], path: str) -> str:
    """Text of a content from types and texts of its parts.

    Raises FieldError for a part without text.
    """
    return "\n".join(text_of_part(kind, text, f"{path}[{i}]") for i, (kind, text) in enumerate(parts))


def text_of_part(kind: str, text: str | None, path: str) -> str:
    """Text of a part. Raises FieldError for one without."""
    if text is None and kind == "text":
        raise FieldError(f"{path}.text: it is required", f"{path}.text", "missing_required_parameter")
    if text is None:
        reason = f"parts of type {kind!r} are not supported, only text"
        raise FieldError(f"{path}: {reason}", f"{path}.type", "unsupported_content")
    return text


# --- results


def choice(index: int, key: str, value: Any, logprobs: Any = None, finish: str | None = None) -> Json:
    """Choice of a result or chunk; `key` is `message`, `delta` or `text`."""
    return {"index": index, key: value, "logprobs": logprobs, "finish_reason": finish}


def message(text: str, reasoning: str, calls: Sequence[tuple[str, ToolCall]], **more: Any) -> Json:
    """Message of a reply; calls come with their ids."""
    result = {"role": "assistant", "content": None if calls and not text else text, **more}
    if reasoning:
        result["reasoning_content"] = reasoning
    if calls:
        result["tool_calls"] = [tool_call(identifier, call) for identifier, call in calls]
    return result


def tool_call(identifier: str, call: ToolCall) -> Json:
    """Tool call of a message."""
    return {"id": identifier, "type": "function", "function": {"name": call.name, "arguments": call.text}}


def call_deltas(identifier: str, index: int, name: str, text: str, *, begins: bool) -> Iterator[Json]:
    """Deltas of a message for text of a call's arguments."""
    if begins:
        begun = {"index": index, **tool_call(identifier, ToolCall(name, partial=""))}
        yield {"tool_calls": [begun]}
    if text:
        yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def usage(n_prompt: int, n_generated: int) -> Json:
    """Numbers of tokens."""
    total = n_prompt + n_generated
    return {"prompt_tokens": n_prompt, "completion_tokens": n_generated, "total_tokens": total}
