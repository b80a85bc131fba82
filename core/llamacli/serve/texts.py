"""Text of one choice: from tokens to events, up to its end."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from llamacli.chat.logprobs import Drawn, take_content, token_logprob
from llamacli.chat.messages import CallDelta, Piece
from llamacli.chat.syntax import Event as ReplyEvent
from llamacli.chat.syntax import StopText
from llamacli.generation.text import DrawnText
from llamacli.sampling import LogProbs
from llamacli.sampling.stop_strings import IndentLimit
from llamacli.serve.requests import (
    ArgumentsDelta,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Ids,
    TextDelta,
    ToolCallDelta,
)
from llamacli.tokenizer import Tokenizer


class ChoiceText(DrawnText[Event]):
    """Text of a choice, as events; stop strings are searched in content.

    - `n_reasoning`: tokens of reasoning. `has_newline`: true once there is one in what was sent.
    - `finished`: the end of the choice, None until it has come.

    Which events come depends on the tokens only, never on how they were grouped into steps.
    """

    def __init__(self, request: GenerationRequest, index: int, tokenizer: Tokenizer, prompt: Ids, max_tokens: int):
        reply, ends = request.reply, frozenset(request.end_ids)
        if not request.ignore_eos:
            ends |= tokenizer.eog_ids | (reply.end_ids if reply else frozenset())
        ids = [token for token in prompt if token >= 0]
        decoder = tokenizer.stream(ids, unparse_special=request.special_tokens)
        super().__init__(decoder, request.stop, ends, max_tokens)
        self._index, self._tokenizer, self._reply = index, tokenizer, reply
        self._includes_stop = request.include_stop
        self._indent = IndentLimit(request.min_indent)
        self._end_text = StopText(*((reply.end_text, reply.end_unless) if reply and not request.ignore_eos else ("",)))
        self._reader = None
        if reply:
            self._reader = reply.syntax.reader(reply.prompt, tools=reply.tools)
            self._reader.begin(reply.begun)
        self.n_reasoning = self._n_calls = self._n_unassigned = 0
        self._n_decoded = self._n_content = 0
        self._has_bytes = self.has_newline = False
        self._drawn: Drawn = collections.deque()
        self.finished: Finished | None = None

    def take(self, token: int, logprobs: LogProbs | None = None, *, is_last: bool = False) -> list[Event]:
        """Add a token that was drawn.

        Returns the events that are certain now. At the text's end the last is `Finished`.
        """
        events = super().take(token, logprobs, is_last=is_last)
        return [*events, *self.finish(self.finish_reason)] if self.finish_reason else events

    def _add(self, token: int, logprobs: LogProbs | None, is_last: bool) -> list[Event]:
        self._n_unassigned += 1
        marker = self._reply.markers.get(token, "") if self._reply is not None else ""
        events = self._read(self._rest()) if marker else []
        piece = self._decoder.feed(token) or marker
        self._has_bytes = self._has_bytes or bool(self._tokenizer.piece_bytes(token))
        if logprobs is not None:
            scored = token_logprob(self._tokenizer, token, logprobs)
            self._drawn.append((self._n_decoded, self._n_decoded + len(piece), scored))
        if not self._is_stopped():
            events += self._read(piece)
        if self._end_text.found or self._indent.found:
            self.finish_reason = "stop"
        return events

    def _is_stopped(self) -> bool:
        return bool(self._stops.found) or self._end_text.found or self._indent.found

    def finish(self, reason: FinishReason, *, timed_out: bool = False) -> list[Event]:
        """End the text here; the last events of it."""
        events: list[Event] = []
        if not self._is_stopped():
            events += self._read(self._rest())
        if not self._is_stopped() and self._reader is not None:
            events += self._sent(self._reader.locate(self._end_text.flush()))
        if not self._stops.found and self._reader is not None:
            events += self._sent(self._reader.locate("", final=True))
        if not self._stops.found:
            events += self._delta(self._stops.feed(self._indent.flush()))
            events += self._delta(self._stops.flush())
            tokens = tuple(token for start, _, token in self._drawn if start == self._n_decoded)
            if tokens:
                events.append(TextDelta(self._index, "", tokens=tokens))
        if self._stops.found:
            reason = "stop"
            if self._includes_stop:
                events.append(TextDelta(self._index, self._stops.found))
        elif self._indent.found:
            reason = "length"
        if self._n_calls:
            reason = "tool_calls" if reason == "stop" else reason
        self.finished = Finished(self._index, reason, self._stops.found or None, timed_out)
        return [*events, self.finished]

    def _rest(self) -> str:
        return self._decoder.flush() if self._has_bytes else ""

    def _read(self, piece: str) -> list[Event]:
        self._n_decoded += len(piece)
        if self._reader is None:
            return self._content(piece, self._n_content)
        return self._sent(self._reader.locate(self._end_text.feed(piece)))

    def _sent(self, found: Iterable[tuple[ReplyEvent, int]]) -> list[Event]:
        events: list[Event] = []
        for event, start in found:
            if self._stops.found:
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
            self._held.append((self._n_content + offset + 1, token))
        self._n_content += len(text)
        return self._delta(self._stops.feed(self._indent.feed(text)))

    def _delta(self, text: str) -> list[Event]:
        if not text:
            return []
        self.has_newline |= "\n" in text
        return [TextDelta(self._index, text, tokens=tuple(self._release(text)))]
