"""Chat templates of the family for files without one."""

from llamacli.plugin import HERMES, ChatFormat, TemplateInfo

_CONVERSATION = """\
{%- set system = messages[0].content if messages[0].role == 'system' else default_system -%}
{%- if tools or system is not none -%}
    {{- '<|im_start|>system\\n' -}}
    {{- system if system is not none -}}
    {%- if tools -%}
        {{- '\\n\\n' if system is not none -}}
        {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
        {%- for tool in tools -%}
            {{- '\\n' + tool | tojson -}}
        {%- endfor -%}
        {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' -}}
        {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' -}}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- set question = namespace(index=messages | length - 1) -%}
{%- for message in messages -%}
    {%- set result = message.role != 'user' or
        (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) -%}
    {%- if not result -%}
        {%- set question.index = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' -}}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set content = message.content | default('', true) -%}
        {%- set thought = message.reasoning_content | default('', true) -%}
        {%- if thinks and not thought and '</think>' in content -%}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if thinks and loop.index0 > question.index and (loop.last or thought) -%}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
        {%- else -%}
            {{- content -}}
        {%- endif -%}
        {%- for call in message.tool_calls -%}
            {%- set call = call.function or call -%}
            {{- '\\n' if content or not loop.first -}}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
            {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'user' or not loop.first -%}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {{- '<think>\\n\\n</think>\\n\\n' if thinks and enable_thinking is false -}}
{%- endif -%}
"""

QWEN_2_5 = (
    "{%- set default_system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' -%}"
    "{%- set thinks = false -%}" + _CONVERSATION
)
QWEN_3 = "{%- set default_system = none -%}{%- set thinks = true -%}" + _CONVERSATION

_TURNS = ("<|im_start|>", "<|im_end|>")


def _lacks_template(info: TemplateInfo, *architectures: str) -> bool:
    """Test for a file of these architectures without a chat template."""
    return info.template is None and info.metadata.get_str("general.architecture", "") in architectures


FORMATS = (
    ChatFormat(
        name="qwen-3",
        matches=lambda info: _lacks_template(info, "qwen3", "qwen3moe") and info.has_tokens("<think>", *_TURNS),
        template=QWEN_3,
        tokens=_TURNS,
        syntax=HERMES,
    ),
    ChatFormat(
        name="qwen-2.5",
        matches=lambda info: _lacks_template(info, "qwen2", "qwen2moe") and info.has_tokens("<tool_call>", *_TURNS),
        template=QWEN_2_5,
        tokens=_TURNS,
        syntax=HERMES,
    ),
)
"""Models before Qwen2.5 have no tools and use the core's ChatML format."""
