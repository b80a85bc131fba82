"""Reply syntax.

Parses streamed replies into reasoning, tool calls and text for the user. A syntax is data; its reader parses a reply
incrementally, and the result does not depend on how it is split into pieces.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Protocol

import attrs

from llamacli.chat.call_text import CallReading, CallText, IncompleteCallError
from llamacli.chat.calls import (
    CallGrammar,
    CallParser,
    Notation,
    Schemas,
    Tools,
    json_calls,
    schemas_of,
    whole_calls,
)
from llamacli.chat.messages import CallDelta, Piece, ToolCall

Event = Piece | CallDelta | ToolCall


class Reader(abc.ABC):
    """Incremental parser of one reply."""

    def __init__(self, held: str = ""):
        self._held = held
        self._n_fed = 0

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece of text; the events that are certain now."""
        return [event for event, _ in self.locate(text)]

    def begin(self, text: str) -> None:
        """Parse the beginning of the reply that the prompt has."""
        self.feed(text)
        self._n_fed -= len(text)

    def flush(self) -> list[Event]:
        """Events of the text held back, at the end of the reply."""
        return [event for event, _ in self.locate("", final=True)]

    def locate(self, text: str, *, final: bool = False) -> list[tuple[Event, int]]:
        """Parse as `feed` does, with `final` as `flush`: events with offsets.

        A `Piece` is the reply's text from its offset on.
        """
        self._held += text
        self._n_fed += len(text)
        return [(event, self._n_fed - len(self._held)) for event in self._read(final=final)]

    @abc.abstractmethod
    def _read(self, *, final: bool) -> Iterator[Event]:
        """Parse events from the text held back, all of it if `final`.

        While a `Piece` is yielded, the text held back begins with it.
        """


class Syntax(Protocol):
    """Syntax of replies: a factory of readers."""

    @property
    def markers(self) -> Sequence[str]:
        """Marker texts between the parts of a reply.

        A special token spelled as one is passed to the reader.
        """

    def reader(self, prompt: str, *, tools: Tools) -> Reader:
        """Reader of the reply to a rendered prompt.

        Tool calls are parsed only if there are `tools`, and only calls of these.
        """

    def reasoning_markers(self, prompt: str) -> tuple[str, ...]:
        """Markers of reasoning before a reply's text, empty if there is none.

        The first opens it, "" if the prompt has opened it; the others end it, one after the other.
        """


@attrs.frozen
class Span:
    """Text between two markers; an empty `closes` is the reply's end."""

    opens: str
    closes: str


@attrs.frozen
class Calls(Span):
    """Span of tool calls, parsed by `parse`.

    A `Notation` parses them as they come and has a grammar. Another function raises ValueError for invalid text,
    IncompleteCallError if the closing marker may be part of a string; `grammar` writes what a call must look like for
    it, without which calls are read, but cannot be forced. With `bare`, a reply may also be a call without markers: one
    that begins with a brace is tried. `inner` are marker texts within calls, which may be special tokens too. Without
    `opens`, a call may begin with `short`, which is part of it.
    """

    parse: CallParser
    bare: bool = False
    inner: tuple[str, ...] = ()
    grammar: CallGrammar | None = None
    short: str = ""

    def read(self, source: CallText, schemas: Schemas) -> CallReading:
        """Parse the calls after the opening marker."""
        if isinstance(self.parse, Notation):
            return self.parse.read(source, schemas, self.closes)
        return whole_calls(self.parse, source, schemas, self.closes)


@attrs.frozen
class Spans:
    """Syntax in which markers enclose reasoning and tool calls.

    Text outside is for the user, without the markers `dropped`. White space around enclosed text is dropped. What does
    not begin with the name of a tool is left as text.
    """

    reasoning: Span | None = None
    calls: Calls | None = None
    dropped: tuple[str, ...] = ()

    @property
    def markers(self) -> Sequence[str]:
        """Marker texts between the parts of a reply."""
        texts = [text for span in (self.reasoning, self.calls) if span for text in (span.opens, span.closes) if text]
        return [*texts, *self.dropped, *(self.calls.inner if self.calls else ())]

    def reader(self, prompt: str, *, tools: Tools) -> Reader:
        """Reader of a reply.

        It begins inside the reasoning if the prompt has opened it. A tool call ends reasoning too.
        """
        calls = self.calls if tools else None
        return _SpanReader(self.reasoning, calls, schemas_of(tools), self.dropped, prompt.rstrip())

    def reasoning_markers(self, prompt: str) -> tuple[str, ...]:
        """Markers of reasoning before a reply's text."""
        if self.reasoning is None:
            return ()
        is_open = prompt.rstrip().endswith(self.reasoning.opens.rstrip())
        return "" if is_open else self.reasoning.opens, self.reasoning.closes


class _SpanReader(Reader):
    def __init__(
        self, reasoning: Span | None, calls: Calls | None, schemas: Schemas, dropped: Sequence[str], prompt: str
    ):
        super().__init__()
        self._reasoning, self._calls, self._schemas, self._dropped = reasoning, calls, schemas, dropped
        self._at_start, self._skips_space = True, False
        self._inside: Span | None = None
        self._call: CallReader | None = None
        """Reader of the calls that the text held back begins with."""
        if reasoning and prompt.endswith(reasoning.opens.rstrip()):
            self._enter(reasoning)

    def _read(self, *, final: bool) -> Iterator[Event]:
        while True:
            if self._call is not None:
                if not (yield from self._read_call(self._call, final)):
                    return
            elif not (yield from self._read_text(final)):
                return

    def _read_text(self, final: bool) -> Generator[Event, None, bool]:
        """Yield text up to the next marker; returns whether there was one."""
        if self._skips_space:
            self._held = self._held.lstrip()
        calls = self._calls
        if calls and calls.bare and self._at_start and not self._inside:
            begin = self._held.lstrip()
            if begin.startswith("{"):
                self._call = self._calls_from(0, attrs.evolve(calls, closes="", short=""))
                return True
            if not begin and not final:
                return False
        if self._reasoning and self._at_start and not self._inside:
            begin, closes = self._held.lstrip(), self._reasoning.closes
            if begin.startswith(closes):  # the end of reasoning that is empty
                self._held = begin[len(closes) :]
                self._enter(None)
                return True
            if closes.startswith(begin) and not final:
                return False
        spans: dict[str, Span | None] = {span.opens: span for span in (self._reasoning, calls) if span}
        if calls:
            spans[calls.short] = calls
        spans |= dict.fromkeys(self._dropped)
        if self._inside:
            spans = {self._inside.closes: None}
            if calls:
                spans |= {calls.opens: calls, calls.short: calls}
        at, marker = first_of(self._held, [text for text in spans if text])
        if marker and (final or not _may_begin(self._held, at, spans)):
            span, before = spans[marker], self._held[:at]
            yield from self._text(before.rstrip())
            if isinstance(span, Calls):
                self._held = self._held[len(before.rstrip()) :]
                begin_at = len(before) - len(before.rstrip())
                n_opened = begin_at if marker == span.short and marker != span.opens else begin_at + len(marker)
                self._call = self._calls_from(n_opened, span)
            else:
                self._held = self._held[at + len(marker) :]
                self._enter(span)
            return True
        keep = 0 if final else partial_marker(self._held, spans)
        text = self._held[: len(self._held) - keep]
        yield from self._text(text.rstrip() if final and self._inside else text)
        self._held = self._held[len(text) :]
        return False

    def _calls_from(self, start: int, span: Calls) -> CallReader:
        source = CallText("", start)
        return CallReader(source, span.read(source, self._schemas), span)

    def _read_call(self, call: CallReader, final: bool) -> Generator[Event, None, bool]:
        """Parse the calls that the text held back begins with.

        Returns whether they are over, or were none.
        """
        call.source.text = self._held
        is_thought = self._inside is not None and self._inside.closes in self._held[call.start :]
        if not is_thought:  # reasoning that mentions a call goes on after it
            if self._inside and not final:
                return False
            yield from call.read(self._held, final=final)
            if not call.is_over:
                return False
        self._call = None
        if call.has_begun:
            self._enter(None)
            if call.is_unclosed:
                self._dropped = (*self._dropped, call.closes)
            self._held = self._held[call.source.at :]
        elif call.is_cut and call.start + len(call.short) and not self._inside:
            self._held = ""  # a call that was cut before its name
        else:
            text = self._held[: max(call.start + len(call.short), 1)]
            yield from self._text(text)
            self._held = self._held[len(text) :]
        return bool(self._held)

    def _enter(self, span: Span | None) -> None:
        self._inside = span
        self._at_start, self._skips_space = False, True

    def _text(self, text: str) -> Iterator[Event]:
        if text:
            self._at_start = self._skips_space = False
            yield Piece(text, reasoning=self._inside is not None)


class CallReader:
    """Reader of tool calls as they come.

    - `start`: place of the text after the opening marker. `source`: the text, read up to a place.
    - `has_begun`: a call has a name and begins to have arguments. What follows is text of the call, valid or not.
    - `is_over`: all calls are read, or there is none. `is_unclosed`: other text comes before the closing marker.
      `is_cut`: the text ends within a call.
    """

    def __init__(self, source: CallText, reading: CallReading, span: Calls | None = None):
        self.source, self._reading, self.start = source, reading, source.at
        self.closes, self._short = (span.closes, span.short) if span else ("", "")
        self._name: str | None = None
        self._texts: list[str] = []
        self._n_sent, self._is_broken = 0, False
        self.has_begun = self.is_over = self.is_unclosed = self.is_cut = False

    @property
    def short(self) -> str:
        """Marker with which the calls begin, "" behind an opening marker."""
        return self._short if self._short and self.source.text.startswith(self._short, self.start) else ""

    def read(self, text: str, *, final: bool) -> Iterator[Event]:
        """Parse what the text so far has; `final` if nothing follows."""
        self.source.text, self.source.final = text, final
        while not self.is_over and not self._is_broken:
            try:
                item = next(self._reading)
            except StopIteration:
                self.is_over = True
                break
            except IncompleteCallError:
                yield from self._end("")
                self.is_over = self.is_cut = True
                self.source.at = len(self.source.text)
                break
            except (ValueError, RecursionError):
                self._is_broken = self._name is not None
                self.is_over = self.is_unclosed = not self._is_broken
                break
            if item is None:
                break
            if self._name is None:
                self.has_begun, self._name = True, item[0]
                yield CallDelta(self._name, "")
            if item[1] is None:
                yield from self._end("")
            else:
                self._texts.append(item[1])
        if self._is_broken:
            yield from self._read_broken()
        yield from self._delta()

    def _delta(self) -> Iterator[CallDelta]:
        """Event of the arguments that are not sent yet."""
        text = "".join(self._texts[self._n_sent :])
        self._n_sent = len(self._texts)
        if text and self._name is not None:
            yield CallDelta(self._name, text)

    def _read_broken(self) -> Iterator[Event]:
        """Take invalid text up to the closing marker as arguments."""
        source, closes = self.source, self.closes
        at = source.text.find(closes, source.at) if closes else -1
        if at >= 0 or source.final:
            rest = source.text[source.at : at if at >= 0 else None].rstrip()
            yield from self._end(rest)
            source.at = at + len(closes) if at >= 0 else len(source.text)
            self.is_over = True

    def _end(self, rest: str) -> Iterator[Event]:
        if self._name is None:
            return
        self._texts.append(rest)
        yield from self._delta()
        name, text = self._name, "".join(self._texts)
        self._name, self._texts, self._n_sent = None, [], 0
        try:
            arguments = json.loads(text)
            is_whole = isinstance(arguments, dict) and not self._is_broken
        except (ValueError, RecursionError):
            is_whole = False
        call = ToolCall(name, arguments if is_whole else {})
        yield call if is_whole and call.text == text else attrs.evolve(call, partial=text)


class StopText:
    """Stop string filter, which passes on the text before it.

    `found` is true once it has come. An empty `text` never comes, and `unless`, which begins with it, is other text.
    """

    def __init__(self, text: str, unless: str = ""):
        self._ends, self._unless = [text] if text else [], unless
        self._held = ""
        self.found = False

    def feed(self, text: str, *, final: bool = False) -> str:
        """Add a piece; the text that certainly comes before the stop string."""
        self._held += text
        certain = ""
        while True:
            at, end = first_of(self._held, self._ends)
            n = at if end else len(self._held) - partial_marker(self._held, self._ends)
            is_other = bool(self._unless) and self._held.startswith(self._unless, n)
            if end and not is_other:
                if self._unless.startswith(self._held[n:]) and not final:
                    n = len(self._held[:n].rstrip())
                else:
                    self.found = True
                    return certain + self._held[:n].rstrip()
            n += len(self._unless) if is_other else 0
            certain, self._held = certain + self._held[:n], self._held[n:]
            if not is_other:
                return certain

    def flush(self) -> str:
        """Text held back, if the reply has ended without the stop string."""
        return "" if self.found else self.feed("", final=True) + ("" if self.found else self._held)


def first_of(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """First of the markers in a text: position and marker.

    The marker is "" if none is found.
    """
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    at, _, marker = min(found, default=(-1, 0, ""))
    return at, marker


def _may_begin(text: str, at: int, markers: Iterable[str]) -> bool:
    """True if a marker may begin at the place or before it."""
    lengths = range(max(1, len(text) - at), len(text) + 1)
    return any(n < len(marker) and text.endswith(marker[:n]) for marker in markers for n in lengths)


def partial_marker(text: str, markers: Iterable[str]) -> int:
    """Length of a partial marker at the text's end, white space included."""
    longest = max(
        (n for marker in markers for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])),
        default=0,
    )
    return len(text) - len(text[: len(text) - longest].rstrip())


# --- common syntaxes

THINK = Span("<think>", "</think>")
"""Reasoning between `<think>` and `</think>`."""
PLAIN = Spans()
THINKING = Spans(THINK)
"""Syntax of replies with reasoning in `<think>`."""
HERMES = Spans(THINK, Calls("<tool_call>", "</tool_call>", json_calls))
"""Syntax with reasoning in `<think>` and tool calls as JSON in `<tool_call>`."""
