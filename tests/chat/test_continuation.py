"""Prompts that end within the text or the reasoning of a reply."""

import pytest

from llamacli.chat.codec import ChatCodec
from llamacli.chat.continuation import continued
from llamacli.errors import ChatTemplateError
from llamacli.gguf import Metadata
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata

TEMPLATE = """\
{%- for m in messages -%}
    {{- '<s>' + m.role + ':' -}}
    {{- '<think>' + m.reasoning_content + '</think>' if m.reasoning_content -}}
    {{- m.content + '</s>' -}}
{%- endfor -%}
{{- '<s>assistant:' if add_generation_prompt -}}
"""
USER = {"role": "user", "content": "Hi"}


def codec_of(template: str, others: dict[str, int] | None = None) -> ChatCodec:
    kinds = dict.fromkeys(["<s>", "</s>"], CONTROL) | (others or {})
    values = byte_level([], kinds, bos_token_id=256, eos_token_id=257)
    metadata = Metadata({**values, "general.architecture": "none", "tokenizer.chat_template": template})
    return ChatCodec(tokenizer_from_metadata(metadata), metadata)


@pytest.mark.parametrize(
    ("content", "reasoning", "what", "expected"),
    [
        ("He", "", None, "He"),
        ("He", "Hm.", None, "<think>Hm.</think>He"),
        ("", "Hm", None, "<think>Hm"),
        ("", "Hm", "reasoning_content", "<think>Hm"),
        ("", "Hm.", "content", "<think>Hm.</think>"),
    ],
)
def test_prompt_ends_where_the_message_does(content: str, reasoning: str, what: str | None, expected: str) -> None:
    begun = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    rendering = continued(codec_of(TEMPLATE), [USER, begun], what)
    assert rendering.text == f"<s>user:Hi</s><s>assistant:{expected}"
    assert rendering.begun == ("Hm" if expected == "<think>Hm" else "")
    assert rendering.parts == [256, "user:Hi", 257, 256, f"assistant:{expected}"]


SILENT = TEMPLATE.replace("if m.reasoning_content -}}", "if false -}}")
OPENING = SILENT.replace("'<s>assistant:'", "'<s>assistant:<think>'")
STRICT = TEMPLATE.replace("{{- '<think>'", "{{- raise_exception('no') if m.reasoning_content -}}{{- '<think>'")


@pytest.mark.parametrize(
    ("template", "content", "reasoning", "expected"),
    [
        (SILENT, "", "H<s>m", "assistant:<think>H<s>m"),
        (OPENING, "", "Hm", "assistant:<think>Hm"),
        (STRICT, "", "Hm", "assistant:<think>Hm"),
        (SILENT, "", "", "assistant:"),
        (OPENING, None, None, "assistant:<think>"),
    ],
)
def test_what_the_template_leaves_out_follows_the_prompt(
    template: str, content: str | None, reasoning: str | None, expected: str
) -> None:
    begun = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    rendering = continued(codec_of(template), [USER, begun])
    assert rendering.text == f"<s>user:Hi</s><s>{expected}"
    assert rendering.begun == (reasoning or "")
    assert rendering.parts == [256, "user:Hi", 257, 256, expected]


def test_markers_of_reasoning_may_be_tokens() -> None:
    codec = codec_of(SILENT.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"), {"[THINK]": CONTROL})
    begun = {"role": "assistant", "content": "", "reasoning_content": "Hm [THINK]"}
    assert continued(codec, [USER, begun]).parts[3:] == [256, "assistant:", 258, "Hm [THINK]"]


def test_errors_of_texts_are_raised() -> None:
    begun = {"role": "assistant", "content": "He", "reasoning_content": "Hm"}
    with pytest.raises(ChatTemplateError, match="no"):
        continued(codec_of(STRICT), [USER, begun])


def test_reasoning_of_a_template_without_any_is_an_error() -> None:
    begun = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    with pytest.raises(ChatTemplateError, match="no reasoning to continue"):
        continued(codec_of("{% for m in messages %}{{ m.content }}</s>{% endfor %}"), [USER, begun])
