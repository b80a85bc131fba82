"""Text of a choice: stop strings, reply formats, log-probabilities, ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.chat.messages import ToolCall
from llamacli.chat.syntax import HERMES, PLAIN, THINKING
from llamacli.gguf import Metadata
from llamacli.sampling import LogProbs
from llamacli.serve.requests import Event, Finished, GenerationRequest, ReplyFormat, TextDelta, ToolCallDelta
from llamacli.serve.texts import ChoiceText
from llamacli.testing.vocabularies import vocabulary
from llamacli.tokenizer import tokenizer_from_metadata

TOKENIZER = tokenizer_from_metadata(Metadata(vocabulary("spm")))
PROMPT = tuple(TOKENIZER.encode("a ball"))
EOS = 2


def fed(tokens: list[int], *, logprobs: bool = False, max_tokens: int = 1000, **fields: Any) -> list[Event]:
    """Events of tokens, up to the end of the text."""
    request = GenerationRequest(id="a", model="m", prompts=(PROMPT,), **fields)
    text = ChoiceText(request, 3, TOKENIZER, PROMPT, max_tokens)
    events: list[Event] = []
    for token in tokens:
        assert text.finished is None
        events += text.take(token, LogProbs(-1.0, ((token, -1.0), (5, -2.0))) if logprobs else None)
        if text.finished is not None:
            break
    if text.finished is None:
        events += text.finish("length")
    assert events[-1] == text.finished
    return events


def ids(text: str) -> list[int]:
    """Tokens of a text that follows the prompt."""
    return TOKENIZER.encode_run(text, continues=True)


def joined(events: list[Event], *, reasoning: bool = False) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.reasoning == reasoning)


def end(events: list[Event]) -> Finished:
    found = events[-1]
    assert isinstance(found, Finished)
    return found


def test_text_follows_the_prompt_and_ends_at_an_end_token() -> None:
    events = fed([*ids(" was big"), EOS, 300])
    assert joined(events) == " was big"
    assert end(events) == Finished(3, "stop")
    assert all(isinstance(event, TextDelta) and event.index == 3 for event in events[:-1])


@pytest.mark.parametrize(("said", "has_newline"), [("a ball", False), ("a\nball", True)])
def test_newlines_are_noted(said: str, has_newline: bool) -> None:
    text = ChoiceText(GenerationRequest(id="a", model="m", prompts=(PROMPT,)), 0, TOKENIZER, PROMPT, 100)
    for token in ids(said):
        text.take(token)
    text.finish("length")
    assert text.has_newline == has_newline


def test_end_tokens_may_be_ignored() -> None:
    events = fed([*ids(" was"), EOS, *ids(" big")], ignore_eos=True)
    assert joined(events) == " was big"


def test_limit_ends_the_text_and_flushes_what_is_held_back() -> None:
    tokens = TOKENIZER.encode_run("é€", continues=True)
    assert joined(fed(tokens)) == "é€"
    events = fed(tokens[:-1], max_tokens=len(tokens) - 1)
    assert joined(events) == "é\ufffd"
    assert end(events).reason == "length"


def test_bytes_that_the_prompt_has_left_unfinished_are_no_text_of_a_reply_without_bytes() -> None:
    prompt = (*PROMPT, *TOKENIZER.encode_run("é", continues=True)[:1])
    for tokens, expected in ([], ""), ([0], ""), (TOKENIZER.encode_run("é", continues=True)[1:], "é"):
        text = ChoiceText(
            GenerationRequest(id="a", model="m", prompts=(prompt,), ignore_eos=True), 0, TOKENIZER, prompt, 9
        )
        assert joined([event for token in tokens for event in text.take(token)] + text.finish("length")) == expected


@given(
    st.text("abc ", max_size=20),
    st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    events = fed([*ids(text), EOS], stop=tuple(stops), logprobs=True)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    expected, stop = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    assert joined(events) == expected
    assert end(events).stop_string == stop


@given(st.text("abé€𝄞 ", max_size=12), st.sampled_from([(), ("b",), ("aa", "é€")]))
def test_bytes_of_the_tokens_are_the_text(text: str, stops: tuple[str, ...]) -> None:
    events = fed([*ids(text), EOS], stop=stops, logprobs=True)
    pieces = b"".join(token.piece for event in events if isinstance(event, TextDelta) for token in event.tokens)
    if end(events).stop_string:
        assert pieces.startswith(joined(events).encode()), "a token may hold the end of the text and the stop string"
    else:
        assert pieces == joined(events).encode() == text.encode()


def test_tokens_come_with_the_text_that_they_begin_in() -> None:
    events = fed([*ids("ab"), *ids("c"), EOS], stop=("bcd",), logprobs=True)
    deltas = [(event.text, [token.piece for token in event.tokens]) for event in events[:-1]]  # type: ignore[union-attr]
    assert deltas == [("a", [b"a"]), ("bc", [b"b", b"c"])]
    top = events[0].tokens[0].top  # type: ignore[union-attr]
    assert [(token, value) for token, _, value in top] == [(ids("a")[0], -1.0), (5, -2.0)]


def reply(syntax: Any = PLAIN, **fields: Any) -> ReplyFormat:
    return ReplyFormat(syntax=syntax, **fields)


def test_reasoning_comes_apart_and_stop_strings_are_not_searched_in_it() -> None:
    tokens = ids("<think>big dog</think>the dog was big")
    events = fed([*tokens, EOS], reply=reply(THINKING), stop=("dog",))
    assert joined(events, reasoning=True) == "big dog"
    assert joined(events) == "the "
    assert end(events) == Finished(3, "stop", "dog")


def test_tokens_that_come_at_once_are_held_back_each_for_its_own_text() -> None:
    tokens = ids("<txa")
    assert len(tokens) == 4
    events = fed([*tokens, EOS], reply=reply(THINKING), stop=("xyz",), logprobs=True)
    deltas = [(event.text, [token.piece for token in event.tokens]) for event in events[:-1]]  # type: ignore[union-attr]
    assert deltas == [("<t", [b"<", b"t"]), ("xa", [b"x", b"a"])]


def test_reasoning_that_the_prompt_has_opened_is_counted() -> None:
    request = GenerationRequest(
        id="a", model="m", prompts=(PROMPT,), reply=reply(THINKING, prompt="x<think>\n"), stop=("z",)
    )
    text = ChoiceText(request, 0, TOKENIZER, PROMPT, 100)
    thought, answer = ids("so it was"), ids("</think>yes")
    for token in (*thought, *answer):
        text.take(token)
    assert len(thought) <= text.n_reasoning < len(thought) + len(answer)
    assert text.n_tokens == len(thought) + len(answer)


def test_tool_calls_are_whole_and_numbered() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    events = fed([*ids("see " + call + call), EOS], reply=reply(HERMES, tools=True))
    assert [event for event in events if isinstance(event, ToolCallDelta)] == [
        ToolCallDelta(3, 0, ToolCall("f", {"a": 1})),
        ToolCallDelta(3, 1, ToolCall("f", {"a": 1})),
    ]
    assert joined(events) == "see"
    assert end(events).reason == "tool_calls"
    without = fed([*ids(call), EOS], reply=reply(HERMES))
    assert (joined(without), end(without).reason) == (call, "stop")


@pytest.mark.parametrize("text", ["the dog <tool_c", "the dog <think"])
def test_what_a_reader_holds_back_comes_with_the_limit(text: str) -> None:
    assert joined(fed(ids(text), reply=reply(HERMES, tools=True))) == text


def test_text_that_ends_a_message_ends_the_reply() -> None:
    events = fed(ids("the dog<end> and"), reply=reply(end_text="<end>"))
    assert joined(events) == "the dog"
    assert end(events).reason == "stop"
    assert joined(fed(ids("the dog<en"), reply=reply(end_text="<end>"))) == "the dog<en"


@pytest.mark.parametrize("ignored", [False, True])
def test_other_end_tokens_and_markers(ignored: bool) -> None:
    marked = reply(THINKING, markers={0: "</think>"}, prompt="<think>", end_ids=frozenset({1}))
    events = fed([*ids("so"), 0, *ids("yes"), 1, *ids("no")], reply=marked, ignore_eos=ignored)
    assert joined(events, reasoning=True) == "so"
    assert joined(events) == ("yesno" if ignored else "yes")


@given(st.text("ab<>/think ", max_size=30), st.lists(st.integers(1, 3)))
def test_events_do_not_depend_on_the_tokens_that_spell_a_text(text: str, sizes: list[int]) -> None:
    """Compare a few long tokens with many short ones, letter by letter."""
    long = ids(text)
    short = [token for letter in text for token in ids(letter)]
    for fields in ({"stop": ("th", "ab ")}, {"reply": reply(THINKING), "stop": ("b",)}):
        one, other = fed([*long, EOS], **fields), fed([*short, EOS], **fields)
        for reasoning in (False, True):
            assert joined(one, reasoning=reasoning) == joined(other, reasoning=reasoning)
        assert end(one) == end(other)


def test_stop_string_in_the_text() -> None:
    events = fed(ids(" was big and red"), stop=("big",), include_stop=True)
    assert (joined(events), end(events)) == (" was big", Finished(3, "stop", "big"))


def test_tokens_that_end_the_text() -> None:
    tokens = [*ids(" was"), 300, *ids(" big")]
    assert joined(fed(tokens, end_ids=(300,), ignore_eos=True)) == " was"
    assert joined(fed([*ids(" was"), EOS], end_ids=(300,))) == " was"


def test_special_tokens_in_the_text() -> None:
    tokens = [*ids(" was"), EOS, *ids(" big")]
    assert joined(fed(tokens, ignore_eos=True)) == " was big"
    assert joined(fed(tokens, ignore_eos=True, special_tokens=True)) == " was</s> big"


def test_a_line_with_less_indentation_ends_the_text() -> None:
    for text, expected, reason in ((" a\n  b\nc", " a\n  b\n", "length"), (" a\n  b\n  c", " a\n  b\n  c", "stop")):
        events = fed([*ids(text), EOS], min_indent=2)
        assert (joined(events), end(events)) == (expected, Finished(3, reason))
    events = fed([*ids(" a\n "), EOS], min_indent=2)
    assert (joined(events), end(events).reason) == (" a\n ", "stop")
