"""Chat template of the family for files without one, and tool calls."""

import ast
import json

from llamacli.plugin import THINK, Calls, ChatFormat, Schemas, Spans, TemplateInfo, ToolCall, json_calls

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

_JSON_NAMES = {"true": True, "false": False, "null": None}


def python_calls(text: str, schemas: Schemas | None = None) -> list[ToolCall]:
    """Parse tool calls in Python's notation, `[f(x=1), g()]`, or in JSON.

    Arguments are literals that JSON can express, given by name; true, false and null count too. Raises ValueError for
    anything else.
    """
    if text.lstrip().startswith(("{", "[{")):
        return json_calls(text, schemas)
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        calls = [_call(call) for call in (parsed.elts if isinstance(parsed, ast.List) else [parsed])]
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:  # the last two: deep nesting
        raise ValueError(f"{text[:80]!r} is not a tool call") from error
    if not calls:
        raise ValueError("no tool call")
    return calls


def _call(call: ast.expr) -> ToolCall:
    """Tool call of `name(key=value, ...)`; names may have dots."""
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("not a call of a name with arguments by name")
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("an argument without a name")
    values = {keyword.arg: ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in call.keywords}
    return ToolCall(ast.unparse(call.func), json.loads(json.dumps(values, allow_nan=False)))


class _JsonNames(ast.NodeTransformer):
    """Replace the names true, false and null by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace one name."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


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
        syntax=Spans(THINK, Calls("<|tool_call_start|>", "<|tool_call_end|>", python_calls)),
    ),
)
"""Calls are of this form in files with a template of their own too."""
