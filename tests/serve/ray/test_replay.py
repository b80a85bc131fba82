"""Replay: a client gets each event once, however replicas divide them."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.chat.messages import ToolCall
from llamacli.serve.errors import InternalError
from llamacli.serve.ray.replay import Sent
from llamacli.serve.requests import (
    Admitted,
    ArgumentsDelta,
    Done,
    Embedding,
    Event,
    Failed,
    Finished,
    PromptLogprobs,
    PromptProgress,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

DONE = Done(Usage(1), Timings(0, 0, 0))


def token(i: int) -> TokenLogprob:
    return TokenLogprob(i, b"x", -1.0)


@st.composite
def divided(draw: st.DrawFn, text: str, index: int, reasoning: bool) -> list[Event]:
    """Deltas of a text; each character has a token."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=4)))
    deltas: list[Event] = []
    for a, b in itertools.pairwise([0, *(cut for cut in cuts if cut < len(text)), len(text)]):
        given_tokens = () if reasoning else tuple(token(i) for i in range(a, b))
        deltas.append(TextDelta(index, text[a:b], reasoning, given_tokens))
    return deltas


@st.composite
def runs(draw: st.DrawFn, texts: list[tuple[str, str]]) -> list[Event]:
    """Events of one run: equal texts, divided and interleaved in any way."""
    events: list[Event] = []
    parts = []
    for index, (reasoning, text) in enumerate(texts):
        own: list[Event] = [*draw(divided(reasoning, index, True)), *draw(divided(text, index, False))]
        own += [ArgumentsDelta(index, 0, "f", part.text) for part in draw(divided(text, index, False))]
        own += [ToolCallDelta(index, 0, ToolCall("f", {})), Finished(index, "stop")]
        parts.append(own)
    while any(parts):
        events.append(draw(st.sampled_from([part for part in parts if part])).pop(0))
    return [Admitted(0.0), PromptProgress(10, 0, 10, 0.1), PromptLogprobs(0, ()), *events, DONE]


def joined(events: list[Event], index: int, reasoning: bool) -> tuple[str, list[int]]:
    deltas = [e for e in events if isinstance(e, TextDelta) and (e.index, e.reasoning) == (index, reasoning)]
    return "".join(delta.text for delta in deltas), [one.id for delta in deltas for one in delta.tokens]


@given(st.data(), st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), min_size=1, max_size=2))
def test_replays_give_each_part_once(data: st.DataObject, texts: list[tuple[str, str]]) -> None:
    sent, got = Sent(), list[Event]()
    for _ in range(data.draw(st.integers(0, 2))):
        events = data.draw(runs(texts))
        sent.restart()
        got += sent.fresh(events[: data.draw(st.integers(0, len(events) - 1))])
    sent.restart()
    got += sent.fresh(data.draw(runs(texts)))
    for index, (reasoning, text) in enumerate(texts):
        assert "".join(e.text for e in got if isinstance(e, ArgumentsDelta) and e.index == index) == text
        assert joined(got, index, True) == (reasoning, [])
        assert joined(got, index, False) == (text, list(range(len(text))))
    others = [type(event) for event in got if not isinstance(event, TextDelta | ArgumentsDelta)]
    assert len(others) == 4 + 2 * len(texts)
    assert others[0] is Admitted
    assert got[-1] is DONE
    assert sent.started


def test_another_text_is_an_error() -> None:
    for second, message in (
        ([TextDelta(0, "abX")], "another text"),
        ([TextDelta(0, "a"), TextDelta(0, "Xc")], "another text"),
        ([TextDelta(0, "ab"), Finished(0, "stop")], "a shorter text"),
    ):
        sent = Sent()
        sent.restart()
        assert sent.fresh([TextDelta(0, "ab"), TextDelta(0, "c")])
        sent.restart()
        with pytest.raises(InternalError, match=message):
            sent.fresh(second)


def test_progress_does_not_go_back_and_vectors_come_once() -> None:
    sent = Sent()
    vector = Embedding(0, np.ones(2, np.float32))
    first = [PromptProgress(9, 0, 4, 0.1), PromptProgress(9, 0, 8, 0.2), vector]
    assert sent.fresh(first) == first
    sent.restart()
    again = [
        PromptProgress(9, 4, 6, 0.3),
        attrs.evolve(vector),
        PromptProgress(9, 4, 9, 0.4),
        Embedding(1, vector.vector),
    ]
    assert sent.fresh(again) == again[2:]


def test_failures_are_passed_on() -> None:
    failed = Failed(InternalError("x"))
    assert Sent().fresh([failed]) == [failed]
