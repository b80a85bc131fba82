"""Chat format of RWKV World models, in plain words and blank lines."""

from llamacli.plugin import THINKING, ChatFormat

WORLD = """\
{%- for message in messages if message.role in ('system', 'user', 'assistant') -%}
    {{- message.role | capitalize + ': ' + (message.content or '') | trim + '\\n\\n' -}}
{%- endfor -%}
{{- 'Assistant:' if add_generation_prompt -}}
"""

FORMATS = (
    ChatFormat(
        name="rwkv-world",
        matches=lambda info: info.template is None and info.metadata.get_str("tokenizer.ggml.model", "") == "rwkv",
        template=WORLD,
        syntax=THINKING,
    ),
)
"""The blank line after a reply, a token, ends it: files name it as `eot_token_id`."""
