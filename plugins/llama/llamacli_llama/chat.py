"""Chat templates of the family for files without one, and tool calls."""

import json
import re
from typing import Any

from llamacli.plugin import (
    CALL_SPACE,
    Calls,
    ChatFormat,
    Rules,
    Span,
    Spans,
    TemplateInfo,
    ToolCall,
    json_calls,
    literal,
    tagged_calls,
)

HEADERS = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {{- (message.content or '') | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

INSTRUCTIONS = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- for message in messages if message.role in ('user', 'assistant') -%}
    {%- if message.role == 'assistant' -%}
        {{- ' ' + (message.content or '') | trim + ' ' + eos_token -}}
    {%- elif loop.first and system is not none -%}
        {{- bos_token + '[INST] <<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message.content | trim + ' [/INST]' -}}
    {%- else -%}
        {{- bos_token + '[INST] ' + message.content | trim + ' [/INST]' -}}
    {%- endif -%}
{%- endfor -%}
"""

ZEPHYR = """\
{%- for message in messages -%}
    {{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>\\n' -}}
{%- endif -%}
"""

SYSTEM_PROMPTS = """\
{{- bos_token -}}
{%- for message in messages if message.role in ('system', 'user', 'assistant') -%}
    {%- if message.role == 'system' -%}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}
    {%- elif message.role == 'user' -%}
        {{- '[INST]' + message.content + '[/INST]' -}}
    {%- else -%}
        {{- message.content + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

_INSTRUCTED = re.compile(r"llama-?\s?2|mi[sx]tral", re.IGNORECASE)
"""Names of models that were trained on [INST] but lack it in their vocabulary."""

_NAMED_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?(?=\s*\{)")
"""Name before the arguments of a call; `[ARGS]`, a special token, may have been left out."""


def named_calls(text: str) -> list[ToolCall]:
    """Parse tool calls `name[ARGS]{...}`, with `[TOOL_CALLS]` between several.

    A list in JSON is accepted too. Raises ValueError for anything else.
    """
    if text.lstrip().startswith("["):
        return json_calls(text)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name = _NAMED_CALL.match(part)
        if name is None:
            raise ValueError(f"{part!r} is not a tool call")
        calls.append(ToolCall(name[1], json.loads(part[name.end() :])))
    return calls


def named_call(rules: Rules, name: str, schema: dict[str, Any]) -> str:
    """Grammar of a call `name[ARGS]{...}`; see `llamacli.chat.syntax.CallGrammar`."""
    return f"{literal(name)} {rules.marker('[ARGS]')} {rules.json('arguments', schema, CALL_SPACE)}"


def _is_llama(info: TemplateInfo) -> bool:
    return info.metadata.get_str("general.architecture", "") == "llama"


def _is_mistral3(info: TemplateInfo) -> bool:
    return info.metadata.get_str("general.architecture", "") == "mistral3"


def _is_instructed(info: TemplateInfo) -> bool:
    named = _INSTRUCTED.search(info.metadata.get_str("general.name", "")) is not None
    return _is_llama(info) and (info.has_tokens("[INST]") or (named and info.template is None))


def _is_sentencepiece(info: TemplateInfo) -> bool:
    """Test for models such as TinyLlama that use Zephyr's chat format."""
    pieces = info.metadata.get_str("tokenizer.ggml.model", "") == "llama"
    return _is_llama(info) and pieces and info.template is None and not info.has_tokens("<|im_start|>")


_NAMED_CALLS = Calls("[TOOL_CALLS]", "", named_calls, grammar=named_call)

FORMATS = (
    ChatFormat(
        name="llama-3",
        matches=lambda info: _is_llama(info) and info.mentions("<|start_header_id|>", "<|eot_id|>"),
        template=HEADERS,
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        syntax=Spans(calls=Calls("<|python_tag|>", "", json_calls, bare=True)),
    ),
    ChatFormat(
        name="llama-2",
        matches=_is_instructed,
        template=INSTRUCTIONS,
        tokens=("</s>",),
        syntax=Spans(calls=Calls("[TOOL_CALLS]", "", json_calls)),
    ),
    ChatFormat(
        name="mistral-v7",
        matches=lambda info: _is_mistral3(info) and info.mentions("[INST]", "[SYSTEM_PROMPT]"),
        template=SYSTEM_PROMPTS,
        tokens=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
        syntax=Spans(reasoning=Span("[THINK]", "[/THINK]"), calls=_NAMED_CALLS),
    ),
    ChatFormat(
        name="seed-oss",
        matches=lambda info: info.mentions("<seed:think>", "<seed:tool_call>"),
        syntax=Spans(
            reasoning=Span("<seed:think>", "</seed:think>"),
            calls=Calls(
                "<seed:tool_call>",
                "</seed:tool_call>",
                tagged_calls(
                    r"<function=(?P<name>[^\s<>]+)>(?P<arguments>.*?)</function>",
                    r"<parameter=(?P<name>[^<>]+)>(?P<value>.*?)</parameter>",
                ),
            ),
        ),
    ),
    ChatFormat(name="zephyr", matches=_is_sentencepiece, template=ZEPHYR, tokens=("</s>",)),
)
