"""Syntax of replies that are messages with headers."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence

import attrs

from llamacli.chat.call_text import CallReading, CallText
from llamacli.chat.calls import Schemas, Tools, arguments_in, known_name, schemas_of
from llamacli.chat.messages import Piece
from llamacli.chat.syntax import CallReader, Calls, Event, Reader, first_of, partial_marker


@attrs.frozen
class Channels:
    """Syntax of messages whose headers name a channel or recipient (harmony).

    A header comes behind `starts` and ends at `begins`, its text at one of `ends` or at the next header. The name of
    the channel follows `channel` in the header, the last one counts: `final` and `preamble` are for the user, others
    reasoning. A message to `recipient` and a name is a call of that tool; its text are arguments in JSON, or `calls`.
    Where `channel` and `recipient` are the same, other recipients are for the user. Without `ends`, what names no
    recipient is no header.
    """

    starts: str
    channel: str
    begins: str
    ends: tuple[str, ...]
    final: str
    recipient: str
    preamble: str = ""
    thought: str = ""
    calls: Calls | None = None

    @property
    def markers(self) -> Sequence[str]:
        """Marker texts between the parts of a reply."""
        own = (self.calls.opens, self.calls.closes, *self.calls.inner) if self.calls else ()
        return [text for text in (self.starts, self.channel, self.begins, *self.ends, *own) if text.strip()]

    def reader(self, prompt: str, *, tools: Tools) -> Reader:
        """Reader of a reply that continues the prompt's last header.

        Calls are parsed whatever `tools`.
        """
        _, starts, begun = prompt.rpartition(self.starts)
        return _ChannelReader(self, begun if starts else "", schemas_of(tools))

    @property
    def thought_markers(self) -> tuple[str, ...]:
        """Header of a message of reasoning, and its end; or empty."""
        return (f"{self.channel}{self.thought}{self.begins}", self.ends[0]) if self.thought else ()

    @property
    def names_recipient(self) -> bool:
        """True if headers name recipients only."""
        return self.channel == self.recipient

    def reasoning_markers(self, prompt: str) -> tuple[str, ...]:
        """Headers before a reply's text: that of the final channel ends reasoning."""
        return "", self.channel + self.final, self.begins


class _ChannelReader(Reader):
    def __init__(self, syntax: Channels, prompt: str, schemas: Schemas):
        super().__init__(prompt)
        self._syntax, self._schemas = syntax, schemas
        self._kind = "header"
        self._call: CallReader | None = None
        self._n_messages = self._n_reasoning = self._n_contents = 0
        self._n_prompt = len(prompt)
        self.feed("")
        if self._kind != "header":
            self._held = ""  # the end of the prompt's text is not the reply's

    def _read(self, *, final: bool) -> Iterator[Event]:
        starts, ends = self._syntax.starts, self._syntax.ends
        while True:
            stops = [self._syntax.begins] if self._kind == "header" else [*ends, starts]
            if self._call is not None and not ends:
                stops = []  # the arguments end by themselves
            at, marker = first_of(self._held, stops)
            if self._call is not None:
                n = at if marker else len(self._held) - (0 if final else partial_marker(self._held, stops))
                if not (yield from self._read_call(self._call, n, whole=final or bool(marker))):
                    return
                continue
            if not marker:
                break
            text = self._held[:at]
            if self._kind == "header":
                yield from self._read_header(text)
            else:
                is_header = marker != starts or bool(ends) or self._names(self._held[at + len(marker) :], final)
                if is_header is None:
                    break
                text = text if is_header else text + marker
                yield from _pieces(text.rstrip() if is_header and not ends else text, self._kind)
                self._kind = "header" if is_header else self._kind
            self._held = self._held[at + len(marker) :]
        keep = 0 if final else len(self._held) - len(text.rstrip()) if marker else partial_marker(self._held, stops)
        text, rest = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._kind == "header":
            if final and not self._n_messages:  # a reply without channels, or a header that was cut
                self._held = self._held[self._n_prompt :]
                heads = filter(str.strip, (self._syntax.channel, self._syntax.recipient))
                if not any(self._held.startswith(text) or text.startswith(self._held) for text in heads):
                    yield from _pieces(self._held, "content")
        else:
            yield from _pieces(text, self._kind)
            self._held = rest

    def _names(self, text: str, final: bool) -> bool | None:
        """Test for a header that names a recipient.

        None if only more text can tell.
        """
        header, begins, _ = text.partition(self._syntax.begins)
        names = [self._syntax.final, *self._schemas]
        if begins or final:
            return bool(begins) and (
                header in names or (not self._schemas and re.fullmatch(r"[\w.-]+", header) is not None)
            )
        return None if not header or not self._schemas or any(name.startswith(header) for name in names) else False

    def _read_header(self, header: str) -> Iterator[Event]:
        """Parse a complete header; yields the separator between two reasoning messages."""
        syntax = self._syntax
        self._n_messages += 1
        channel = next(reversed(_words_after(syntax.channel, header)), None)
        recipient = next(iter(_words_after(syntax.recipient, header)), None)
        if syntax.names_recipient and channel in (syntax.final, syntax.thought):
            recipient = None
        unknown = syntax.thought if syntax.names_recipient else channel
        if not syntax.ends and recipient is not None and self._schemas and recipient not in self._schemas:
            self._kind = "content"
            yield from _pieces(header + syntax.begins, self._kind)
        elif recipient:
            self._kind = "content"
            source = CallText()
            self._call = CallReader(source, self._calls(source, recipient))
        elif channel and channel == unknown and channel not in (syntax.final, syntax.preamble):
            self._kind = "reasoning"
            self._n_reasoning += 1
            if self._n_reasoning > 1:
                yield Piece("\n\n", reasoning=True)
        else:
            self._kind = "content"
            self._n_contents += 1
            if self._n_contents > 1:
                yield Piece("\n\n")

    def _calls(self, source: CallText, name: str) -> CallReading:
        calls = self._syntax.calls
        if calls is None:
            yield from arguments_in(source, known_name(name, self._schemas))
        else:
            yield from source.take(calls.opens)
            yield from calls.read(source, self._schemas)

    def _read_call(self, call: CallReader, n: int, *, whole: bool) -> Generator[Event, None, bool]:
        """Parse the call in the first n characters held back.

        Returns whether it is over; text behind it is the user's, all of it if there is no call.
        """
        yield from call.read(self._held[:n], final=whole)
        if not call.is_over or (call.has_begun and not whole and self._syntax.ends):
            return False
        used = call.source.at if call.has_begun or call.is_cut else 0
        self._call, self._held = None, self._held[used if self._held[used:n].strip() else n :]
        return True


def _words_after(text: str, header: str) -> list[str]:
    """Words of a header behind a text."""
    text = text.strip()
    start = r"(?<![\w.])" if not text or text[0].isalnum() else ""
    return re.findall(rf"{start}{re.escape(text)}\s*([^\s<]+)", header)


def _pieces(text: str, kind: str) -> Iterator[Event]:
    if text:
        yield Piece(text, kind == "reasoning")


HARMONY = Channels(
    starts="<|start|>",
    channel="<|channel|>",
    begins="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    final="final",
    recipient=" to=functions.",
    preamble="commentary",
    thought="analysis",
)
"""Syntax of channels, with tool calls to `functions.NAME`."""
