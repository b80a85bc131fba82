import json
from typing import Any

import pytest

from llamacli.chat.formats import ChatFormat, choose
from llamacli.chat.messages import Piece, ToolCall
from llamacli.chat.template import ChatTemplate
from llamacli.gguf import Metadata
from llamacli.testing.chats import BOS, EOS, TOOLS
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli_lfm.chat import CALLS, FORMATS

TOKENS = ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
SYSTEM, USER, ANSWER = (
    {"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."))
)


def found(*tokens: str, architecture: str = "lfm2", template: str | None = None) -> tuple[ChatFormat, ChatTemplate]:
    values = byte_level([], dict.fromkeys([BOS, EOS, *tokens], CONTROL), bos_token_id=256, eos_token_id=257)
    values |= {"general.architecture": architecture}
    if template:
        values["tokenizer.chat_template"] = template
    metadata = Metadata(values)
    tokenizer = tokenizer_from_metadata(metadata)
    fmt = choose(metadata, tokenizer, FORMATS)
    assert fmt.template
    return fmt, ChatTemplate(fmt.template, tokenizer)


def render(*messages: dict[str, Any], **options: Any) -> str:
    fmt, template = found(*TOKENS)
    assert fmt.name == "lfm2"
    return template.render(messages, **options).text


def test_turns() -> None:
    assert render(SYSTEM, USER, ANSWER, USER, add_generation_prompt=True) == (
        f"{BOS}<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(USER) == f"{BOS}<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(("messages", "system"), [([SYSTEM, USER], "Be brief.\n"), ([USER], "")])
def test_tools_are_in_the_system_message(messages: list[dict[str, Any]], system: str) -> None:
    text = render(*messages, tools=TOOLS)
    before = f"{BOS}<|im_start|>system\n{system}List of tools: <|tool_list_start|>"
    after = "<|tool_list_end|><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert (text[: len(before)], text[-len(after) :]) == (before, after)
    assert json.loads(text[len(before) : -len(after)]) == TOOLS


def test_calls_and_results() -> None:
    calls = [
        {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1, "y": "a"}}},
        {"type": "function", "id": "2", "function": {"name": "g", "arguments": {}}},
    ]
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "2"}]
    assert render(*talk, add_generation_prompt=True).endswith(
        '<|im_start|>assistant\n<|tool_call_start|>[f(x=1, y="a"), g()]<|tool_call_end|><|im_end|>\n'
        "<|im_start|>tool\n<|tool_response_start|>2<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_replies_of_files_with_a_template_too() -> None:
    fmt, _ = found(*TOKENS, architecture="lfm2moe", template="{{ messages }}")
    reader = fmt.syntax.reader("", tools=True)
    text = '<think>Hm.</think>Well.<|tool_call_start|>[f(x=[1, {"a": true}])]<|tool_call_end|>'
    events = [event for event in reader.feed(text) + reader.flush() if isinstance(event, Piece | ToolCall)]
    assert events == [
        Piece("Hm.", reasoning=True), Piece("Well."), ToolCall("f", {"x": [1, {"a": True}]})
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f()]", [ToolCall("f", {})]),
        ("f(x='a b', y=(1, 2))", [ToolCall("f", {"x": "a b", "y": [1, 2]})]),
        (" [a.b(x=-1, y=None), g(z=null)]\n", [ToolCall("a.b", {"x": -1, "y": None}), ToolCall("g", {"z": None})]),
        ('[{"name": "f", "arguments": {"x": 1}}]', [ToolCall("f", {"x": 1})]),
    ],
)
def test_calls(text: str, calls: list[ToolCall]) -> None:
    assert CALLS(text) == calls


INVALID = ("", "[]", "[f(", "[f(1)]", "[f(**x)]", "[f(x=y)]", "[f(x=g())]", "[f()()]", "\0", "-" * 100000 + "1")
NOT_JSON = ("f(x={1})", "f(x=1j)", "f(x=b'')", "f(x={[]: 1})", "f(x=1e999)")


QUOTED = ("it's", "'d'", 'say "no"', "a\nb", "x = 'y'\n", "", "\\t", "\x07", "é ☃")


@pytest.mark.parametrize("text", QUOTED)
def test_quotes_within_strings(text: str) -> None:
    assert CALLS(f"[f(x={text!r}, y=1)]") == [ToolCall("f", {"x": text, "y": 1})]
    if "\\" not in repr(text).replace("\\n", ""):
        assert CALLS(f"[f(x='{text}', y=1)]") == [ToolCall("f", {"x": text, "y": 1})]


@pytest.mark.parametrize("text", [*INVALID, *NOT_JSON])
def test_invalid_calls(text: str) -> None:
    with pytest.raises(ValueError, match="tool call"):
        CALLS(text)


def test_other_formats_are_not_detected() -> None:
    assert found(*TOKENS, architecture="llama")[0].name == "chatml"
    assert found("<|im_start|>", "<|im_end|>")[0].name == "chatml"
