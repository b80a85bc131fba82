"""Chat templates of the family for files without one, and tool calls."""

import re

from llamacli.plugin import Calls, ChatFormat, Spans, TemplateInfo, json_calls

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


def _is_llama(info: TemplateInfo) -> bool:
    return info.metadata.get_str("general.architecture", "") == "llama"


def _is_llama_3(info: TemplateInfo) -> bool:
    """Test for Llama 3, whose calls are bare.

    Other models have its turns, but calls of their own.
    """
    headers = info.mentions("<|start_header_id|>", "<|eot_id|>")
    is_own = info.template is None or '"parameters": ' in info.template
    return _is_llama(info) and headers and is_own and not info.mentions("<function=")


def _is_mistral3(info: TemplateInfo) -> bool:
    return info.metadata.get_str("general.architecture", "") == "mistral3"


def _is_instructed(info: TemplateInfo) -> bool:
    named = _INSTRUCTED.search(info.metadata.get_str("general.name", "")) is not None
    return _is_llama(info) and info.template is None and (info.has_tokens("[INST]") or named)


def _is_sentencepiece(info: TemplateInfo) -> bool:
    """Test for models such as TinyLlama that use Zephyr's chat format."""
    pieces = info.metadata.get_str("tokenizer.ggml.model", "") == "llama"
    return _is_llama(info) and pieces and info.template is None and not info.has_tokens("<|im_start|>")


FORMATS = (
    ChatFormat(
        name="llama-3",
        matches=_is_llama_3,
        template=HEADERS,
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        syntax=Spans(calls=Calls("<|python_tag|>", "", json_calls, bare=True)),
    ),
    ChatFormat(
        name="llama-2",
        matches=_is_instructed,
        template=INSTRUCTIONS,
        tokens=("</s>",),
    ),
    ChatFormat(
        name="mistral-v7",
        matches=lambda info: _is_mistral3(info) and info.template is None and info.has_tokens("[INST]"),
        template=SYSTEM_PROMPTS,
        tokens=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    ),
    ChatFormat(name="zephyr", matches=_is_sentencepiece, template=ZEPHYR, tokens=("</s>",)),
)
