"""Event streams: merging for slow readers, ends, cancelling."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from llamacli.serve.errors import InternalError
from llamacli.serve.requests import (
    Admitted,
    Done,
    Event,
    Failed,
    Finished,
    PromptProgress,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from llamacli.serve.streams import EventStream

DONE = Done(Usage(1), Timings(0, 0, 0))


def collected(*puts: list[Event]) -> list[Event]:
    """Events that a reader gets who comes after all of them."""

    async def read() -> list[Event]:
        stream = EventStream("id")
        for events in puts:
            stream.put(events)
        return [event async for event in stream]

    return asyncio.run(read())


def test_text_of_a_choice_is_joined_with_its_tokens() -> None:
    one, two = TokenLogprob(1, b"a", -1.0), TokenLogprob(2, b"b", -2.0)
    events = collected(
        [Admitted(0), TextDelta(0, "a", tokens=(one,)), TextDelta(1, "x")],
        [TextDelta(0, "b", tokens=(two,)), TextDelta(1, "y"), Finished(0, "stop"), TextDelta(1, "z"), DONE],
    )
    assert events == [
        Admitted(0),
        TextDelta(0, "ab", tokens=(one, two)),
        TextDelta(1, "xyz"),
        Finished(0, "stop"),
        DONE,
    ]


def test_reasoning_and_content_stay_apart_and_in_order() -> None:
    events = collected([TextDelta(0, "r", True), TextDelta(0, "c"), TextDelta(0, "s", True), TextDelta(0, "d"), DONE])
    assert [(event.text, event.reasoning) for event in events[:-1]] == [
        ("r", True),
        ("c", False),
        ("s", True),
        ("d", False),
    ]


def test_only_the_newest_progress_remains() -> None:
    events = collected([PromptProgress(9, 0, n, 0.1) for n in (0, 3, 6, 9)], [DONE])
    assert events == [PromptProgress(9, 0, 0, 0.1), PromptProgress(9, 0, 9, 0.1), DONE]


@given(st.lists(st.tuples(st.integers(0, 2), st.text(min_size=1, max_size=3), st.booleans()), max_size=30), st.data())
def test_texts_do_not_depend_on_when_they_are_read(deltas: list[tuple[int, str, bool]], data: st.DataObject) -> None:
    reads = [data.draw(st.booleans()) for _ in deltas]

    async def read() -> list[tuple[int, str, bool]]:
        stream, seen = EventStream("id"), []

        async def reader() -> None:
            async for event in stream:
                if isinstance(event, TextDelta):
                    seen.append((event.index, event.text, event.reasoning))

        task = asyncio.create_task(reader())
        for (index, text, reasoning), now in zip(deltas, reads, strict=True):
            stream.put([TextDelta(index, text, reasoning)])
            if now:
                await asyncio.sleep(0)
        stream.put([DONE])
        await task
        return seen

    def texts(parts: list[tuple[int, str, bool]]) -> dict[int, list[tuple[str, bool]]]:
        """Text of each choice, characters with their kind in order."""
        found: dict[int, list[tuple[str, bool]]] = {}
        for index, text, reasoning in parts:
            found.setdefault(index, []).extend((character, reasoning) for character in text)
        return found

    assert texts(asyncio.run(read())) == texts(deltas)


def test_nothing_follows_the_end() -> None:
    failed = Failed(InternalError("x"))
    assert collected([failed, TextDelta(0, "late")], [DONE]) == [failed]


def test_cancelling_ends_the_reader_and_tells_once() -> None:
    async def run() -> None:
        cancelled: list[str] = []
        stream = EventStream("id", cancelled.append)
        stream.put([TextDelta(0, "a")])
        task = asyncio.create_task(anext_of(stream))
        await asyncio.sleep(0)
        stream.cancel()
        stream.cancel()
        assert await task == [TextDelta(0, "a")]
        stream.put([TextDelta(0, "b")])
        assert [event async for event in stream] == []
        assert cancelled == ["id"]
        ended = EventStream("other", cancelled.append)
        ended.put([DONE])
        ended.cancel()
        assert cancelled == ["id"]

    async def anext_of(stream: EventStream) -> list[Event]:
        return [event async for event in stream]

    asyncio.run(run())


def test_take_returns_what_waits_and_tells_the_end() -> None:
    async def run() -> None:
        stream = EventStream("id")
        stream.put([])
        assert await stream.take(0.01) == []
        assert not stream.exhausted
        stream.put([Admitted(0.0)])
        stream.put([TextDelta(0, "a")])
        assert await stream.take(5.0) == [Admitted(0.0), TextDelta(0, "a")]
        task = asyncio.create_task(stream.take(5.0))
        await asyncio.sleep(0)
        stream.put([TextDelta(0, "b"), DONE])
        assert not stream.exhausted
        assert await task == [TextDelta(0, "b"), DONE]
        assert stream.exhausted
        cancelled = EventStream("id")
        cancelled.cancel()
        assert await cancelled.take(5.0) == []
        assert cancelled.exhausted

    asyncio.run(run())


def test_reasoning_can_be_ended_while_the_stream_lasts() -> None:
    async def run() -> list[bool]:
        stream, ended = EventStream("id"), list[str]()
        found = [stream.end_reasoning()]
        stream.on_end_reasoning = lambda: ended.append("now")
        found += [stream.end_reasoning(), ended == ["now"]]
        stream.put([DONE])
        return [*found, stream.end_reasoning(), ended == ["now"]]

    assert asyncio.run(run()) == [False, True, True, False, True]
