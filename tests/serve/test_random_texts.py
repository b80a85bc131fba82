"""Random tokens, cut anywhere, against a plain reading of the whole reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import example, given
from hypothesis import strategies as st

from llamacli.chat.calls import NamedCall, Notation, json_calls
from llamacli.chat.channels import HARMONY, Channels
from llamacli.chat.literals import Literals
from llamacli.chat.messages import CallDelta, Piece, ToolCall
from llamacli.chat.syntax import HERMES, PLAIN, THINK, THINKING, Calls, Spans
from llamacli.chat.tags import Pairs
from llamacli.gguf import Metadata
from llamacli.sampling import LogProbs
from llamacli.serve.requests import (
    Done,
    Event,
    Finished,
    GenerationRequest,
    ReplyFormat,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from llamacli.serve.streams import EventStream
from llamacli.serve.texts import ChoiceText
from llamacli.testing.chats import CHATML
from llamacli.testing.vocabularies import vocabulary
from llamacli.tokenizer import tokenizer_from_metadata
from suite import examples
from tiny_chat import SPECIAL, chat_keys

TOKENIZER = tokenizer_from_metadata(Metadata({**vocabulary("spm"), **chat_keys(CHATML)}))
PROMPT = tuple(TOKENIZER.encode("a ball"))
BARE = Spans(calls=Calls("<|tag|>", "", json_calls, bare=True))
PYTHON = Literals("(", ")", "=", ("'", '"'), bare=True, nested=Literals(quotes=("'", '"')))
LISTED = Spans(THINK, Calls("<tool_call>", "</tool_call>", Notation(NamedCall(arguments=PYTHON), "[", ",", "]")))
QUOTED = Literals(quotes=("<|tag|>", '"'), bare=True)
BRACED = Spans(THINK, Calls("<tool_call>", "</tool_call>", Notation(NamedCall("call:", arguments=QUOTED))))
TAGS = Pairs("<p ", (">", "</p>"), (">", "</p>"), quoted=("<![", "]]>"))
TAGGED = Calls("<tool_call>", "</tool_call>", Notation(NamedCall("<f ", ">", "</f>", TAGS)), short="<f ")
RECIPIENTS = Channels(starts=">>>", channel="", begins="\n", ends=(), final="all", recipient="")
MESSAGES = Channels("<|start|>assistant", " to=", "<|message|>", ("<|end|>",), "user", " to=", "", "self", TAGGED)
CALL = '{"name": "f", "arguments": {"a": "b"}}'
PARTS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_call>" + CALL,
        "<|tag|>",
        CALL,
        CALL[:9],
        "{",
        '"',
        "\\ud83d",
    ),
    *(
        "<|start|>assistant to=functions.f<|message|>{}",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "final",
        "analysis",
        " to=functions.f",
        "[end]",
    ),
    *(
        ">>>",
        ">>>f\n",
        "all\n",
        "f\n{}",
        " to=f",
        " to=self",
        " to=user",
        "f(a='b', c=[1])",
        "[",
        "]",
        ",",
        "'",
        "(",
        ")",
    ),
    *("call:f{a:<|tag|>b<|tag|>,c:1}", "call:", "f{", "<f f>", "<p a>b</p>", "<p ", "<![", "]]>", "</p>", "</f>"),
    *("the", "he", "t", " ", "\n", "é", "🦊"),
)
CONTROLS = [TOKENIZER.token_id(text) for text in SPECIAL if text.startswith("<|")]
BYTES = [3 + byte for byte in "é🦊".encode()]


def spelled(text: str) -> list[int]:
    return TOKENIZER.encode_run(text, continues=True)


TOKENS = st.lists(
    st.one_of(
        st.sampled_from(PARTS).map(spelled),
        st.sampled_from([*BYTES, *CONTROLS]).map(lambda token: [token]),
        st.integers(0, TOKENIZER.n_vocab - 1).map(lambda token: [token]),
    ),
    max_size=12,
).map(lambda parts: [token for part in parts for token in part])
STOPS = st.sampled_from([(), ("the",), ("he", "t "), ("\n",), ("\ufffd",), ("thet", "e", "<t")])
SYNTAXES = (PLAIN, THINKING, HERMES, BARE, HARMONY, LISTED, BRACED, Spans(THINK, TAGGED), RECIPIENTS, MESSAGES)
REPLIES = st.builds(
    ReplyFormat,
    syntax=st.sampled_from(SYNTAXES),
    prompt=st.sampled_from(["", "<think>\n", "<|start|>assistant", ">>>"]),
    tools=st.booleans(),
    markers=st.dictionaries(st.sampled_from(CONTROLS), st.sampled_from(["</think>", "<|message|>", "<tool_call>"])),
    end_ids=st.sampled_from([frozenset(), frozenset(CONTROLS[:1])]),
    end_text=st.sampled_from(["", "[end]", "te"]),
)
REQUESTS = st.builds(
    GenerationRequest,
    id=st.just("a"),
    model=st.just("m"),
    prompts=st.just((PROMPT,)),
    stop=STOPS,
    ignore_eos=st.booleans(),
    reply=st.none() | REPLIES,
)


def a_request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(id="a", model="m", prompts=(PROMPT,), **fields)


MARKED = a_request(reply=ReplyFormat(syntax=THINKING, prompt="<think>", markers={CONTROLS[0]: "</think>"}))
INTERRUPTED = [*BYTES[:1], CONTROLS[0], *BYTES[1:2]]  # a character, and a marker between its bytes


def events_of(request: GenerationRequest, tokens: Sequence[int], max_tokens: int) -> tuple[list[list[Event]], int]:
    """Events of each token up to the text's end, and `n_tokens`."""
    text = ChoiceText(request, 0, TOKENIZER, request.prompts[0], max_tokens)
    found = []
    for token in tokens:
        found.append(text.take(token, LogProbs(-1.0, ((token, -1.0),))))
        if text.finished is not None:
            return found, text.n_tokens
    return [*found, text.finish("length")], text.n_tokens


def drawn(request: GenerationRequest, tokens: Sequence[int], max_tokens: int) -> tuple[list[int], str]:
    """Tokens before the first that ends the text, and the reason."""
    ends: frozenset[int] = frozenset()
    if not request.ignore_eos:
        ends = TOKENIZER.eog_ids | (request.reply.end_ids if request.reply else frozenset())
    n = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: min(n, max_tokens)]), "stop" if n < min(len(tokens), max_tokens) else "length"


def text_of(tokens: Sequence[int], markers: Any) -> str:
    """Text of tokens, in which no character continues after a marker."""
    text, run = "", b""
    for token in tokens:
        if token in markers:
            text, run = text + run.decode(errors="replace") + markers[token], b""
        else:
            run += TOKENIZER.piece_bytes(token)
    return text + run.decode(errors="replace")


def read_whole(request: GenerationRequest, tokens: Sequence[int], max_tokens: int) -> tuple[Any, ...]:
    """Content, reasoning, calls and end of a reply, read at once."""
    kept, reason = drawn(request, tokens, max_tokens)
    reply = request.reply
    text = text_of(kept, reply.markers if reply else {})
    events: list[Piece | CallDelta | ToolCall] = [Piece(text)]
    if reply is not None:
        if reply.end_text and reply.end_text in text and not request.ignore_eos:
            text, reason = text.partition(reply.end_text)[0].rstrip(), "stop"
        reader = reply.syntax.reader(reply.prompt, tools=reply.tools)
        found = [*reader.feed(text), *reader.flush()]
        events = [event for event in found if not isinstance(event, CallDelta)]
    content, reasoning, calls = "", "", []
    for event in events:
        if isinstance(event, ToolCall):
            calls.append(event)
        elif isinstance(event, CallDelta):
            continue  # its text is in the call that follows
        elif event.reasoning:
            reasoning += event.text
        else:
            for character in event.text:
                content += character
                ended = [stop for stop in request.stop if content.endswith(stop)]
                if ended:
                    stop = max(ended, key=len)
                    return content.removesuffix(stop), reasoning, calls, "tool_calls" if calls else "stop", stop
    return content, reasoning, calls, "tool_calls" if calls and reason == "stop" else reason, None


def seen(events: Sequence[Event]) -> tuple[Any, ...]:
    """Reply that a client sees in events, as `read_whole` has it."""
    deltas = [event for event in events if isinstance(event, TextDelta)]
    (end,) = (event for event in events if isinstance(event, Finished))
    return (
        "".join(delta.text for delta in deltas if not delta.reasoning),
        "".join(delta.text for delta in deltas if delta.reasoning),
        [event.call for event in events if isinstance(event, ToolCallDelta)],
        end.reason,
        end.stop_string,
    )


@given(request=REQUESTS, tokens=TOKENS, max_tokens=st.integers(1, 60))
@example(MARKED, INTERRUPTED, 60)
@examples(300)
def test_events_are_those_of_the_whole_text(request: GenerationRequest, tokens: list[int], max_tokens: int) -> None:
    steps, n_tokens = events_of(request, tokens, max_tokens)
    assert seen([event for step in steps for event in step]) == read_whole(request, tokens, max_tokens)
    kept, _ = drawn(request, tokens, max_tokens)
    assert n_tokens == (len(steps) if len(steps) <= len(kept) else len(kept))


@given(request=REQUESTS, tokens=TOKENS, max_tokens=st.integers(1, 60), data=st.data())
def test_slow_readers_see_the_same(
    request: GenerationRequest, tokens: list[int], max_tokens: int, data: st.DataObject
) -> None:
    steps, _ = events_of(request, tokens, max_tokens)

    async def read() -> list[Event]:
        stream, taken = EventStream("a"), []
        for step in steps:
            stream.put(step)
            if data.draw(st.booleans()):
                taken += await stream.take(0)
        stream.put([Done(Usage(1), Timings(0, 0, 0))])
        return taken + await stream.take(0)

    def logprobs(events: Sequence[Event], reasoning: bool) -> list[Any]:
        deltas = [event for event in events if isinstance(event, TextDelta) and event.reasoning == reasoning]
        return [token for delta in deltas for token in delta.tokens]

    at_once, slowly = [event for step in steps for event in step], asyncio.run(read())
    assert seen(slowly) == seen(at_once)
    for reasoning in (False, True):
        assert logprobs(slowly, reasoning) == logprobs(at_once, reasoning)


def scored(events: Sequence[Event]) -> list[int]:
    return [token.id for event in events if isinstance(event, TextDelta) for token in event.tokens]


@given(request=REQUESTS, parts=st.lists(st.sampled_from(PARTS), max_size=8), max_tokens=st.integers(1, 100))
@example(MARKED, ["a</think>", "\n\nb"], 100)
@example(a_request(reply=ReplyFormat(syntax=THINKING), stop=("the",)), ["th<think>x</think>b"], 100)
@examples(200)
def test_bytes_of_scored_tokens_are_the_content(request: GenerationRequest, parts: list[str], max_tokens: int) -> None:
    letters = [token for part in parts for letter in part for token in spelled(letter)]
    steps, _ = events_of(request, letters, max_tokens)
    events = [event for step in steps for event in step]
    pieces = b"".join(map(TOKENIZER.piece_bytes, scored(events)))
    assert pieces.decode(errors="replace") == seen(events)[0]


@given(request=REQUESTS, tokens=TOKENS, max_tokens=st.integers(1, 60))
@example(a_request(stop=("the",)), [*spelled("t"), *spelled("h"), *spelled("t"), *spelled("h"), *spelled("e")], 60)
@examples(200)
def test_scored_tokens_begin_in_the_text(request: GenerationRequest, tokens: list[int], max_tokens: int) -> None:
    plain = attrs.evolve(request, reply=None)
    steps, _ = events_of(plain, tokens, max_tokens)
    events = [event for step in steps for event in step]
    text, _, _, _, stop = seen(events)
    kept, _ = drawn(plain, tokens, max_tokens)
    stream, n_chars, expected = TOKENIZER.stream(PROMPT), 0, []
    for token in kept:
        if n_chars < len(text) or stop is None:
            expected.append(token)
        n_chars += len(stream.feed(token))
    assert scored(events) == expected
    chat, _ = events_of(attrs.evolve(plain, reply=ReplyFormat(syntax=PLAIN)), tokens, max_tokens)
    assert scored([event for step in chat for event in step]) == expected
