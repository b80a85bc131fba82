"""Chat templates of the family, and Gemma 4's syntax of replies."""

from llamacli.plugin import Calls, ChatFormat, Literals, NamedCall, Notation, Span, Spans, TemplateInfo

TURNS = """\
{{- bos_token -}}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role in ('user', 'assistant') -%}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' -}}
    {{- (system if loop.first else '') + (message.content or '') | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

GEMMA_4 = """\
{%- macro written(value, quotes_keys=false) -%}
    {%- if value is string -%}
        {{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for key, item in value | dictsort -%}
            {{- (written(key) if quotes_keys else key) + ':' + written(item, quotes_keys) -}}
            {{- ',' if not loop.last -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for item in value -%}
            {{- written(item, quotes_keys) + (',' if not loop.last else '') -}}
        {%- endfor -%}
        {{- ']' -}}
    {%- else -%}
        {{- value | tojson if value is boolean else value -}}
    {%- endif -%}
{%- endmacro -%}

{%- macro properties(schemas) -%}
    {{- 'properties:{' -}}
    {%- for name, schema in schemas | dictsort -%}
        {{- name + ':' + declared(schema) + (',' if not loop.last else '') -}}
    {%- endfor -%}
    {{- '}' -}}
{%- endmacro -%}

{%- macro items(schema) -%}
    {{- 'items:{' -}}
    {%- for key, value in schema | dictsort -%}
        {%- if key == 'properties' -%}
            {{- properties(value) -}}
        {%- else -%}
            {{- key + ':' + written(value | upper if key == 'type' else value, true) -}}
        {%- endif -%}
        {{- ',' if not loop.last -}}
    {%- endfor -%}
    {{- '}' -}}
{%- endmacro -%}

{%- macro declared(schema) -%}
    {%- set type = schema.type | upper -%}
    {{- '{' -}}
    {{- 'description:' + written(schema.description) + ',' if schema.description -}}
    {{- 'enum:' + written(schema.enum) + ',' if type == 'STRING' and schema.enum -}}
    {{- items(schema['items']) + ',' if type == 'ARRAY' and schema['items'] -}}
    {{- 'nullable:true,' if schema.nullable -}}
    {{- properties(schema.properties) + ',' if type == 'OBJECT' and schema.properties -}}
    {{- 'required:' + written(schema.required) + ',' if type == 'OBJECT' and schema.required -}}
    {{- 'type:' + written(type) + '}' -}}
{%- endmacro -%}

{%- set system = messages[0] if messages[0].role in ('system', 'developer') else none -%}
{%- set state = namespace(last_user=-1, previous='', calls=[], answered=false) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set state.last_user = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}

{{- bos_token -}}
{%- if system or tools or enable_thinking -%}
    {{- '<|turn>system\\n' -}}
    {{- '<|think|>\\n' if enable_thinking -}}
    {{- system.content | trim if system -}}
    {%- for tool in tools or [] -%}
        {{- '<|tool>declaration:' + tool.function.name + '{description:' + written(tool.function.description) -}}
        {{- ',parameters:' + declared(tool.function.parameters) if tool.function.parameters -}}
        {{- '}<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}

{%- for message in messages -%}
    {%- if message.role == 'tool' or (system and loop.first) -%}
        {%- continue -%}
    {%- endif -%}
    {%- if message.role != 'assistant' or state.previous != 'assistant' -%}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
    {%- endif -%}
    {%- set state.previous = message.role -%}
    {%- set state.calls = message.tool_calls or [] -%}
    {%- if state.calls and message.reasoning_content and loop.index0 > state.last_user -%}
        {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' -}}
    {%- endif -%}
    {%- for call in state.calls -%}
        {{- '<|tool_call>call:' + call.function.name + written(call.function.arguments) + '<tool_call|>' -}}
    {%- endfor -%}
    {%- set state.answered = false -%}
    {%- for result in messages[loop.index:] if state.calls -%}
        {%- if result.role != 'tool' -%}
            {%- break -%}
        {%- endif -%}
        {{- '<|tool_response>response:' + (result.name or 'unknown') -}}
        {{- written({'value': result.content}) + '<tool_response|>' -}}
        {%- set state.answered = true -%}
    {%- endfor -%}
    {{- (message.content or '') | trim -}}
    {%- if state.calls and not state.answered -%}
        {{- '<|tool_response>' -}}
    {%- elif message.content or not state.answered -%}
        {{- '<turn|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not state.calls -%}
    {{- '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') -}}
{%- endif -%}
"""


CALLS = Notation(NamedCall("call:", arguments=Literals(quotes=('<|"|>', '"'), bare=True, is_sorted=True)))
"""Calls with unquoted keys, `call:f{x:1,y:<|"|>a<|"|>}`."""


def _is(info: TemplateInfo, *architectures: str) -> bool:
    return info.metadata.get_str("general.architecture", "") in architectures


FORMATS = (
    ChatFormat(
        name="gemma-4",
        matches=lambda info: _is(info, "gemma4") and info.mentions("<|turn>", "<turn|>"),
        template=GEMMA_4,
        tokens=("<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        syntax=Spans(
            reasoning=Span("<|channel>thought", "<channel|>"),
            dropped=("<|channel>", "<channel|>"),
            calls=Calls("<|tool_call>", "<tool_call|>", CALLS),
        ),
    ),
    ChatFormat(
        name="gemma",
        matches=lambda info: _is(info, "gemma", "gemma2", "gemma3", "gemma3n") and info.mentions("<start_of_turn>"),
        template=TURNS,
        tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
)
