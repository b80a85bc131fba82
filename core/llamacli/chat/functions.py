"""Python functions as tools that a model may call."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, Union

from llamacli.chat.messages import ToolCall, checked_tools
from llamacli.errors import InvalidRequestError, expect_type

Functions: TypeAlias = Mapping[str, Callable[..., Any]]
Tools: TypeAlias = Iterable[Mapping[str, Any] | Callable[..., Any]]

MAX_ROUNDS = 10
"""Replies in a row after tool calls of the one before."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def described(tools: Tools | None) -> tuple[tuple[Mapping[str, Any], ...] | None, dict[str, Callable[..., Any]]]:
    """Descriptions of tools, and the functions among them by name.

    Raises InvalidRequestError for what is neither a function nor a JSON object that describes one, and for two of one
    name.
    """
    if callable(tools) or isinstance(tools, str | Mapping):
        raise InvalidRequestError("tools is a list: put a single one into a list")
    expect_type(tools, (Iterable, types.NoneType), "tools", "a sequence of tools")
    given = None if tools is None else tuple(tools)
    functions: dict[str, Callable[..., Any]] = {tool.__name__: tool for tool in given or () if inspect.isroutine(tool)}
    found = checked_tools(
        None if given is None else [describe(tool) if inspect.isroutine(tool) else tool for tool in given]
    )
    names = [tool["function"]["name"] for tool in found or ()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if functions and twice is not None:
        raise InvalidRequestError(f"there are two tools {twice!r}")
    return found, functions


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON description of a function, from its signature and docstring.

    A function whose attribute `tool` is a description has that one.
    """
    own = getattr(function, "tool", None)
    if own is not None:
        return dict(own)
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {parameter.name: _schema(function, parameter, hints) for parameter in parameters},
        "required": [parameter.name for parameter in parameters if parameter.default is parameter.empty],
    }
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return {"type": "function", "function": {"name": function.__name__, "description": text, "parameters": schema}}


def call(functions: Functions, wanted: ToolCall) -> Any:
    """Result of a tool call, or its error for the model."""
    function = functions.get(wanted.name)
    if wanted.partial is not None:
        return {"error": f"the arguments are no JSON object: {shortened(wanted.partial)}"}
    if function is None:
        return {"error": f"there is no function {wanted.name}; known are {', '.join(functions)}"}
    try:
        hints = typing.get_type_hints(function)
        result = function(**{name: _argument(value, hints.get(name)) for name, value in wanted.arguments.items()})
        json.dumps(result)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return result


def shortened(result: Any) -> str:
    """A result in at most 80 characters."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _schema(function: Callable[..., Any], parameter: inspect.Parameter, hints: Mapping[str, Any]) -> dict[str, Any]:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise InvalidRequestError(f"{function.__name__}: a tool cannot have the parameter {parameter}")
    if parameter.name not in hints:
        raise InvalidRequestError(f"{function.__name__}: the parameter {parameter.name} needs a type, such as str")
    try:
        return _type_schema(hints[parameter.name])
    except KeyError:
        known = ", ".join(kind.__name__ for kind in _TYPES)
        raise InvalidRequestError(
            f"{function.__name__}: the type of {parameter.name} is not one of {known}, Literal, a Pydantic model, or "
            "these with None"
        ) from None


def _argument(value: Any, hint: Any) -> Any:
    return hint.model_validate(value) if hasattr(hint, "model_validate") else value


def _type_schema(hint: Any) -> dict[str, Any]:
    if hasattr(hint, "model_json_schema"):  # Pydantic's
        return dict(hint.model_json_schema())
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"type": _TYPES[type(args[0])], "enum": list(args)}
    if origin in (Union, types.UnionType):
        (only,) = [arg for arg in args if arg is not type(None)] if len(args) == 2 else [None]
        return _type_schema(only)
    schema: dict[str, Any] = {"type": _TYPES[origin or hint]}
    if schema["type"] == "array" and args:
        schema["items"] = _type_schema(args[0])
    return schema
