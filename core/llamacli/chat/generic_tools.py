"""Generic notation of tools, for chat templates that render none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from llamacli.chat.syntax import HERMES, Spans

_HEAD = """\
You can call functions. Each of these lines describes one in JSON:
{tools}
To call a function, write a JSON object with its name and arguments between two markers, and end your message there:
{opens}
{{"name": "...", "arguments": {{...}}}}
{closes}
Results of calls come in the next message. Answer without a call where none is needed."""

CALLS = HERMES.calls
"""Calls as JSON in `<tool_call>`."""


def with_calls(syntax: Spans) -> Spans:
    """Syntax with the generic notation of calls."""
    return attrs.evolve(syntax, calls=CALLS)


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Conversation in which the system message describes the tools.

    Calls are text of the assistant's messages, and results are messages of the user.
    """
    assert CALLS is not None
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    head = _HEAD.format(tools=functions, opens=CALLS.opens, closes=CALLS.closes)
    result: list[dict[str, Any]] = []
    for message in messages:
        own, content = dict(message), message.get("content") or ""
        calls = own.pop("tool_calls", None) or ()
        texts = [f"{CALLS.opens}\n{_call(call['function'])}\n{CALLS.closes}" for call in calls]
        if own["role"] in ("system", "developer") and not result:
            texts, head = [head], ""
        elif own["role"] == "tool":
            own = {"role": "user"}
            content = f"Result of {message['name']}: {content}" if message.get("name") else f"Result: {content}"
            if result and result[-1]["role"] == "user":
                content = f"{result.pop()['content']}\n{content}"
        elif own["role"] == "user" and result and result[-1].get("role") == "user":
            content = f"{result.pop()['content']}\n\n{content}"
        result.append({**own, "content": "\n\n".join(text for text in (content, *texts) if text)})
    return result if not head else [{"role": "system", "content": head}, *result]


def _call(function: Mapping[str, Any]) -> str:
    return _json({"name": function["name"], "arguments": function.get("arguments") or {}})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
