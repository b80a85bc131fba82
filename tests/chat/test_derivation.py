"""Syntaxes derived from small templates, and from llama.cpp's where present."""

import itertools
import json
import os
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamacli.chat import environment, isolation
from llamacli.chat.codec import ChatCodec
from llamacli.chat.constraints import ToolUse, reply_constraint
from llamacli.chat.derivation import derive
from llamacli.chat.messages import CallDelta, Piece, ToolCall
from llamacli.chat.syntax import Span
from llamacli.chat.template import ChatTemplate
from llamacli.errors import ChatTemplateError, InvalidRequestError
from llamacli.gguf import Metadata
from llamacli.sampling import SamplingParams, build_chain
from llamacli.testing.vocabularies import CONTROL, byte_level
from llamacli.tokenizer import tokenizer_from_metadata

SOURCES = Path(os.environ.get("LLAMA_CPP", "/nonexistent"))
"""Folder of llama.cpp's sources."""

TURNS = """\
{{- tools | tojson if tools -}}
{%- for m in messages -%}
    {{- '<s>' + m.role + ':' -}}
    {%- if m.reasoning_content -%}{{- '<muse>' + m.reasoning_content + '</muse>' -}}{%- endif -%}
    {{- m.content or '' -}}
    CALLS
    {{- '</s>' -}}
{%- endfor -%}
{{- '<s>assistant:' if add_generation_prompt -}}
"""
LOOP = "{%- for c in m.tool_calls -%}{%- set f = c.function -%}ONE{%- endfor -%}"
PAIRS = "{%- for k, v in f.arguments.items() -%}PAIR{%- endfor -%}"
VALUE = "(v if v is string else v | tojson)"


def each(one: str) -> str:
    return LOOP.replace("ONE", one)


def section(opens: str, one: str, closes: str) -> str:
    return f"{{%- if m.tool_calls -%}}{{{{- '{opens}' -}}}}{each(one)}{{{{- '{closes}' -}}}}{{%- endif -%}}"


def pairs(pair: str) -> str:
    return PAIRS.replace("PAIR", pair)


JSON = "{{- '<call>\\n' + {'name': f.name, 'arguments': f.arguments} | tojson + '\\n</call>' -}}"
NOTATIONS = {
    "JSON": each(JSON),
    "JSON with other keys": each(
        "{{- '<call>' + {'id': c.id, 'tool': f.name, 'parameters': f.arguments} | tojson + '</call>' -}}"
    ),
    "list in JSON": section(
        "[CALLS][", "{{- {'name': f.name, 'arguments': f.arguments} | tojson + (']' if loop.last else ', ') -}}", ""
    ),
    "name as key": section(
        "<|calls|>[", "{{- {f.name: f.arguments} | tojson + (', ' if not loop.last else '') -}}", "]<|end|>"
    ),
    "name outside of JSON": each("{{- '[CALL]' + f.name + '[ARGS]' + f.arguments | tojson -}}"),
    "name and id outside of JSON": each("{{- '[CALL]' + f.name + '[ID]' + c.id + '[ARGS]' + f.arguments | tojson -}}"),
    "section of names": section(
        "<|calls|>", "{{- '<|call|>' + f.name + '<|sep|>' + f.arguments | tojson + '<|/call|>' -}}", "<|/calls|>"
    ),
    "fenced JSON": section(
        "<|calls|>",
        "{{- '<|call|>' + f.name + '\\n```json\\n' + f.arguments | tojson + '\\n```<|/call|>' -}}",
        "<|/calls|>",
    ),
    "name in the id": section(
        "<|calls|>", "{{- '<|call|>' + c.id + '<|args|>' + f.arguments | tojson + '<|/call|>' -}}", "<|/calls|>"
    ),
    "tags": each(
        "{{- '<call>\\n<function=' + f.name + '>\\n' -}}"
        + pairs("{{- '<parameter=' + k + '>\\n' + " + VALUE + " + '\\n</parameter>\\n' -}}")
        + "{{- '</function>\\n</call>' -}}"
    ),
    "tags in a section": section(
        "<calls>\\n",
        "{{- '<invoke name=\"' + f.name + '\">\\n' -}}"
        + pairs("{{- '<parameter name=\"' + k + '\">' + " + VALUE + " + '</parameter>\\n' -}}")
        + "{{- '</invoke>\\n' -}}",
        "</calls>",
    ),
    "tags for key and value": each(
        "{{- '<call>' + f.name -}}"
        + pairs("{{- '<key>' + k + '</key><value>' + " + VALUE + " + '</value>' -}}")
        + "{{- '</call>' -}}"
    ),
    "tags with types": section(
        "<calls>",
        "{{- '<invoke name=\"' + f.name + '\">' -}}"
        + pairs(
            "{{- '<parameter name=\"' + k + '\" string=\"' + ('true' if v is string else 'false') + '\">' + "
            + VALUE
            + " + '</parameter>' -}}"
        )
        + "{{- '</invoke>' -}}",
        "</calls>",
    ),
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "files.write-é",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["path"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "roll",
            "parameters": {
                "type": "object",
                "properties": {
                    "on": {"type": "boolean"},
                    "dice": {"type": "array", "items": {"type": "integer"}},
                    "more": {"type": "object"},
                },
            },
        },
    },
]
PLAIN_TOOLS = [
    {"type": "function", "function": {**tool["function"], "name": name}}
    for name, tool in zip(("save", "roll"), TOOLS, strict=True)
]
WRITE = ("files.write-é", {"path": "a b.c", "text": '    {"a": "</call> é"}\n', "n": 3})
TEXTS = ("12345", "true", '{"a": 1}', "[1, 2]", "null", "a <b> c & 'd'", "  x\n\n y", "None", '"q"')
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("files.write-é", {"path": "x"})],
    "two": [WRITE, ("roll", {"on": True, "dice": [1, 2]})],
    "the same twice": [("roll", {"on": False}), ("roll", {"on": False})],
    "no arguments": [("roll", {})],
    "nested": [("roll", {"more": {"a": [1, {"b": None}], "c": "d e"}})],
    **{f"text {text!r}": [("files.write-é", {"path": text})] for text in TEXTS},
}


def small(calls: str, begins: str = "") -> ChatCodec:
    template = begins + TURNS.replace("CALLS", calls)
    values = byte_level([], dict.fromkeys(["<s>", "</s>"], CONTROL), bos_token_id=256, eos_token_id=257)
    metadata = Metadata({**values, "general.architecture": "none", "tokenizer.chat_template": template})
    return ChatCodec(tokenizer_from_metadata(metadata), metadata)


@pytest.fixture(scope="module")
def codecs() -> dict[str, ChatCodec]:
    return {name: small(calls) for name, calls in NOTATIONS.items()}


def _common(one: str, other: str) -> str:
    """Text that both begin with."""
    return one[
        : next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    ]


def rendered(codec: ChatCodec, calls: list[tuple[str, dict[str, Any]]], **message: Any) -> str | None:
    """Reply as the template renders it, None if it does not."""
    user = {"role": "user", "content": "Hi"}
    ids = [f"functions.{name}:{n}" for n, (name, _) in enumerate(calls)]
    made = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": given}}
        for number, (name, given) in zip(ids, calls, strict=True)
    ]
    for answer in ({"content": "", "tool_calls": made, **message}, {"content": None, "tool_calls": made, **message}):
        try:
            prompt = codec.render([user], tools=TOOLS).text
            whole = codec.render([user, {"role": "assistant", **answer}], tools=TOOLS, add_generation_prompt=False).text
        except ChatTemplateError:
            continue
        start = len(re.sub(r"<[^<>]*$|\[[A-Z_]*$", "", _common(prompt, whole)))
        if calls[0][0] in whole[start:]:
            ends = codec.ends()
            texts = [codec.tokenizer.token_text(token) for token in ends.tokens] + [
                ends.text,
                "<|calls|>",
                "<|eom_id|>",
            ]
            return re.sub(rf"(?:\s*(?:{'|'.join(map(re.escape, filter(None, texts)))})\s*)+$", "", whole[start:])
    return None


def read(codec: ChatCodec, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = codec.syntax.reader(codec.render([{"role": "user", "content": "Hi"}], tools=TOOLS).text, tools=TOOLS)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.flush()
    return (
        "".join(event.text for event in events if isinstance(event, Piece) and not event.reasoning),
        "".join(event.text for event in events if isinstance(event, Piece) and event.reasoning),
        [(event.name, given(event)) for event in events if isinstance(event, ToolCall)],
    )


def given(call: ToolCall) -> Any:
    """Arguments of a call, text if they are cut."""
    return call.arguments if call.partial is None else call.partial


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("notation", NOTATIONS)
def test_calls_as_a_template_writes_them_are_read(notation: str, kind: str, codecs: dict[str, ChatCodec]) -> None:
    text = rendered(codecs[notation], CALLS[kind], reasoning_content="Hm.\nYes.")
    assert text is not None
    expected = ("", "Hm.\nYes.", CALLS[kind])
    assert read(codecs[notation], [text]) == expected
    assert read(codecs[notation], list(text)) == expected


@pytest.mark.parametrize("notation", NOTATIONS)
def test_every_split(notation: str, codecs: dict[str, ChatCodec]) -> None:
    text = rendered(codecs[notation], CALLS["two"], content="Look:")
    assert text is not None
    for at in range(len(text)):
        assert read(codecs[notation], [text[:at], text[at:]]) == ("Look:", "", CALLS["two"])


@pytest.mark.parametrize("notation", NOTATIONS)
def test_calls_of_other_tools_are_text(notation: str, codecs: dict[str, ChatCodec]) -> None:
    text = rendered(codecs[notation], [("other", {"x": "1"})])
    assert text is not None
    content, _, calls = read(codecs[notation], list(text))
    assert (content.strip(), calls) == (text.strip(), [])


@pytest.mark.parametrize("notation", NOTATIONS)
def test_cut_calls_are_never_lost(notation: str, codecs: dict[str, ChatCodec]) -> None:
    text = rendered(codecs[notation], CALLS["two"])
    assert text is not None
    syntax, names = codecs[notation].syntax, [name for name, _ in CALLS["two"]]
    first_key = text.index(next(iter(CALLS["two"][0][1])), text.index(names[0]) + len(names[0]))
    for end in range(1, len(text)):
        whole, parts = read(codecs[notation], [text[:end]]), read(codecs[notation], list(text[:end]))
        assert whole == parts
        assert whole[2] or end <= first_key
        assert not any(marker and marker in whole[0] for marker in syntax.markers)
        assert [name for name, _ in whole[2]] == names[: len(whole[2])]
        for (_, found), (_, expected) in zip(whole[2], CALLS["two"], strict=False):
            written = json.dumps(expected, ensure_ascii=False)
            assert found == expected or written.startswith(found)
    assert len(whole[2]) == 2


@pytest.mark.parametrize("notation", NOTATIONS)
def test_arguments_are_streamed(notation: str, codecs: dict[str, ChatCodec]) -> None:
    call = ("files.write-é", {"path": "a b.c", "text": 'long "text"\n' * 20})
    text = rendered(codecs[notation], [call])
    assert text is not None
    reader, sizes = codecs[notation].syntax.reader("", tools=TOOLS), [0]
    for character in text:
        for event in reader.feed(character):
            assert isinstance(event, CallDelta | ToolCall)
            if isinstance(event, CallDelta):
                sizes.append(sizes[-1] + len(event.text))
    assert sizes[-1] == len(json.dumps(call[1], ensure_ascii=False))
    assert len(sizes) > 200


def test_a_template_that_tells_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    ticking = SimpleNamespace(now=lambda: datetime(2025, 3, 9) + timedelta(seconds=next(ticks)))
    monkeypatch.setattr(environment, "datetime", ticking)
    told = small(each(JSON), "{{- strftime_now('%S') -}}")
    assert next(ticks) > 0
    assert told.syntax == small(each(JSON)).syntax


def test_reasoning() -> None:
    syntax = small(each(JSON)).syntax
    assert syntax.reasoning == Span("<muse>", "</muse>")  # type: ignore[union-attr]


def test_a_call_ends_reasoning_that_is_not_closed(codecs: dict[str, ChatCodec]) -> None:
    call = rendered(codecs["tags"], CALLS["one"])
    assert read(codecs["tags"], [f"<muse>I look.\n{call}"]) == ("", "I look.", CALLS["one"])
    thought = f"I could {call} but"
    assert read(codecs["tags"], [f"<muse>{thought}</muse>No."]) == ("No.", thought, [])


def test_a_probe_that_took_too_long_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = small(each(JSON).replace("<call>", "<late>"))
    render, n_calls = isolation.run, [0]

    def run(job: Mapping[str, Any]) -> dict[str, Any]:
        n_calls[0] += 1
        late = {"error": "it takes more than 2 s", "line": None, "failed": "rendered", "limit": True}
        return late if "messages" in job else render(job)

    template = ChatTemplate(codec.template.source + " ", codec.tokenizer)
    monkeypatch.setattr(isolation, "run", run)
    assert derive(template).calls is None  # type: ignore[union-attr]
    monkeypatch.undo()
    again = derive(ChatTemplate(template.source, codec.tokenizer))
    assert again.calls.opens == "<late>"  # type: ignore[union-attr]
    assert derive(template) is again
    assert n_calls[0] > 1


def test_calls_without_the_first_marker(codecs: dict[str, ChatCodec]) -> None:
    call = rendered(codecs["tags"], CALLS["one"])
    assert call is not None
    assert read(codecs["tags"], ["So: ", call.removeprefix("<call>\n")]) == ("So:", "", CALLS["one"])


# --- grammars


@pytest.mark.parametrize("required", [True, False], ids=["required", "auto"])
@pytest.mark.parametrize("notation", NOTATIONS)
def test_grammars_allow_what_the_template_renders(notation: str, required: bool, codecs: dict[str, ChatCodec]) -> None:
    pytest.importorskip("llguidance")
    codec = codecs[notation]
    made = reply_constraint(codec, "", None, None, ToolUse(PLAIN_TOOLS, required=required))

    def allows(text: str) -> bool:
        params = SamplingParams(grammar=made.grammar, grammar_triggers=made.triggers, grammar_after=made.after)
        chain = build_chain(params, codec.tokenizer)
        try:
            for token in [*codec.tokenizer.encode(text, add_special=False), codec.tokenizer.eos_id]:
                chain.accept(token)
        except InvalidRequestError:
            return False
        return True

    calls = [[("save", {"path": "a b", "n": 3})], [("save", {"path": "{}"}), ("roll", {"on": True})], [("roll", {})]]
    for wanted in calls:
        text = rendered(codec, wanted)
        assert text is not None
        assert allows(text), text
        assert allows(f"<muse>Hm.</muse>\n{text}"), text
    other = rendered(codec, [("other", {"path": "a"})])
    assert other is not None
    assert not allows(other)
    assert allows("Hi.") is not required
    assert allows(f"<muse>{other}</muse>Hi.") is not required
