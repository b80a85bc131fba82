"""Chat templates of the family for files without one, and tool calls."""

from llamacli.plugin import Calls, ChatFormat, Spans, TemplateInfo, json_calls

PHI_3 = """\
{%- for message in messages if message.role in ('system', 'user', 'assistant') -%}
    {%- if message.content or message.role != 'system' -%}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}
"""

PHI_4_MINI = """\
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools and not has_system -%}
    {%- set messages = [{'role': 'system', 'content': 'You are a helpful assistant with some tools.'}] + messages -%}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|' + ('tool_response' if message.role == 'tool' else message.role) + '|>' + message.content | default('') -}}
    {%- if tools and loop.first -%}
        {{- '<|tool|>' + tools | map(attribute='function') | list | tojson + '<|/tool|>' -}}
    {%- endif -%}
    {%- if message.tool_calls -%}
        {{- '<|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson + '<|/tool_call|>' -}}
    {%- endif -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else eos_token -}}
"""

PHI_4 = """\
{%- for message in messages if message.role in ('system', 'user', 'assistant') -%}
    {{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' -}}
{%- endfor -%}
{{- '<|im_start|>assistant<|im_sep|>' if add_generation_prompt -}}
"""

_TAGS = ("<|user|>", "<|assistant|>", "<|end|>")
_SEPARATORS = ("<|im_start|>", "<|im_sep|>", "<|im_end|>")


def _is_phi(info: TemplateInfo) -> bool:
    return info.metadata.get_str("general.architecture", "") in ("phi3", "phimoe")


FORMATS = (
    ChatFormat(
        name="phi-4-mini",
        matches=lambda info: _is_phi(info) and info.mentions("<|tool|>", "<|/tool|>"),
        template=PHI_4_MINI,
        tokens=(*_TAGS, "<|tool|>", "<|/tool|>"),
        syntax=Spans(calls=Calls("<|tool_call|>", "<|/tool_call|>", json_calls)),
    ),
    ChatFormat(
        name="phi-4",
        matches=lambda info: _is_phi(info) and info.template is None and info.has_tokens(*_SEPARATORS),
        template=PHI_4,
        tokens=_SEPARATORS,
    ),
    ChatFormat(
        name="phi-3",
        matches=lambda info: _is_phi(info) and info.template is None and info.has_tokens(*_TAGS),
        template=PHI_3,
        tokens=_TAGS,
    ),
)
