"""Chat template of the family for files without one, and tool calls."""

from collections.abc import Sequence

import attrs

from llamacli.plugin import (
    THINK,
    CallReading,
    Calls,
    CallText,
    ChatFormat,
    JsonCall,
    Literals,
    NamedCall,
    Notation,
    Schemas,
    Spans,
    TemplateInfo,
)

LFM2 = """\
{{- bos_token -}}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
    {{- '<|im_start|>system\\n' + system -}}
    {%- if tools -%}
        {{- '\\n' if system -}}
        {{- 'List of tools: <|tool_list_start|>' + tools | tojson + '<|tool_list_end|>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- for message in turns -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'tool' -%}
        {{- '<|tool_response_start|>' + message.content + '<|tool_response_end|>' -}}
    {%- else -%}
        {{- message.content | default('', true) -}}
    {%- endif -%}
    {%- for call in message.tool_calls -%}
        {%- set call = call.function or call -%}
        {{- '<|tool_call_start|>[' if loop.first else ', ' -}}
        {{- call.name + '(' -}}
        {%- for key, value in call.arguments.items() -%}
            {{- (', ' if not loop.first else '') + key + '=' + value | tojson -}}
        {%- endfor -%}
        {{- ')' + (']<|tool_call_end|>' if loop.last else '') -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""

PYTHON = Literals("(", ")", "=", ("'", '"'), bare=True, nested=Literals(quotes=("'", '"')))
"""Arguments in Python's notation, `(x=1, y='a')`; true, false and null count too."""


@attrs.frozen
class LfmCall(NamedCall):
    """Call in Python's notation, or in JSON."""

    def read(self, source: CallText, schemas: Schemas, follows: Sequence[str] = ()) -> CallReading:
        """Parse the next call."""
        yield from source.space()
        own = JsonCall().read if source.next == "{" else super().read
        yield from own(source, schemas, follows)


CALLS = Notation(LfmCall(arguments=PYTHON), "[", ", ", "]")
"""Calls in a list, `[f(x=1), g()]`."""


def _is_lfm(info: TemplateInfo) -> bool:
    """Test for the architecture; templates do not always name the tokens."""
    return info.metadata.get_str("general.architecture", "") in ("lfm2", "lfm2moe")


_TURNS = ("<|im_start|>", "<|im_end|>")

FORMATS = (
    ChatFormat(
        name="lfm2",
        matches=lambda info: _is_lfm(info) and info.has_tokens("<|tool_call_start|>", *_TURNS),
        template=LFM2,
        tokens=_TURNS,
        syntax=Spans(THINK, Calls("<|tool_call_start|>", "<|tool_call_end|>", CALLS)),
    ),
)
"""Calls are of this form in files with a template of their own too."""
