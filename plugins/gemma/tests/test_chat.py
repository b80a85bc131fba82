import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from llamacli.chat.formats import ChatFormat, choose
from llamacli.chat.messages import Piece, ToolCall
from llamacli.chat.template import ChatTemplate
from llamacli.gguf import Metadata
from llamacli.testing.chats import BOS, CASES, EOS
from llamacli.testing.vocabularies import CONTROL, USER_DEFINED, byte_level
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from llamacli_gemma.chat import FORMATS

ROOT = Path(__file__).resolve().parents[3]
GOLDENS = json.loads((ROOT / "tests" / "goldens" / "chat_templates.json").read_text())
TEMPLATES = ROOT.parent / "shared" / "templates"

TURNS = dict.fromkeys(["<start_of_turn>", "<end_of_turn>"], CONTROL)
GEMMA_4 = {
    **dict.fromkeys(["<|turn>", "<turn|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_response>"], CONTROL),
    **dict.fromkeys(["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'], USER_DEFINED),
}


def found(
    architecture: str, tokens: dict[str, int], template: str | None = None
) -> tuple[ChatFormat, ChatTemplate, Tokenizer]:
    """The format of a file, its template and its tokenizer."""
    kinds = {BOS: CONTROL, EOS: CONTROL, **tokens}
    values: dict[str, Any] = byte_level([], kinds, bos_token_id=256, eos_token_id=257)
    values["general.architecture"] = architecture
    if template is not None:
        values["tokenizer.chat_template"] = template
    metadata = Metadata(values)
    tokenizer = tokenizer_from_metadata(metadata)
    fmt = choose(metadata, tokenizer, FORMATS)
    assert fmt.template is not None
    return fmt, ChatTemplate(fmt.template, tokenizer), tokenizer


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3"])
def test_turns(architecture: str) -> None:
    fmt, template, _ = found(architecture, TURNS)
    assert fmt.name == "gemma"
    talk = [{"role": role, "content": text} for role, text in (("user", " Hi "), ("assistant", "Hello."))]
    system = {"role": "system", "content": "Be brief."}
    assert template.render([system, *talk, talk[0]], add_generation_prompt=True).text == (
        f"{BOS}<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    )


def check_golden(template: ChatTemplate, name: str, labels: list[str]) -> None:
    for label in labels:
        text = template.render(**CASES[label]).text
        assert hashlib.sha256(text.encode()).hexdigest() == GOLDENS[name]["renderings"][label], (label, text)


def test_turns_match_gemma_2s_template() -> None:
    labels = ["single turn", "generation prompt", "multi turn", "ended", "thoughts of an earlier turn"]
    check_golden(found("gemma2", TURNS)[1], "google-gemma-2-2b-it.jinja", labels)


def test_gemma_4_matches_its_own_template() -> None:
    fmt, template, _ = found("gemma4", GEMMA_4)
    assert fmt.name == "gemma-4"
    check_golden(template, "google-gemma-4-31B-it.jinja", list(CASES))


NESTED = {
    "type": "object",
    "properties": {
        "place": {
            "type": "object",
            "description": "Where.",
            "nullable": True,
            "properties": {"name": {"type": "string"}, "at": {"type": "array", "items": {"type": "number"}}},
            "required": ["name"],
        },
        "days": {
            "type": "array",
            "items": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
        "kinds": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "sure": {"type": "boolean"},
    },
    "required": ["place", "sure"],
}


def test_gemma_4_nested_tools_match_its_own_template() -> None:
    path = TEMPLATES / "google-gemma-4-31B-it.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    _, ours, tokenizer = found("gemma4", GEMMA_4)
    arguments = {"place": {"name": "x", "at": [1.5, -2]}, "kinds": ["a"], "sure": True, "none": None, "empty": {}}
    call = {"id": "1", "type": "function", "function": {"name": "go", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Off I go.", "tool_calls": [call, call], "reasoning_content": "Why not?"},
        {"role": "tool", "name": "go", "tool_call_id": "1", "content": "done"},
        {"role": "tool", "name": "go", "tool_call_id": "1", "content": '{"b": 1}'},
    ]
    tool = {"type": "function", "function": {"name": "go", "description": "Goes.", "parameters": NESTED}}
    theirs = ChatTemplate(path.read_text(), tokenizer)
    for count in range(1, 5):
        for thinking in (True, False):
            case = {"messages": messages[:count], "tools": [tool], "enable_thinking": thinking}
            for prompting in (True, False):
                expected = theirs.render(**case, add_generation_prompt=prompting).text
                assert ours.render(**case, add_generation_prompt=prompting).text == expected


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_gemma_4_thinks_and_calls(cut: int) -> None:
    fmt, template, _ = found("gemma4", GEMMA_4)
    prompt = template.render(**CASES["generation prompt"], enable_thinking=True).text
    reader = fmt.syntax.reader(prompt, tools=True)
    text = (
        "<|channel>thought\nLet me see.\n<channel|>One moment.<|tool_call>call:go{to:<|\"|>a, {b}: <x><|\"|>,n:2}"
        "<tool_call|><|tool_call>call:stop{}<tool_call|>"
    )  # fmt: skip
    events = [event for at in range(0, len(text), cut) for event in reader.feed(text[at : at + cut])] + reader.flush()
    pieces = [event for event in events if isinstance(event, Piece)]
    assert "".join(piece.text for piece in pieces if piece.reasoning) == "Let me see."
    assert "".join(piece.text for piece in pieces if not piece.reasoning) == "One moment."
    calls = [event for event in events if isinstance(event, ToolCall)]
    assert calls == [ToolCall("go", {"to": "a, {b}: <x>", "n": 2}), ToolCall("stop", {})]


def test_closed_channel_in_the_prompt_is_not_reasoning() -> None:
    fmt, template, _ = found("gemma4", GEMMA_4)
    reader = fmt.syntax.reader(template.render(**CASES["generation prompt"]).text, tools=False)
    assert reader.feed("Hi.") + reader.flush() == [Piece("Hi.")]
