"""Reply syntax.

Parses streamed replies into reasoning, tool calls and text for the user. A syntax is data; its reader parses a reply
incrementally, and the result does not depend on how it is split into pieces.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import attrs

from llamacli.chat.messages import Piece, ToolCall
from llamacli.chat.rules import Rules

Event = Piece | ToolCall

CallGrammar = Callable[[Rules, str, dict[str, Any]], str]
"""Writer of the grammar of one call: an expression for the rules, the tool's name and the schema of its arguments."""


class Reader(abc.ABC):
    """Incremental parser of one reply."""

    def __init__(self, held: str = ""):
        self._held = held
        self._n_fed = 0

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece of text; the events that are certain now."""
        return [event for event, _ in self.locate(text)]

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

    def reader(self, prompt: str, *, tools: bool) -> Reader:
        """Reader of the reply to a rendered prompt.

        Tool calls are parsed only if there are `tools`.
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

    It raises ValueError for invalid text. With `bare`, a reply may also be a call without markers: one that begins with
    a brace is tried. `inner` are marker texts within calls, which may be special tokens too. `grammar` writes what a
    call must look like; `json_calls` needs none, and other notations without one are read, but cannot be forced.
    """

    parse: Callable[[str], list[ToolCall]]
    bare: bool = False
    inner: tuple[str, ...] = ()
    grammar: CallGrammar | None = None


@attrs.frozen
class Spans:
    """Syntax in which markers enclose reasoning and tool calls.

    Text outside is for the user, without the markers `dropped`. White space around enclosed text is dropped. A call
    that cannot be parsed is left as text.
    """

    reasoning: Span | None = None
    calls: Calls | None = None
    dropped: tuple[str, ...] = ()

    @property
    def markers(self) -> Sequence[str]:
        """Marker texts between the parts of a reply."""
        texts = [text for span in (self.reasoning, self.calls) if span for text in (span.opens, span.closes) if text]
        return [*texts, *self.dropped, *(self.calls.inner if self.calls else ())]

    def reader(self, prompt: str, *, tools: bool) -> Reader:
        """Reader of a reply.

        It begins inside the reasoning if the prompt has opened it.
        """
        return _SpanReader(self.reasoning, self.calls if tools else None, self.dropped, prompt.rstrip())

    def reasoning_markers(self, prompt: str) -> tuple[str, ...]:
        """Markers of reasoning before a reply's text."""
        if self.reasoning is None:
            return ()
        is_open = prompt.rstrip().endswith(self.reasoning.opens.rstrip())
        return "" if is_open else self.reasoning.opens, self.reasoning.closes


class _SpanReader(Reader):
    def __init__(self, reasoning: Span | None, calls: Calls | None, dropped: Sequence[str], prompt: str):
        super().__init__()
        self._reasoning, self._calls, self._dropped = reasoning, calls, dropped
        self._at_start, self._skips_space = True, False
        self._inside: Span | None = None
        if reasoning and prompt.endswith(reasoning.opens.rstrip()):
            self._enter(reasoning)

    def _read(self, *, final: bool) -> Iterator[Event]:
        while True:
            if isinstance(self._inside, Calls):
                if not (yield from self._read_call(final)):
                    return
            elif not (yield from self._read_text(final)):
                return

    def _read_text(self, final: bool) -> Generator[Event, None, bool]:
        """Yield text up to the next marker; returns whether there was one."""
        if self._skips_space:
            self._held = self._held.lstrip()
        if self._calls and self._calls.bare and self._at_start and not self._inside:
            begin = self._held.lstrip()
            if begin.startswith("{"):
                self._enter(Calls("", "", self._calls.parse))
                return True
            if not begin and not final:
                return False
        spans: dict[str, Span | None] = {span.opens: span for span in (self._reasoning, self._calls) if span}
        spans |= dict.fromkeys(self._dropped)
        if self._inside:
            spans = {self._inside.closes: None}
        at, marker = _first(self._held, [text for text in spans if text])
        if marker:
            yield from self._text(self._held[:at].rstrip())
            self._held = self._held[at + len(marker) :]
            self._enter(spans[marker])
            return True
        keep = 0 if final else _partial_marker(self._held, spans)
        text = self._held[: len(self._held) - keep]
        yield from self._text(text.rstrip() if final and self._inside else text)
        self._held = self._held[len(text) :]
        return False

    def _read_call(self, final: bool) -> Generator[Event, None, bool]:
        """Parse the call once it is complete.

        Returns whether text is left after it.
        """
        assert isinstance(self._inside, Calls)
        opens, closes = self._inside.opens, self._inside.closes
        end = self._held.find(closes) if closes else -1
        if end < 0:
            if not final:
                return False
            end, closes = len(self._held), ""
        text, rest = self._held[:end], self._held[end + len(closes) :]
        try:
            calls = [_encodable(call) for call in self._inside.parse(text)]
        except (ValueError, RecursionError):
            self._enter(None)
            self._skips_space = False
            self._held = opens + self._held
            yield Piece(opens + text + closes)
        else:
            self._enter(None)
            yield from calls
        self._held = rest
        return bool(rest)

    def _enter(self, span: Span | None) -> None:
        self._inside = span
        self._at_start, self._skips_space = False, True

    def _text(self, text: str) -> Iterator[Event]:
        if text:
            self._at_start = self._skips_space = False
            yield Piece(text, reasoning=self._inside is not None)


@attrs.frozen
class Channels:
    """Syntax of messages with channel headers (harmony).

    A header may name a recipient too. It ends at `begins`, its text at one of `ends` or at `starts`, which begins the
    next header. The channel's name follows `channel` in the header: `final` is for the user, all others are reasoning.
    A message to `recipient` and a name is a call of that tool, its text the arguments in JSON.
    """

    starts: str
    channel: str
    begins: str
    ends: tuple[str, ...]
    final: str
    recipient: str

    @property
    def markers(self) -> Sequence[str]:
        """Marker texts between the parts of a reply."""
        return [self.starts, self.channel, self.begins, *self.ends]

    def reader(self, prompt: str, *, tools: bool) -> Reader:
        """Reader of a reply that continues the prompt's last header.

        Calls are parsed whatever `tools`.
        """
        at = prompt.rfind(self.starts)
        return _ChannelReader(self, prompt[at:] if at >= 0 else "")

    def reasoning_markers(self, prompt: str) -> tuple[str, ...]:
        """Headers before a reply's text: that of the final channel ends reasoning."""
        return "", self.channel + self.final, self.begins


class _ChannelReader(Reader):
    def __init__(self, syntax: Channels, prompt: str):
        super().__init__(prompt)
        self._syntax = syntax
        self._kind: str | ToolCall = "header"
        self._n_messages = self._n_reasoning = 0
        self._n_prompt = len(prompt)
        self.feed("")
        if self._kind != "header":
            self._held = ""  # the end of the prompt's text is not the reply's

    def _read(self, *, final: bool) -> Iterator[Event]:
        while True:
            stops = [self._syntax.begins] if self._kind == "header" else [*self._syntax.ends, self._syntax.starts]
            at, marker = _first(self._held, stops)
            if not marker:
                break
            text = self._held[:at]
            if self._kind == "header":
                yield from self._read_header(text)
            else:
                yield from self._read_body(text, whole=True)
                self._kind = "header"
            self._held = self._held[at + len(marker) :]
        keep = 0 if final else _partial_marker(self._held, stops)
        text, rest = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._kind == "header" or (isinstance(self._kind, ToolCall) and not final):
            if final and not self._n_messages:  # a reply without channels
                self._held = self._held[self._n_prompt :]
                yield from _pieces(self._held, reasoning=False)
        else:
            yield from self._read_body(text, whole=final)
            self._held = rest

    def _read_header(self, header: str) -> Iterator[Event]:
        """Parse a complete header; yields the separator between two reasoning messages."""
        self._n_messages += 1
        channel = re.search(re.escape(self._syntax.channel) + r"\s*(\w+)", header)
        recipient = re.search(r"\bto=" + re.escape(self._syntax.recipient) + r"([^\s<]+)", header)
        if recipient:
            self._kind = ToolCall(recipient[1])
        elif channel and channel[1] != self._syntax.final:
            self._kind = "reasoning"
            self._n_reasoning += 1
            if self._n_reasoning > 1:
                yield Piece("\n\n", reasoning=True)
        else:
            self._kind = "content"

    def _read_body(self, text: str, *, whole: bool) -> Iterator[Event]:
        """Yield a message's text as it comes.

        A tool call is yielded only when `whole`.
        """
        if not isinstance(self._kind, ToolCall):
            yield from _pieces(text, reasoning=self._kind == "reasoning")
        elif whole:
            try:
                yield _encodable(ToolCall(self._kind.name, _arguments(text)))
            except (ValueError, RecursionError):
                yield from _pieces(text, reasoning=False)


class StopText:
    """Stop string filter, which passes on the text before it.

    `found` is true once it has come. An empty `text` never comes.
    """

    def __init__(self, text: str):
        self._ends = [text] if text else []
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Add a piece; the text that certainly comes before the stop string."""
        self._held += text
        at, end = _first(self._held, self._ends)
        if end:
            self.found = True
            return self._held[:at].rstrip()
        n = len(self._held) - _partial_marker(self._held, self._ends)
        certain, self._held = self._held[:n], self._held[n:]
        return certain

    def flush(self) -> str:
        """Text held back, if the reply has ended without the stop string."""
        return "" if self.found else self._held


def _pieces(text: str, *, reasoning: bool) -> Iterator[Event]:
    if text:
        yield Piece(text, reasoning)


def _first(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """First of the markers in a text: position and marker.

    The marker is "" if none is found.
    """
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    at, _, marker = min(found, default=(-1, 0, ""))
    return at, marker


def _partial_marker(text: str, markers: Iterable[str]) -> int:
    """Length of a partial marker at the text's end, white space included."""
    longest = max(
        (n for marker in markers for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])),
        default=0,
    )
    return len(text) - len(text[: len(text) - longest].rstrip())


# --- tool calls


def json_calls(text: str) -> list[ToolCall]:
    """Parse tool calls in JSON, one or several.

    They are bare or in a list, each with a "name" and "arguments" or "parameters". Raises ValueError for anything else.
    """
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        value, end = decoder.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
        values += value if isinstance(value, list) else [value]
        at = end + len(text[end:]) - len(text[end:].lstrip(" \t\r\n;,"))
    if not values:
        raise ValueError("no tool call")
    return [_call(value) for value in values]


def tagged_calls(call: str, argument: str) -> Callable[[str], list[ToolCall]]:
    """Make a parser of tool calls in tags, one or several.

    `call` and `argument` are regular expressions with the groups `name` and `arguments`, and `name` and `value`. Values
    that are JSON, but no strings, are decoded, others are text. The parser raises ValueError for anything else.
    """
    one_call, one_argument = re.compile(rf"\s*{call}\s*", re.DOTALL), re.compile(rf"\s*{argument}\s*", re.DOTALL)

    def parse(text: str) -> list[ToolCall]:
        calls = []
        for found in _consecutive(one_call, text):
            arguments = _consecutive(one_argument, found["arguments"].strip())
            calls.append(ToolCall(found["name"], {each["name"]: _value(each["value"]) for each in arguments}))
        if not calls:
            raise ValueError("no tool call")
        return calls

    return parse


def _consecutive(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Matches that together are the whole text. Raises ValueError."""
    found, at = [], 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None or match.end() == at:
            raise ValueError(f"{text[at : at + 80]!r} is not part of a tool call")
        found.append(match)
        at = match.end()
    return found


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


_WORDS = {"True": True, "False": False, "None": None}
"""Values as templates write them that convert arguments with Python's `str`."""


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a tool call")
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without a name")
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall(name, _arguments(arguments if isinstance(arguments, str) else json.dumps(arguments or {})))


def _encodable(call: ToolCall) -> ToolCall:
    """Tool call that JSON in UTF-8 can express: lone surrogates become U+FFFD.

    Raises ValueError for arguments with infinite numbers or NaN.
    """
    text = json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False)
    name, arguments = json.loads(_LONE_SURROGATE.sub("\ufffd", text))
    return attrs.evolve(call, name=name, arguments=arguments)


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _arguments(text: str) -> dict[str, Any]:
    """Parse arguments by name from JSON; empty text means none."""
    arguments = json.loads(text) if text.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{arguments!r} is not a JSON object of arguments")
    return arguments


# --- common syntaxes

THINK = Span("<think>", "</think>")
"""Reasoning between `<think>` and `</think>`."""
PLAIN = Spans()
THINKING = Spans(THINK)
"""Syntax of replies with reasoning in `<think>`."""
HERMES = Spans(THINK, Calls("<tool_call>", "</tool_call>", json_calls))
"""Syntax with reasoning in `<think>` and tool calls as JSON in `<tool_call>`."""
HARMONY = Channels(
    starts="<|start|>",
    channel="<|channel|>",
    begins="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    final="final",
    recipient="functions.",
)
"""Syntax of channels, with tool calls to `functions.NAME`."""
