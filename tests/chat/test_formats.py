from pathlib import Path

import pytest

from llamacli import ChatTemplateError, PluginError
from llamacli.chat.channels import HARMONY
from llamacli.chat.formats import CHATML, ChatFormat, choose, own_templates
from llamacli.chat.named import named_templates
from llamacli.chat.syntax import THINKING
from llamacli.gguf import Metadata
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "templates"
OURS = ChatFormat(
    name="ours",
    matches=lambda info: info.has_tokens("<ours>"),
    template="<ours>{{ messages[0].content }}",
    tokens=("<ours>", "</ours>"),
    syntax=THINKING,
)


def chosen(*tokens: str, template: str | None = None, formats: tuple[ChatFormat, ...] = (OURS,), name=None):
    values = byte_level([], dict.fromkeys(tokens, CONTROL))
    if template is not None:
        values["tokenizer.chat_template"] = template
    metadata = Metadata(values, "model.gguf")
    return choose(metadata, tokenizer_from_metadata(metadata), formats, name)


@pytest.mark.parametrize(
    ("template", "name", "syntax"),
    [
        ("<|channel|> <|message|> <|start|>", "harmony", HARMONY),
        ("<tool_call> <think>", "derived", None),
        ("<|im_start|><|im_end|>", "derived", None),
        ("anything", "derived", None),
    ],
)
def test_format_is_detected_by_the_template(template: str, name: str, syntax) -> None:
    found = chosen(template=template)
    assert (found.name, found.template, found.syntax) == (name, template, syntax)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai-gpt-oss-120b", "harmony"),
        ("Qwen-Qwen3-0.6B", "derived"),
        ("microsoft-Phi-3.5-mini-instruct", "derived"),
    ],
)
def test_real_templates(name: str, expected: str, shared) -> None:
    assert chosen(template=shared(f"templates/{name}.jinja").read_text()).name == expected


def test_plugin_formats_come_before_core_formats() -> None:
    found = chosen("<ours>", template="<tool_call>")
    assert (found.name, found.template, found.syntax) == ("ours", "<tool_call>", THINKING)


def test_file_without_template_gets_the_template_of_a_format() -> None:
    assert chosen("<ours>", "</ours>") is OURS
    found = chosen("<|im_start|>", "<|im_end|>", template="")
    assert (found.name, found.template) == ("chatml", CHATML)


def test_format_without_template_does_not_fit_a_file_without_one() -> None:
    with pytest.raises(ChatTemplateError, match=r"model.gguf: it has no chat template, and no plugin"):
        chosen("<|start|>", "<|channel|>", "<|message|>")


def test_missing_special_tokens_raise() -> None:
    with pytest.raises(ChatTemplateError, match=r"model.gguf: the vocabulary lacks </ours>, which chat format 'ours'"):
        chosen("<ours>")


def test_choose_by_name() -> None:
    assert chosen("<ours>", "</ours>", template="x", name="ours") is OURS
    with pytest.raises(ChatTemplateError, match=r"chat template 'harmony' is not one of .*, chatml, .*, ours,"):
        chosen(name="harmony")


def test_names_of_llama_cpp_select_its_templates() -> None:
    assert chosen(name="llama3").template == named_templates()["llama3"].template()
    assert chosen(template="vicuna").template == named_templates()["vicuna"].template()
    with pytest.raises(ChatTemplateError, match=r"chat template 'llama9' is not one of .*command-r.* llama3"):
        chosen(name="llama9")


def test_a_text_with_a_space_is_a_template() -> None:
    assert chosen(name="Go on: ").template == "Go on: "


def test_errors_of_matches_name_the_format() -> None:
    broken = ChatFormat(name="broken", matches=lambda info: info.nonsense)  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="chat format 'broken' failed: AttributeError"):
        chosen(template="x", formats=(broken,))


def test_named_templates_of_the_file() -> None:
    values = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["x"],
    }
    assert own_templates(Metadata(values)) == {"default": "a", "tool_use": "b"}
    assert own_templates(Metadata({"tokenizer.chat_template.rag": "c"})) == {"rag": "c"}
