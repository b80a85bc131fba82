import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from llamacli.chat.formats import ChatFormat, choose
from llamacli.chat.messages import Piece, ToolCall
from llamacli.chat.template import ChatTemplate
from llamacli.gguf import Metadata
from llamacli.testing.chats import BOS, CASES, EOS, TOOLS
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_phi.chat import FORMATS

GOLDENS = json.loads((Path(__file__).parents[3] / "tests" / "goldens" / "chat_templates.json").read_text())
PUBLISHED = GOLDENS["microsoft-Phi-3.5-mini-instruct.jinja"]["renderings"]
TAGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TOOL_TAGS = ("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")
SYSTEM, USER, ANSWER = (
    {"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."))
)


def found(*tokens: str, template: str | None = None, architecture: str = "phi3") -> tuple[ChatFormat, ChatTemplate]:
    values = byte_level([], dict.fromkeys([BOS, EOS, *tokens], CONTROL), bos_token_id=256, eos_token_id=257)
    values |= {"general.architecture": architecture}
    if template:
        values["tokenizer.chat_template"] = template
    metadata = Metadata(values)
    tokenizer = tokenizer_from_metadata(metadata)
    fmt = choose(metadata, tokenizer, FORMATS)
    assert fmt.template
    return fmt, ChatTemplate(fmt.template, tokenizer)


@pytest.mark.parametrize("case", [name for name in CASES if len(PUBLISHED[name]) == 64])
def test_phi_3_matches_the_published_template(case: str) -> None:
    fmt, template = found(*TAGS)
    assert fmt.name == "phi-3"
    text = template.render(**CASES[case]).text
    assert hashlib.sha256(text.encode()).hexdigest() == PUBLISHED[case], text


def test_phi_4() -> None:
    fmt, template = found("<|im_start|>", "<|im_sep|>", "<|im_end|>")
    assert fmt.name == "phi-4"
    assert template.render([SYSTEM, USER, ANSWER, USER], add_generation_prompt=True).text == (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>Hello.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>"
    )


class TestPhi4Mini:
    def render(self, *messages: dict[str, Any], **options: Any) -> str:
        fmt, template = found(*TAGS, *TOOL_TAGS)
        assert fmt.name == "phi-4-mini"
        return template.render(messages, **options).text

    def test_turns(self) -> None:
        assert self.render(SYSTEM, USER, ANSWER, USER, add_generation_prompt=True) == (
            "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello.<|end|><|user|>Hi<|end|><|assistant|>"
        )
        assert self.render(USER, ANSWER) == f"<|user|>Hi<|end|><|assistant|>Hello.<|end|>{EOS}"

    @pytest.mark.parametrize(
        ("messages", "system"),
        [([SYSTEM, USER], "Be brief."), ([USER], "You are a helpful assistant with some tools.")],
    )
    def test_tools_are_in_the_system_message(self, messages: list[dict[str, Any]], system: str) -> None:
        text = self.render(*messages, tools=TOOLS, add_generation_prompt=True)
        before, after = f"<|system|>{system}<|tool|>", "<|/tool|><|end|><|user|>Hi<|end|><|assistant|>"
        assert (text[: len(before)], text[-len(after) :]) == (before, after)
        assert json.loads(text[len(before) : -len(after)]) == [tool["function"] for tool in TOOLS]

    def test_calls_and_results(self) -> None:
        call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
        assert self.render(*messages, tools=TOOLS, add_generation_prompt=True).endswith(
            '<|assistant|><|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|/tool_call|><|end|>'
            "<|tool_response|>2<|end|><|assistant|>"
        )

    def test_replies_of_files_with_a_template_too(self) -> None:
        fmt, _ = found(template="<|tool|><|/tool|>")
        reader = fmt.syntax.reader("", tools=True)
        events = reader.feed('Well.<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>') + reader.flush()
        assert [event for event in events if isinstance(event, Piece | ToolCall)] == [Piece("Well."), ToolCall("f", {})]


def test_other_formats_are_not_detected() -> None:
    assert found(template="<|user|><|end|>")[0].name == "derived"
    assert found("<|im_start|>", "<|im_end|>")[0].name == "chatml"
    assert found(*TOOL_TAGS, template="<|tool|><|/tool|>", architecture="other")[0].name == "derived"
