"""Replay of a request on another replica, without the events sent before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from llamacli.serve import requests
from llamacli.serve.errors import InternalError

_CONTENT, _REASONING = -2, -1
"""Kinds of text; others are the numbers of calls."""


@attrs.define(eq=False)
class _Text:
    """Text of one kind that was sent: characters, and their digest."""

    n_chars: int = 0
    digest: Any = attrs.field(factory=hashlib.sha256)

    def add(self, text: str) -> None:
        self.n_chars += len(text)
        self.digest.update(text.encode("utf-8", "surrogatepass"))


class Sent:
    """Events of a request that its client has.

    The texts of a request depend on the request alone, not how they are divided into events: so a replay is compared
    character by character, token by token and call by call with what came before.

    - `started`: true after the first event.
    """

    def __init__(self) -> None:
        self.started = False
        self._sent: dict[tuple[int, int], _Text] = {}  # by choice and kind
        self._seen: dict[tuple[int, int], _Text] = {}
        self._n_tokens: dict[int, int] = {}
        self._n_tokens_seen: dict[int, int] = {}
        self._others: set[tuple[str, int, int]] = set()  # kind, index, number
        self._progress = -1

    def restart(self) -> None:
        """Begin a replay."""
        self._seen, self._n_tokens_seen = {}, {}

    def fresh(self, events: Iterable[requests.Event]) -> list[requests.Event]:
        """The events, or parts of events, that the client does not have.

        Raises InternalError if the replay differs from what was sent.
        """
        return [new for event in events for new in self._fresh(event)]

    def _fresh(self, event: requests.Event) -> Iterator[requests.Event]:
        match event:
            case requests.Admitted():
                if not self.started:
                    yield event
            case requests.PromptProgress(processed=processed):
                if processed > self._progress:
                    self._progress = processed
                    yield event
            case requests.TextDelta():
                yield from self._fresh_text(event)
            case requests.ArgumentsDelta():
                text = self._fresh_part((event.index, event.number), event.text)
                if text:
                    yield attrs.evolve(event, text=text)
            case requests.ToolCallDelta(index=index, number=number):
                yield from self._once(event, index, number)
            case requests.PromptLogprobs(prompt=prompt) | requests.Embedding(prompt=prompt):
                yield from self._once(event, prompt, 0)
            case requests.Finished(index=index):
                self._expect_all(index)
                yield from self._once(event, index, 0)
            case _:
                yield event
        self.started = True

    def _once(self, event: requests.Event, index: int, number: int) -> Iterator[requests.Event]:
        key = type(event).__name__, index, number
        if key not in self._others:
            self._others.add(key)
            yield event

    def _fresh_text(self, event: requests.TextDelta) -> Iterator[requests.TextDelta]:
        text = self._fresh_part((event.index, _REASONING if event.reasoning else _CONTENT), event.text)
        n_sent, n_seen = self._n_tokens.get(event.index, 0), self._n_tokens_seen.get(event.index, 0)
        tokens = event.tokens[max(0, n_sent - n_seen) :]
        self._n_tokens_seen[event.index] = n_seen + len(event.tokens)
        self._n_tokens[event.index] = max(n_sent, n_seen + len(event.tokens))
        if text or tokens:
            yield attrs.evolve(event, text=text, tokens=tokens)

    def _fresh_part(self, kind: tuple[int, int], text: str) -> str:
        """Rest of a text that the client does not have."""
        sent, seen = self._sent.setdefault(kind, _Text()), self._seen.setdefault(kind, _Text())
        n_left = max(0, sent.n_chars - seen.n_chars)
        skipped, text = text[:n_left], text[n_left:]
        if n_left:
            seen.add(skipped)
            if seen.n_chars == sent.n_chars and seen.digest.digest() != sent.digest.digest():
                raise InternalError("the request was repeated on another replica, which gave another text")
        if text:
            sent.add(text)
            seen.add(text)
        return text

    def _expect_all(self, index: int) -> None:
        """Refuse an end before the text that was sent."""
        for kind, sent in self._sent.items():
            if kind[0] == index and self._seen.get(kind, _Text()).n_chars != sent.n_chars:
                raise InternalError("the request was repeated on another replica, which gave a shorter text")
