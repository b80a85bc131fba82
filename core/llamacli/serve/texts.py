"""Text of one choice: from tokens to events, up to its end."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from llamacli.chat.logprobs import Drawn, take_content, token_logprob
from llamacli.chat.messages import CallDelta, Piece
from llamacli.chat.syntax import Event as ReplyEvent
from llamacli.chat.syntax import StopText
from llamacli.sampling import LogProbs, StopStrings
from llamacli.serve.requests import (
    ArgumentsDelta,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Ids,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from llamacli.tokenizer import Tokenizer


class ChoiceText:
    """Text of a choice, as events.

    - `n_tokens`, `n_reasoning`: tokens so far, and those of reasoning.
    - `finished`: the end of the choice, None until it has come.

    Which events come depends on the tokens only, never on how they were grouped into steps.
    """

    def __init__(self, request: GenerationRequest, index: int, tokenizer: Tokenizer, prompt: Ids, max_tokens: int):
        self._index, self._tokenizer, self._max_tokens = index, tokenizer, max_tokens
        self._reply = reply = request.reply
        self._decoder = tokenizer.stream(prompt)
        self._ends = frozenset[int]()
        if not request.ignore_eos:
            self._ends = tokenizer.eog_ids | (reply.end_ids if reply else frozenset())
        self._end_text = StopText(reply.end_text if reply and not request.ignore_eos else "")
        self._reader = reply.syntax.reader(reply.prompt, tools=reply.tools) if reply else None
        if reply and self._reader:
            self._reader.begin(reply.begun)
        self._stops = StopStrings(request.stop)
        self.n_tokens = self.n_reasoning = self._n_calls = self._n_unassigned = 0
        self._n_decoded = self._n_content = self._n_sent = 0
        self._has_bytes = False
        self._drawn: Drawn = collections.deque()
        # Tokens of the content that are not sent, with their places in it.
        self._scored: collections.deque[tuple[int, TokenLogprob]] = collections.deque()
        self.finished: Finished | None = None

    def is_end(self, token: int) -> bool:
        """True for a token that ends the text."""
        return token in self._ends

    def feed(self, token: int, logprobs: LogProbs | None = None) -> list[Event]:
        """Add a token that was drawn.

        Returns the events that are certain now. At the text's end the last is `Finished`.
        """
        if self.is_end(token):
            return self._finish("stop")
        self.n_tokens += 1
        self._n_unassigned += 1
        marker = self._reply.markers.get(token, "") if self._reply is not None else ""
        events = self._read(self._rest()) if marker else []
        piece = self._decoder.feed(token) or marker
        self._has_bytes = self._has_bytes or bool(self._tokenizer.piece_bytes(token))
        if logprobs is not None:
            scored = token_logprob(self._tokenizer, token, logprobs)
            self._drawn.append((self._n_decoded, self._n_decoded + len(piece), scored))
        if not self._stopped:
            events += self._read(piece)
        if self._stopped:
            return [*events, *self._finish("stop")]
        if self.n_tokens >= self._max_tokens:
            return [*events, *self._finish("length")]
        return events

    def finish(self, reason: FinishReason, *, timed_out: bool = False) -> list[Event]:
        """End the text here; the last events of it."""
        return self._finish(reason, timed_out=timed_out)

    @property
    def _stopped(self) -> bool:
        return self._stops.stopped or self._end_text.found

    def _finish(self, reason: FinishReason, *, timed_out: bool = False) -> list[Event]:
        events: list[Event] = []
        if not self._stopped:
            events += self._read(self._rest())
        if not self._stopped and self._reader is not None:
            events += self._sent(self._reader.locate(self._end_text.flush()))
        if not self._stops.stopped and self._reader is not None:
            events += self._sent(self._reader.locate("", final=True))
        if not self._stops.stopped:
            events += self._delta(self._stops.flush())
            tokens = tuple(token for start, _, token in self._drawn if start == self._n_decoded)
            if tokens:
                events.append(TextDelta(self._index, "", tokens=tokens))
        if self._stops.stopped:
            reason = "stop"
        if self._n_calls:
            reason = "tool_calls" if reason == "stop" else reason
        self.finished = Finished(self._index, reason, self._stops.found or None, timed_out)
        return [*events, self.finished]

    def _rest(self) -> str:
        """Text of an unfinished character that the tokens have begun."""
        return self._decoder.flush() if self._has_bytes else ""

    def _read(self, piece: str) -> list[Event]:
        """Events of decoded text."""
        self._n_decoded += len(piece)
        if self._reader is None:
            return self._content(piece, self._n_content)
        return self._sent(self._reader.locate(self._end_text.feed(piece)))

    def _sent(self, found: Iterable[tuple[ReplyEvent, int]]) -> list[Event]:
        """Events of what the reader has found, up to a stop string."""
        events: list[Event] = []
        for event, start in found:
            if self._stops.stopped:
                break
            if isinstance(event, Piece):
                if event.reasoning:
                    self.n_reasoning += self._n_unassigned
                    events.append(TextDelta(self._index, event.text, reasoning=True))
                else:
                    events += self._content(event.text, start)
            elif isinstance(event, CallDelta):
                events.append(ArgumentsDelta(self._index, self._n_calls, event.name, event.text))
            else:
                events.append(ToolCallDelta(self._index, self._n_calls, event))
                self._n_calls += 1
            self._n_unassigned = 0
        return events

    def _content(self, text: str, start: int) -> list[Event]:
        """Events of content, which is the reply's text from `start` on."""
        if not text:
            return []
        for offset, token in take_content(self._drawn, start, start + len(text)):
            self._scored.append((self._n_content + offset, token))
        self._n_content += len(text)
        return self._delta(self._stops.feed(text))

    def _delta(self, text: str) -> list[Event]:
        """Event of content, with the tokens that begin in it."""
        if not text:
            return []
        self._n_sent += len(text)
        tokens = []
        while self._scored and self._scored[0][0] < self._n_sent:
            tokens.append(self._scored.popleft()[1])
        return [TextDelta(self._index, text, tokens=tuple(tokens))]
