"""Conversations and templates that rendering is compared over, by tests and by the script that records goldens."""

from datetime import datetime
from typing import Any

NOW = datetime(2025, 3, 9, 14, 5)
"""What templates are told the time is."""

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


def _answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


_SYSTEM = {"role": "system", "content": "Be brief. Answer in  français.\n"}
_CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich <&>", "unit": "celsius", "days": [1, 2]}},
}
_RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdef123", "content": '{"sky": "clear"}'}
_TALK = [_user("  Hello there, 日本! "), _answer(" Hi.\n\nWhat is it?"), _user('2 < 3 & "x"?')]
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
    "tools": {"messages": [_SYSTEM, *_TALK], "tools": TOOLS, "add_generation_prompt": True},
    "tools, no system": {"messages": _TALK[:1], "tools": TOOLS[:1], "add_generation_prompt": True},
    "call": {"messages": [_TALK[0], _answer("", tool_calls=[_CALL])], "tools": TOOLS},
    "call and result": {
        "messages": [_TALK[0], _answer("", tool_calls=[_CALL]), _RESULT],
        "tools": TOOLS,
        "add_generation_prompt": True,
    },
    "call, result, answer": {
        "messages": [_TALK[0], _answer("", tool_calls=[_CALL]), _RESULT, _answer("Clear."), _user("And now?")],
        "tools": TOOLS,
        "add_generation_prompt": True,
    },
    "call after a thought": {
        "messages": [
            _TALK[0],
            _answer(None, tool_calls=[_CALL], thinking="I need the weather."),  # type: ignore[arg-type]
            _RESULT,
        ],
        "tools": TOOLS,
        "add_generation_prompt": True,
    },
}
"""Arguments of a rendering by the name of what it shows."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template that most tests of conversations use."""

SYNTHETIC: dict[str, str] = {
    "loop controls": """
{%- for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ loop.index }} {{ m.role }}: {{ m.content }}
{% endfor %}
""",
    "generation tags": """{% for m in messages %}{% set x = 1 %}{% if m.role == 'assistant' %}
{% generation %}{% set x = 2 %}{{ m.content ~ x }}{{ eos_token }}{% endgeneration %}
{% endif %}{{ x }}{% endfor %}""",
    "json": """{{ messages | tojson }}
{{ messages | tojson(indent=2) }}
{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}
{{ messages[0].content | tojson(ensure_ascii=true) }}""",
    "text": """{% for m in messages %}
{%- set c = m.content | default('', true) %}
{{ c | trim }}|{{ c | upper }}|{{ c | lower }}|{{ c | title }}|{{ c | capitalize }}|{{ c | length }}
{{ c.split(' ') | join('-') }}|{{ c.strip('H ') }}|{{ c[1:5] }}|{{ c[::-1] }}|{{ c | replace('l', 'L') }}
{{ c.startswith('  H') }}|{{ 'there' in c }}|{{ c.find('e') }}|{{ c.rsplit('e', 1)[-1] }}|{{ '%s!' % c }}
{{ c | first }}|{{ c | last }}|{{ c | list | length }}|{{ c == messages[0].content }}|{{ (c ~ 'x')[-2:] }}
{{ c | indent(4) }}|{{ c | wordcount }}|{{ c is string }}|{{ c is mapping }}|{{ c is none }}|{{ c.title() }}
{% endfor %}""",
    "values": """{{ messages }}{{ messages[0] }}{{ tools }}{{ messages | map(attribute='content') | list }}
{% for m in messages %}{{ 'a<b>' | safe + m.content | default('', true) }}{{ m.content ~ '<' }}{{ (m.content,) }}
{{- m.content | e }}{{ m.content | safe }}{{ m.content | forceescape }}{{ m.content | default('') | tojson | safe }}
{% endfor %}{{ messages[0].content + '<i>' | safe }}{{ '<b>%s' | safe % messages[0].content }}""",
    "state": """{% set ns = namespace(n=0, seen=[]) %}{% macro item(m, i=0) %}[{{ i }}:{{ m.role }}]{% endmacro %}
{% for m in messages if m.role != 'tool' %}{% set ns.n = ns.n + 1 %}{{ item(m, i=ns.n) }}{% endfor %}
{% set block %}{{ messages[0].content }} {{ strftime_now('%d %b %Y %H:%M') }}{% endset %}
{{ block | trim }} {{ dict(a=1)['a'] }} {{ messages | map(attribute='role') | unique | join(', ') }}
{{ tools | map(attribute='function.name') | sort | join('/') if tools else 'no tools' }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ bos_token }} {{ undefined_name }}
{% for k, v in messages[0] | dictsort %}{{ k }}={{ v }};{% endfor %}
{% for k, v in messages[0].items() %}{{ k }}{% endfor %}
""",
    "white space": """
  {% if true %}
    kept
  {% endif %}
  {#- a comment -#}
\t{%- for m in messages -%}
   {{ m.role }}
{% endfor %}

end
""",
}
"""Templates of our own that use what real ones use."""
