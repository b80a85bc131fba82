"""Tools from a Python file: functions that a model may call."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamacli.chat.functions import describe, shortened
from llamacli.cli.output import note
from llamacli.errors import InvalidRequestError

if TYPE_CHECKING:
    from llamacli import ChatSession, ToolCall


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


def answer_calls(chat: ChatSession) -> bool:
    """Answer the calls of the last reply, with notes.

    False if there were none.
    """
    return chat.stop != "interrupt" and chat.answer_calls(_note_call)


def _note_call(wanted: ToolCall, result: Any) -> None:
    arguments = ", ".join(f"{name}={value!r}" for name, value in wanted.arguments.items())
    note(f"({wanted.name}({arguments}) -> {shortened(result)})")
