"""Tools from a Python file: functions that a model may call."""

from __future__ import annotations

import inspect
import json
import runpy
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

from llamacli.chat.messages import ToolCall
from llamacli.cli.output import note
from llamacli.errors import InvalidRequestError

if TYPE_CHECKING:
    from llamacli import ChatSession

Functions = Mapping[str, Callable[..., Any]]

MAX_ROUNDS = 10
"""Replies in a row after tool calls of the one before."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def load_functions(path: str) -> dict[str, Callable[..., Any]]:
    """Run a Python file; returns its public functions by name.

    Raises InvalidRequestError for a file without functions, with an error, or with a parameter whose type has no JSON
    Schema; OSError.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(2, "No such file", path)
    try:
        found = runpy.run_path(path, run_name="llamacli_tools")
    except Exception as error:
        raise InvalidRequestError(f"{path}: {type(error).__name__}: {error}") from error
    functions: dict[str, Callable[..., Any]] = {
        name: value
        for name, value in found.items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == "llamacli_tools"
    }
    if not functions:
        raise InvalidRequestError(f"{path} defines no function: a tool is a function with a docstring and type hints")
    for function in functions.values():
        describe(function)
    return functions


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON description of a function, from its signature and docstring."""
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
        return {"error": f"the arguments are no JSON object: {_short(wanted.partial)}"}
    if function is None:
        return {"error": f"there is no function {wanted.name}; known are {', '.join(functions)}"}
    try:
        result = function(**wanted.arguments)
        json.dumps(result)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return result


def answer_calls(chat: ChatSession, functions: Functions) -> bool:
    """Answer the calls of the last reply; false if there were none."""
    calls = chat.history[-1].tool_calls if functions and chat.history and chat.stop != "interrupt" else ()
    for wanted in calls:
        arguments = ", ".join(f"{name}={value!r}" for name, value in wanted.arguments.items())
        result = call(functions, wanted)
        note(f"({wanted.name}({arguments}) -> {_short(result)})")
        chat.add_tool_result(wanted, result)
    return bool(calls)


def _short(result: Any) -> str:
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
            f"{function.__name__}: the type of {parameter.name} is not one of {known}, Literal, or these with None"
        ) from None


def _type_schema(hint: Any) -> dict[str, Any]:
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
