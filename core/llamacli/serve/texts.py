"""Text of one choice: from tokens to events, up to its end."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from llamacli.chat.logprobs import token_logprob
from llamacli.chat.messages import Piece
from llamacli.chat.syntax import Event as ReplyEvent
from llamacli.chat.syntax import StopText
from llamacli.sampling import LogProbs, StopStrings
from llamacli.serve.requests import (
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
        self._stops = StopStrings(request.stop)
        self.n_tokens = self.n_reasoning = self._n_calls = self._n_unassigned = 0
        self._n_decoded = self._n_sent = 0
        self._pending: collections.deque[tuple[int, TokenLogprob]] = collections.deque()
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
        piece = self._decoder.feed(token)
        if not piece and self._reply is not None:
            piece = self._reply.markers.get(token, "")
        if logprobs is not None:
            self._pending.append((self._n_decoded, token_logprob(self._tokenizer, token, logprobs)))
        self._n_decoded += len(piece)
        events = self._read(piece)
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
            events += self._read(self._decoder.flush())
        if not self._stopped and self._reader is not None:
            events += self._sent(self._reader.feed(self._end_text.flush()))
        if not self._stops.stopped and self._reader is not None:
            events += self._sent(self._reader.flush())
        if not self._stops.stopped:
            events += self._delta(self._stops.flush(), reasoning=False)
            tokens = tuple(token for _, token in self._pending)
            if tokens:
                events.append(TextDelta(self._index, "", tokens=tokens))
        if self._stops.stopped:
            reason = "stop"
        if self._n_calls:
            reason = "tool_calls" if reason == "stop" else reason
        self.finished = Finished(self._index, reason, self._stops.found or None, timed_out)
        return [*events, self.finished]

    def _read(self, piece: str) -> list[Event]:
        """Events of decoded text."""
        if self._reader is None:
            return self._content(piece)
        return self._sent(self._reader.feed(self._end_text.feed(piece)))

    def _sent(self, found: Iterable[ReplyEvent]) -> list[Event]:
        """Events of what the reader has found, up to a stop string."""
        events: list[Event] = []
        for event in found:
            if self._stops.stopped:
                break
            if isinstance(event, Piece):
                if event.reasoning:
                    self.n_reasoning += self._n_unassigned
                self._n_unassigned = 0
                events += self._delta(event.text, reasoning=True) if event.reasoning else self._content(event.text)
            else:
                self._n_unassigned = 0
                events.append(ToolCallDelta(self._index, self._n_calls, event))
                self._n_calls += 1
        return events

    def _content(self, text: str) -> list[Event]:
        return self._delta(self._stops.feed(text), reasoning=False) if text else []

    def _delta(self, text: str, *, reasoning: bool) -> list[Event]:
        """Event of text, with the tokens that begin in it."""
        if not text:
            return []
        self._n_sent += len(text)
        tokens = []
        # A reader drops white space and markers, so places in its text are not those of the tokens.
        while self._pending and (self._reader is not None or self._pending[0][0] < self._n_sent):
            tokens.append(self._pending.popleft()[1])
        return [TextDelta(self._index, text, reasoning, tuple(tokens))]
