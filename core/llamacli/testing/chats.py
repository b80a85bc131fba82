"""Conversations to render with chat templates: system prompts, tools, calls, reasoning."""

from datetime import datetime
from typing import Any

NOW = datetime(2025, 3, 9, 14, 5)
"""Time that templates are given."""

BOS, EOS = "<s>", "</s>"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Say what the weather is like <now> & later.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": 'Where, as in "Zürich".'},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Of degrees."},
                    "days": {"type": "array", "items": {"type": "integer"}, "description": "Which days."},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "roll",
            "description": "Roll dice.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer", "description": "How many."}}},
        },
    },
]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


_SYSTEM = {"role": "system", "content": "Be brief. Answer in  français.\n"}
_CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich <&>", "unit": "celsius", "days": [1, 2]}},
}
_RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdef123", "content": '{"sky": "clear"}'}
_TALK = [_user("  Hello there, 日本! "), _answer(" Hi.\n\nWhat is it?"), _user('2 < 3 & "x"?')]
_CALLED = [_TALK[0], _answer("", tool_calls=[_CALL])]
_CALL_AFTER_THOUGHT = _answer(None, tool_calls=[_CALL], thinking="I need the weather.")
_WITH_TOOLS = {"tools": TOOLS, "add_generation_prompt": True}
_THOUGHT = _answer("Hi.", reasoning_content="The user greets.\nSo do I.")

CASES: dict[str, dict[str, Any]] = {
    "single turn": {"messages": _TALK[:1]},
    "generation prompt": {"messages": _TALK[:1], "add_generation_prompt": True},
    "multi turn": {"messages": _TALK, "add_generation_prompt": True},
    "ended": {"messages": [*_TALK, _answer("Yes.")]},
    "system": {"messages": [_SYSTEM, *_TALK], "add_generation_prompt": True},
    "system alone with one turn": {"messages": [_SYSTEM, _TALK[0]]},
    "thinking on": {"messages": _TALK, "add_generation_prompt": True, "enable_thinking": True},
    "thinking off": {"messages": _TALK, "add_generation_prompt": True, "enable_thinking": False},
    "effort": {"messages": _TALK, "add_generation_prompt": True, "reasoning_effort": "high"},
    "thoughts of an earlier turn": {"messages": [_TALK[0], _THOUGHT, _user("On?")], "add_generation_prompt": True},
    "thoughts of the last turn": {"messages": [_TALK[0], _THOUGHT]},
    "tools": {"messages": [_SYSTEM, *_TALK], **_WITH_TOOLS},
    "tools, no system": {"messages": _TALK[:1], "tools": TOOLS[:1], "add_generation_prompt": True},
    "call": {"messages": _CALLED, "tools": TOOLS},
    "call and result": {"messages": [*_CALLED, _RESULT], **_WITH_TOOLS},
    "call, result, answer": {"messages": [*_CALLED, _RESULT, _answer("Clear."), _user("And now?")], **_WITH_TOOLS},
    "call after a thought": {"messages": [_TALK[0], _CALL_AFTER_THOUGHT, _RESULT], **_WITH_TOOLS},
}
"""Arguments of `ChatTemplate.render`, by the name of the case."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML template."""
