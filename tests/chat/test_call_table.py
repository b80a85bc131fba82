"""Calls of templates: rendered, read back, and allowed by grammars.

Small templates are here; real ones are read from `../shared/templates` and from llama.cpp's sources, `LLAMA_CPP`, where
present: all are tabulated by `python -m oracle.call_table`.
"""

import os
from pathlib import Path

import pytest

from llamacli.plugins import Plugins
from oracle.call_table import CALLS, Row, row, templates
from oracle.chat_replies import codec_of

SOURCES = os.environ.get("LLAMA_CPP")
EACH = "{%- for c in m.tool_calls -%}{%- set f = c.function -%}ONE{%- endfor -%}"
TURNS = """\
{{- tools | tojson if tools -}}
{%- for m in messages -%}
    {{- '<s>' + m.role + ':' -}}
    {%- if m.reasoning_content -%}{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif -%}
    {{- m.content or '' -}}
    CALLS
    {{- '</s>' -}}
{%- endfor -%}
{{- '<s>assistant:' if add_generation_prompt -}}
"""
HEADERS = """\
{{- tools | tojson if tools -}}
{%- for m in messages -%}
    {%- if m.role != 'assistant' -%}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|eot|>' -}}
    {%- else -%}
        {%- if m.reasoning_content -%}
            {{- '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' -}}
        {%- endif -%}
        {%- for c in m.tool_calls -%}
            {{- '<|start|>assistant to=' + c.function.name + '<|message|>BODY' -}}
            {{- '<|eot|>' if loop.last else '<|eom|>' -}}
        {%- endfor -%}
        {{- '<|start|>assistant to=user<|message|>' + m.content + '<|eot|>' if not m.tool_calls -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' if add_generation_prompt -}}
"""
RECIPIENTS = """\
{{- tools | tojson if tools -}}
{%- for m in messages -%}
    {{- '<s>' + m.role + ':' -}}
    {%- if m.role == 'assistant' -%}
        {{- '>>>all\n' + m.content if m.content -}}
        {%- for c in m.tool_calls -%}
            {{- '>>>' + c.function.name + '\n' + c.function.arguments | tojson -}}
        {%- endfor -%}
    {%- else -%}
        {{- m.content -}}
    {%- endif -%}
    {{- '</s>' -}}
{%- endfor -%}
{{- '<s>assistant:>>>' if add_generation_prompt -}}
"""
MESSAGES = """\
{{- tools | tojson if tools -}}
{%- for m in messages -%}
    {{- m.role + '<|role|>\n' + (m.content or '') + '<|sep|>\n' -}}
    {%- for c in m.tool_calls -%}
        {%- if loop.first -%}
            {{- 'call<|role|>\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson -}}
            {{- '<|sep|>\n' -}}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
{{- 'assistant<|role|>\n' if add_generation_prompt -}}
"""
REASONING = """\
{{- tools | tojson if tools -}}
{%- for m in messages -%}
    {{- '<|' + m.role + '|>\n' -}}
    {{- m.reasoning_content + '\n[BEGIN ANSWER]\n' if m.reasoning_content -}}
    {{- m.content or '' -}}
    {{- '<calls>[' if m.tool_calls -}}
    {%- for c in m.tool_calls -%}
        {{- {'name': c.function.name, 'arguments': c.function.arguments} | tojson -}}
        {{- ']</calls>' if loop.last else ', ' -}}
    {%- endfor -%}
    {{- '<|end|>\n' if m.role == 'assistant' and not loop.last -}}
{%- endfor -%}
{{- '<|assistant|>\nHere are my steps:\n' if add_generation_prompt -}}
"""
OBJECT = "{'name': f.name, 'arguments': f.arguments} | tojson"
PAIRS = "{%- for k, v in f.arguments.items() -%}PAIR{%- endfor -%}"
QUOTED = "('<![CDATA[' + v + ']]>' if v is string and ('<' in v or '\\n' in v) else v | string)"
SMALL = {
    "JSON": TURNS.replace(
        "CALLS",
        EACH.replace("ONE", "{{- '<call>\\n' + " + OBJECT + " + '\\n</call>' -}}"),
    ),
    "list behind a word": TURNS.replace(
        "CALLS",
        "{{- ' functools[' if m.tool_calls -}}"
        + EACH.replace(
            "ONE", "{{- {'name': f.name, 'arguments': f.arguments} | tojson + (']' if loop.last else ', ') -}}"
        ),
    ),
    "tags": TURNS.replace(
        "CALLS",
        EACH.replace(
            "ONE",
            "{{- '<call>\\n<function=' + f.name + '>\\n' -}}"
            + PAIRS.replace(
                "PAIR",
                "{{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' -}}",
            )
            + "{{- '</function>\\n</call>' -}}",
        ),
    ),
    "tags with Python's values in CDATA": TURNS.replace(
        "CALLS",
        EACH.replace(
            "ONE",
            "{{- '<function name=\"' + f.name + '\">' -}}"
            + PAIRS.replace(
                "PAIR", "{{- '<param name=\"' + k + '\">' + QUOTED + '</param>' -}}".replace("QUOTED", QUOTED)
            )
            + "{{- '</function>' -}}",
        ),
    ),
    "recipients": RECIPIENTS,
    "recipients and tags": HEADERS.replace(
        "BODY",
        "<calls>\\n<invoke name=\"' + c.function.name + '\">\\n' -}}{%- for k, v in c.function.arguments.items() -%}"
        "{{- '<parameter name=\"' + k + '\">' + (v if v is string else v | tojson) + '</parameter>\\n' -}}"
        "{%- endfor -%}{{- '</invoke>\\n</calls>",
    ),
    "calls as messages": MESSAGES,
    "reasoning that the prompt opens in words": REASONING,
}


def table_row(path: Path) -> Row:
    pytest.importorskip("llguidance")
    return row(codec_of(path, Plugins()))


@pytest.mark.parametrize("name", SMALL)
def test_calls_of_small_templates(name: str, tmp_path: Path) -> None:
    path = tmp_path / "small.jinja"
    path.write_text(SMALL[name])
    found = table_row(path)
    assert found.n >= len(CALLS) - 3
    assert (found.unread, found.not_required, found.not_auto) == ([], [], [])
    assert not found.is_free
    assert not found.is_generic


KNOWN: dict[str, Row] = {
    "LFM2.5-8B-A1B": Row(unread=["text 'é ☃ \\\\n'"]),
    "Reka-Edge": Row(not_required=["text 'é ☃ \\\\n'"], not_auto=["text 'é ☃ \\\\n'"]),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Row(unread=["three"], not_required=["three"]),
}
"""Calls that are not read or not allowed: an escape that is none where the template writes texts as they are, other
characters as escapes of JSON, and a mark of the end after each call but the first."""


@pytest.mark.medium
@pytest.mark.parametrize("name", sorted(templates(Path(SOURCES) if SOURCES else None)))
def test_calls_of_real_templates(name: str) -> None:
    path = templates(Path(SOURCES) if SOURCES else None)[name]
    found, known = table_row(path), KNOWN.get(name, Row())
    if not found.n:
        pytest.skip("the template renders no calls")
    if not found.is_generic:
        assert not found.is_free
    assert (found.unread, found.not_required, found.not_auto) == (known.unread, known.not_required, known.not_auto)
