import itertools
import json
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.chat.calls import json_calls, tagged_calls
from llamacli.chat.channels import HARMONY, Channels, _words_after
from llamacli.chat.messages import CallDelta, Piece, ToolCall
from llamacli.chat.syntax import (
    HERMES,
    PLAIN,
    THINKING,
    Calls,
    Span,
    Spans,
    StopText,
    Syntax,
)

TAGS = '<weather><city="Oslo"></weather>'
IN_TAGS = tagged_calls(r"<(?P<name>\w+)>(?P<arguments>.*?)</(?P=name)>", r'<(?P<name>\w+)="(?P<value>[^"]*)">')
TAGGED = Spans(calls=Calls("<c>", "</c>", IN_TAGS))
LISTED = Spans(calls=Calls("[CALLS]", "", json_calls))
BARE = Spans(calls=Calls("<|tag|>", "", json_calls, bare=True))
THOUGHT = Spans(Span("<|channel>thought", "<channel|>"))
WEATHER = ToolCall("weather", {"city": "Oslo"})
Parted = tuple[str, str, list[ToolCall]]
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


def read(syntax: Syntax, pieces: Sequence[str], prompt: str = "", tools: bool = True) -> Parted:
    """Content, reasoning and calls of a reply in pieces."""
    reader = syntax.reader(prompt, tools=tools)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.flush()
    assert all(event.text for event in events if isinstance(event, Piece))
    written = ""
    for event in events:
        if isinstance(event, CallDelta):
            written += event.text
        elif isinstance(event, ToolCall):
            assert written == event.text
            written = ""
    assert not written
    return (
        "".join(event.text for event in events if isinstance(event, Piece) and not event.reasoning),
        "".join(event.text for event in events if isinstance(event, Piece) and event.reasoning),
        [event for event in events if isinstance(event, ToolCall)],
    )


def cut_at(text: str, cuts: list[int]) -> list[str]:
    at = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in itertools.pairwise(at)]


CASES: dict[str, tuple[Syntax, str, str, Parted]] = {
    "text": (PLAIN, "", " Hi <think>x</think>\n", (" Hi <think>x</think>\n", "", [])),
    "thought": (THINKING, "", "<think>\nWell.\nYes.\n</think>\n\nHi.\n", ("Hi.\n", "Well.\nYes.", [])),
    "empty thought": (THINKING, "", "<think>\n\n</think>\n\nHi.", ("Hi.", "", [])),
    "opened by the prompt": (THINKING, "assistant\n<think>\n", "Well.</think>Hi.", ("Hi.", "Well.", [])),
    "closed by the prompt": (THINKING, "<think>\n\n</think>\n\n", "Hi.", ("Hi.", "", [])),
    "thought that was never opened": (THINKING, "", " </think>\n\nHi.", ("Hi.", "", [])),
    "endless thought": (THINKING, "", "<think>Well.\n\n", ("", "Well.", [])),
    "thought after text": (THINKING, "", "Hm. <think>x</think> y", ("Hm.y", "x", [])),
    "beginning of a marker": (THINKING, "", "a <thin", ("a <thin", "", [])),
    "marker of two": (THOUGHT, "", "<|channel>thought\nWell.\n<channel|>Hi.", ("Hi.", "Well.", [])),
    "call": (HERMES, "", f"<tool_call>\n{CALL}\n</tool_call>", ("", "", [WEATHER])),
    "thought, text and two calls": (
        HERMES,
        "",
        f"<think>\nx\n</think>\n\nLet me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
        ("Let me see.", "x", [WEATHER, WEATHER]),
    ),
    "call that is none": (HERMES, "", "<tool_call>no</tool_call> x", ("<tool_call>no</tool_call> x", "", [])),
    "call without its end": (HERMES, "", f"a <tool_call>{CALL}", ("a", "", [WEATHER])),
    "call cut before its name": (HERMES, "", '<tool_call>{"name', ("", "", [])),
    "call cut after its name": (HERMES, "", '<tool_call>{"name": "f", "a', ("", "", [ToolCall("f", partial="")])),
    "call cut in a string": (
        HERMES,
        "",
        'a<tool_call>{"name": "f", "arguments": {"x": "a\\u00',
        ("a", "", [ToolCall("f", partial='{"x": "a')]),
    ),
    "call cut in a number": (
        HERMES,
        "",
        '<tool_call>{"name": "f", "arguments": {"x": [1,2',
        ("", "", [ToolCall("f", partial='{"x": [1, 2')]),
    ),
    "call with more behind it": (
        HERMES,
        "",
        f"<tool_call>{CALL}}} and</tool_call> more",
        ("} andmore", "", [WEATHER]),
    ),
    "call whose arguments come first": (
        HERMES,
        "",
        '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>',
        ("", "", [WEATHER]),
    ),
    "second call cut": (LISTED, "", f'[CALLS][{CALL}, {{"name": ', ("", "", [WEATHER])),
    "tags": (TAGGED, "", f"a<c>{TAGS}</c>\nb", ("ab", "", [WEATHER])),
    "tags, two": (TAGGED, "", f"<c>{TAGS} {TAGS}</c><c>{TAGS}</c>", ("", "", [WEATHER] * 3)),
    "marker in a value": (
        TAGGED,
        "",
        '<c><weather><city="a</c>b"></weather></c>',
        ("", "", [ToolCall("weather", {"city": "a</c>b"})]),
    ),
    "tags without the marker": (TAGGED, "", f"a<c>{TAGS}", ("a", "", [WEATHER])),
    "tags, cut": (TAGGED, "", "a<c><weather><city=Os", ("a", "", [])),
    "tags that are none": (TAGGED, "", "a<c></c> b", ("a<c></c> b", "", [])),
    "list": (LISTED, "", f"[CALLS][{CALL}, {CALL}]", ("", "", [WEATHER, WEATHER])),
    "bare": (BARE, "", ' {"name": "weather", "parameters": {"city": "Oslo"}}', ("", "", [WEATHER])),
    "bare, two": (BARE, "", f"{CALL}; {CALL}", ("", "", [WEATHER, WEATHER])),
    "bare, but text": (BARE, "", '{"a": 1} is JSON', ('{"a": 1} is JSON', "", [])),
    "brace later": (BARE, "", f"Here: {CALL}", (f"Here: {CALL}", "", [])),
    "tagged": (BARE, "", f"x<|tag|>{CALL}", ("x", "", [WEATHER])),
    "channels": (
        HARMONY,
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>Hi.\n",
        ("Hi.\n", "Well.", []),
    ),
    "two thoughts": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>B<|end|>",
        ("B", "A", []),
    ),
    "several thoughts and texts": (
        HARMONY,
        "<|start|>assistant",
        "<|start|>assistant".join(
            f"<|channel|>{name}<|message|>{text}<|end|>"
            for name, text in (
                ("analysis", "A"),
                ("analysis", "B"),
                ("commentary", "C"),
                ("final", "D"),
                ("other", "E"),
            )
        ),
        ("C\n\nD", "A\n\nB\n\nE", []),
    ),
    "recipient in the role": (
        HARMONY,
        "<|start|>assistant",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
        ("", "", [WEATHER]),
    ),
    "recipient in the channel": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>x<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        ("", "x", [WEATHER]),
    ),
    "message to a tool, cut": (
        HARMONY,
        "<|start|>assistant",
        '<|channel|>commentary to=functions.weather<|message|>{"city": "Os',
        ("", "", [ToolCall("weather", partial='{"city": "Os')]),
    ),
    "arguments that are none": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>commentary to=functions.weather<|message|>Oslo",
        ("Oslo", "", []),
    ),
    "channel opened by the prompt": (
        HARMONY,
        "<|start|>assistant<|channel|>final<|message|>",
        "Hi.",
        ("Hi.", "", []),
    ),
    "no channels at all": (HARMONY, "<|start|>assistant", "Hi, you <|there", ("Hi, you <|there", "", [])),
    "channel cut": (HARMONY, "<|start|>assistant", "<|channel|>comm", ("", "", [])),
    "recipient cut": (HARMONY, "<|start|>assistant", " to=functions.wea", ("", "", [])),
    "name in tags, cut": (
        attrs.evolve(HARMONY, calls=HERMES.calls),
        "<|start|>assistant",
        '<|channel|>commentary to=functions.weather<|message|><tool_call>{"na',
        ("", "", []),
    ),
    "message without its end": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>A<|start|>assistant<|channel|>final<|message|>B",
        ("B", "A", []),
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(cuts=st.lists(st.integers(0, 200)))
def test_parsing_does_not_depend_on_pieces(name: str, cuts: list[int]) -> None:
    syntax, prompt, text, expected = CASES[name]
    pieces = cut_at(text, cuts)
    assert read(syntax, pieces, prompt) == expected


@pytest.mark.parametrize("name", CASES)
def test_parsing_character_by_character(name: str) -> None:
    syntax, prompt, text, expected = CASES[name]
    assert read(syntax, list(text), prompt) == expected


FRAGMENTS = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<",
            "think>",
            "</",
            "tool_call>",
            "\n",
            " ",
            "a",
            CALL,
        ),
        *("{", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "final", "analysis", " to=functions.f", "<|"),
    ]
)


@pytest.mark.parametrize("syntax", [PLAIN, HERMES, THINKING, LISTED, BARE, HARMONY])
@given(text=st.lists(FRAGMENTS).map("".join), cuts=st.lists(st.integers(0, 300)), tools=st.booleans())
def test_parsing_any_text_does_not_depend_on_pieces(syntax: Syntax, text: str, cuts: list[int], tools: bool) -> None:
    pieces = cut_at(text, cuts)
    whole = read(syntax, [text], "<|start|>assistant", tools)
    assert read(syntax, pieces, "<|start|>assistant", tools) == whole


def test_text_is_streamed_as_soon_as_it_is_certain() -> None:
    reader = HERMES.reader("", tools=True)
    assert reader.feed("Hello <b") == [Piece("Hello <b")]
    assert reader.feed("> ") == [Piece(">")]
    assert reader.feed("x<tool") == [Piece(" x")]
    assert reader.feed("box>") == [Piece("<toolbox>")]
    assert reader.feed("<think>why") == [Piece("why", reasoning=True)]


def test_arguments_are_streamed_as_they_are_written() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x":[1,2.50], "y": "a\\u00e9\\n'
    reader = HERMES.reader("", tools=True)
    events = [event for character in text for event in reader.feed(character)]
    assert {type(event) for event in events} == {CallDelta}
    assert events[0] == CallDelta("f", "")
    assert "".join(event.text for event in events) == '{"x": [1, 2.5], "y": "aé\\n'
    assert reader.feed('"}}</tool_call>')[0] == CallDelta("f", '"}')


@given(st.text("ab[]<>", max_size=20), st.sampled_from(["", "[a]", "aa", "<"]), st.lists(st.integers(0, 20)))
def test_stop_text_does_not_depend_on_pieces(text: str, end: str, cuts: list[int]) -> None:
    ending = StopText(end)
    passed = ""
    for piece in cut_at(text, cuts):
        passed += ending.feed(piece)
        if ending.found:
            break
    assert (passed if ending.found else passed + ending.flush()) == (text.partition(end)[0] if end else text)
    assert ending.found == (bool(end) and end in text)


@pytest.mark.parametrize(
    ("text", "passed", "is_found"),
    [
        ("a <sep>b", "a", True),
        ("a<sep>call:b <sep>c", "a<sep>call:b", True),
        ("a<sep>call:b", "a<sep>call:b", False),
        ("a<sep>ca", "a", True),
        ("a<sep>", "a", True),
        ("a<se", "a<se", False),
    ],
)
def test_stop_text_unless_other_text_begins_with_it(text: str, passed: str, is_found: bool) -> None:
    for size in range(1, len(text) + 1):
        ending = StopText("<sep>", "<sep>call:")
        found = "".join(ending.feed(text[at : at + size]) for at in range(0, len(text), size) if not ending.found)
        assert (found + ending.flush(), ending.found) == (passed, is_found)


RECIPIENTS = Channels(starts=">>>", channel="", begins="\n", ends=(), final="all", recipient="")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all\nHi.", ("Hi.", "", [])),
        ('weather\n{"city": "a >>> b"}', ("", "", [ToolCall("weather", {"city": "a >>> b"})])),
        ('all\nHi.\n>>>weather\n{"city": "Oslo"}', ("Hi.", "", [WEATHER])),
        ("all\nType\n>>> print\n>>>other\n{}", ("Type\n>>> print\n>>>other\n{}", "", [])),
        ("other\n{}", ("other\n{}", "", [])),
        ("Hi.", ("Hi.", "", [])),
    ],
)
def test_recipients_are_tools_that_were_given(text: str, expected: Parted) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for size in range(1, len(text) + 1):
        reader = RECIPIENTS.reader("<user>Hi<assistant>>>>", tools=tools)
        events = [event for at in range(0, len(text), size) for event in reader.feed(text[at : at + size])]
        events += reader.flush()
        content = "".join(event.text for event in events if isinstance(event, Piece))
        assert (content, "", [event for event in events if isinstance(event, ToolCall)]) == expected


def test_markers_of_reasoning_by_the_prompt() -> None:
    assert PLAIN.reasoning_markers("<think>") == ()
    assert THINKING.reasoning_markers("Hi <think> ") == ("", "</think>")
    assert THINKING.reasoning_markers("<think>Hi") == ("<think>", "</think>")
    assert HARMONY.reasoning_markers("") == ("", "<|channel|>final", "<|message|>")


def test_words_after_a_text_of_a_header() -> None:
    assert _words_after("@", "a@one @ two") == ["one", "two"]
    assert _words_after(" to=", "auto=one to=two<") == ["two"]
    assert _words_after("", "a.b c") == ["a.b", "c"]


def test_calls_are_parsed_only_with_tools() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert read(HERMES, [text], tools=False) == (text, "", [])
    assert read(BARE, [CALL], tools=False) == (CALL, "", [])


@pytest.mark.parametrize(
    "text", ["", "1", "[1]", "{}", '{"name": 1}', '{"name": "f", "arguments": [1]}', "x", "[" * 99999]
)
def test_invalid_calls_stay_text(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        json_calls(text)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1.", "01", "tru", "'a'"])
def test_calls_that_json_cannot_express_are_partial(number: str) -> None:
    arguments = f'{{"a": {number}}}'
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(HERMES, [call]) == ("", "", [ToolCall("f", partial=arguments + "}")])
    message = f"<|channel|>commentary to=functions.f<|message|>{arguments}<|end|>"
    assert read(HARMONY, [message], "<|start|>assistant") == ("", "", [ToolCall("f", partial=arguments)])


@pytest.mark.parametrize("other", ['"argumends": {}', '"city": ["Oslo"]'])
def test_an_object_with_arguments_under_other_keys_is_text(other: str) -> None:
    call = f'{{"name": "weather", {other}}}'
    assert read(BARE, [call]) == (call, "", [])


def test_lone_surrogates_of_calls_are_replaced() -> None:
    call = r'{"name": "f\ud83d", "arguments": {"\udd8a": ["\ud83e\udd8a", "\ud83d"]}}'
    calls = [ToolCall("f\ufffd", {"\ufffd": ["🦊", "\ufffd"]})]
    assert read(HERMES, [f"<tool_call>{call}</tool_call>"]) == ("", "", calls)


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), st.integers() | st.text())), min_size=1))
def test_json_calls_round_trip(calls: list[tuple[str, dict]]) -> None:
    expected = [ToolCall(name, arguments) for name, arguments in calls]
    plain = [{"name": name, "arguments": arguments} for name, arguments in calls]
    nested = [{"type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for n, a in calls]
    for text in (json.dumps(plain), json.dumps(nested), "\n".join(map(json.dumps, plain))):
        assert json_calls(text) == expected


@pytest.mark.parametrize("text", ["", "f", "<f><a=1>", "<f>x</f>", "<f></f>y"])
def test_calls_in_tags_that_are_not_whole(text: str) -> None:
    parse = tagged_calls(r"<(?P<name>\w+)>(?P<arguments>.*?)</(?P=name)>", r"<(?P<name>\w)=(?P<value>[^>]*)>")
    assert parse(' <f><a=1> <b="x"></f>\n<g></g>') == [ToolCall("f", {"a": 1, "b": '"x"'}), ToolCall("g")]
    with pytest.raises(ValueError, match="tool call"):
        parse(text)
