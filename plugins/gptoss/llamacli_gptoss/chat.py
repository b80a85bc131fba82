"""Harmony, OpenAI's chat format of messages in channels.

The template is for files without one. Each message is `<|start|>` role `<|channel|>` channel `<|message|>` text, and
ends with `<|end|>`, a tool call with `<|call|>`, the final answer with `<|return|>`. Reasoning before an answer is
dropped from later prompts; reasoning before a tool call is kept until the answer. Tools are described as TypeScript
functions.
"""

from llamacli.plugin import HARMONY, ChatFormat, TemplateInfo

TEMPLATE = """\
{%- macro type_of(schema) -%}
    {%- if schema.enum -%}
        {{- '"' + schema.enum | join('" | "') + '"' -}}
    {%- elif schema.type == 'array' -%}
        {{- (type_of(schema['items']) if schema['items'] else 'any') + '[]' -}}
    {%- elif schema.type == 'object' and schema.properties -%}
        {{- '{\\n' -}}
        {%- for name, inner in schema.properties.items() -%}
            {{- name + ('' if name in (schema.required or []) else '?') + ': ' + type_of(inner) -}}
            {{- '' if loop.last else ', ' -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif schema.type in ('integer', 'number') -%}
        {{- 'number' -}}
    {%- else -%}
        {{- schema.type if schema.type in ('string', 'boolean', 'object') else 'any' -}}
    {%- endif -%}
{%- endmacro -%}

{%- macro declaration(tool) -%}
    {{- '// ' + tool.description + '\\n' if tool.description else '' -}}
    {{- 'type ' + tool.name + ' = (' -}}
    {%- if tool.parameters and tool.parameters.properties -%}
        {{- '_: {\\n' -}}
        {%- for name, schema in tool.parameters.properties.items() -%}
            {{- '// ' + schema.description + '\\n' if schema.description else '' -}}
            {{- name + ('' if name in (tool.parameters.required or []) else '?') + ': ' + type_of(schema) + ',' -}}
            {{- ' // default: ' + schema.default | tojson if schema.default is defined else '' -}}
            {{- '\\n' -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- endif -%}
    {{- ') => any;\\n\\n' -}}
{%- endmacro -%}

{%- macro say(header, text, end='<|end|>') -%}
    {{- '<|start|>' + header + '<|message|>' + text + end -}}
{%- endmacro -%}

{%- set system -%}
    {{- model_identity | default('You are ChatGPT, a large language model trained by OpenAI.') + '\\n' -}}
    {{- 'Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') -}}
    {{- '\\n\\nReasoning: ' + reasoning_effort | default('medium') -}}
    {{- '\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' -}}
    {{- "\\nCalls to these tools must go to the commentary channel: 'functions'." if tools else '' -}}
{%- endset -%}
{{- say('system', system) -}}

{%- set instructions = messages[0].content if messages[0].role in ('system', 'developer') else '' -%}
{%- if instructions or tools -%}
    {%- set developer -%}
        {{- '# Instructions\\n\\n' + instructions + '\\n\\n' if instructions else '' -}}
        {%- if tools -%}
            {{- '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' -}}
            {%- for tool in tools -%}
                {{- declaration(tool.function) -}}
            {%- endfor -%}
            {{- '} // namespace functions' -}}
        {%- endif -%}
    {%- endset -%}
    {{- say('developer', developer) -}}
{%- endif -%}

{%- set answers = namespace(last=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' and not message.tool_calls -%}
        {%- set answers.last = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- set called = namespace(name='') -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- say('user', message.content) -}}
    {%- elif message.role == 'tool' -%}
        {%- set name = message.name or called.name -%}
        {{- say('functions.' + name + ' to=assistant<|channel|>commentary', message.content | tojson) -}}
    {%- elif message.role == 'assistant' and message.tool_calls -%}
        {%- set thought = message.thinking or message.content -%}
        {%- if thought and loop.index0 > answers.last -%}
            {{- say('assistant<|channel|>analysis', thought) -}}
        {%- endif -%}
        {%- for call in message.tool_calls -%}
            {%- set called.name = call.function.name -%}
            {%- set header = 'assistant to=functions.' + called.name + '<|channel|>commentary json' -%}
            {{- say(header, call.function.arguments | tojson, '<|call|>') -}}
        {%- endfor -%}
    {%- elif message.role == 'assistant' -%}
        {%- set is_end = loop.last and not add_generation_prompt -%}
        {%- if is_end and message.thinking -%}
            {{- say('assistant<|channel|>analysis', message.thinking) -}}
        {%- endif -%}
        {{- say('assistant<|channel|>final', message.content, '<|return|>' if is_end else '<|end|>') -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' if add_generation_prompt else '' -}}
"""


def _is_harmony(info: TemplateInfo) -> bool:
    is_ours = info.metadata.get_str("general.architecture", "") == "gpt-oss"
    return is_ours and info.mentions("<|start|>", "<|channel|>", "<|message|>")


FORMAT = ChatFormat(
    name="harmony",
    matches=_is_harmony,
    template=TEMPLATE,
    tokens=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    syntax=HARMONY,
)
