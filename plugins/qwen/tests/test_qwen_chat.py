import hashlib
import json
from pathlib import Path

import pytest

from llamacli.chat.formats import ChatFormat, choose
from llamacli.chat.messages import Piece, ToolCall
from llamacli.chat.template import ChatTemplate
from llamacli.gguf import Metadata
from llamacli.testing.chats import CASES
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_qwen.chat import FORMATS

GOLDENS = json.loads((Path(__file__).parents[3] / "tests" / "goldens" / "chat_templates.json").read_text())
PUBLISHED = {"qwen-2.5": "Qwen-Qwen2.5-7B-Instruct.jinja", "qwen-3": "Qwen-Qwen3-0.6B.jinja"}
TURNS, TOOLS, THOUGHTS = ("<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>"), ("<think>", "</think>")


def found(architecture: str, *tokens: str, template: str | None = None) -> tuple[ChatFormat, ChatTemplate]:
    values = byte_level([], dict.fromkeys(tokens, CONTROL)) | {"general.architecture": architecture}
    if template:
        values["tokenizer.chat_template"] = template
    metadata = Metadata(values)
    tokenizer = tokenizer_from_metadata(metadata)
    fmt = choose(metadata, tokenizer, FORMATS)
    assert fmt.template
    return fmt, ChatTemplate(fmt.template, tokenizer)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("architecture", "name"),
    [("qwen2", "qwen-2.5"), ("qwen2moe", "qwen-2.5"), ("qwen3", "qwen-3"), ("qwen3moe", "qwen-3")],
)
def test_matches_the_published_template(architecture: str, name: str, case: str) -> None:
    fmt, template = found(architecture, *TURNS, *TOOLS, *THOUGHTS)
    assert fmt.name == name
    text = template.render(**CASES[case]).text
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDENS[PUBLISHED[name]]["renderings"][case], text


def test_inline_reasoning_is_separated() -> None:
    _, template = found("qwen3", *TURNS, *TOOLS, *THOUGHTS)
    question, answer = {"role": "user", "content": "1?"}, {"role": "assistant", "content": "<think>\n2\n</think>\n\n3"}
    rendered = template.render([question, answer, question]).text
    assert rendered == (
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
    )
    assert template.render([question, answer]).text.endswith("assistant\n<think>\n2\n</think>\n\n3<|im_end|>\n")


def test_replies() -> None:
    for architecture in ("qwen2", "qwen3"):
        fmt, _ = found(architecture, *TURNS, *TOOLS, *THOUGHTS)
        reader = fmt.syntax.reader("", tools=True)
        text = '<think>\nHm.\n</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>'
        events = reader.feed(text) + reader.flush()
        events = [event for event in events if isinstance(event, Piece | ToolCall)]
        assert events == [Piece("Hm.", reasoning=True), Piece("So:"), ToolCall("f", {"x": [1]})]


def test_other_formats_are_not_detected() -> None:
    assert found("qwen2", *TURNS)[0].name == "chatml"  # Qwen1.5 and Qwen2
    assert found("other", *TURNS, *THOUGHTS, *TOOLS)[0].name != "qwen-3"
    assert found("qwen2", *TURNS, *TOOLS, template="<think></think>")[0].name == "derived"
