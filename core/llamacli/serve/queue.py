"""Bounded queue of requests that is fair between keys."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from llamacli.serve.errors import QueueFullError
from llamacli.util.locking import locked


class Entry(Protocol):
    """Entry of the queue: its key and its weight."""

    @property
    def key(self) -> str:
        """Key of the client."""

    @property
    def n_requests(self) -> int:
        """Requests that the entry counts as: 0 for further prompts of one."""

    @property
    def n_tokens(self) -> int:
        """Tokens of its prompt."""

    @property
    def background(self) -> bool:
        """True if it gives way to others."""


Item = TypeVar("Item", bound=Entry)


class FairQueue(Generic[Item]):
    """Queue whose keys take turns; first come, first served within a key.

    Usable from any thread. At most `max_requests` requests and `max_tokens` tokens of prompts wait, but a single
    request may have more tokens. At most `max_per_key` requests of a key are open, that is wait or run: `closed` tells
    that one has ended. `retry_after` gives the seconds after which a refused client should come again, `n_free` the
    requests that wait for the next step only, because there is a free slot for them.

    Background entries come after all others, and count for no limit.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        max_per_key: int | None = None,
        *,
        retry_after: Callable[[], int] = lambda: 1,
        n_free: Callable[[], int] = lambda: 0,
    ):
        self.lock = threading.RLock()
        self.max_requests, self.max_tokens, self.max_per_key = max_requests, max_tokens, max_per_key
        self._retry_after, self._n_free = retry_after, n_free
        self._keys: dict[str, collections.deque[Item]] = {}  # in the order of their turns
        self._later: collections.deque[Item] = collections.deque()  # background entries
        self._open: collections.Counter[str] = collections.Counter()
        self.n_requests = self.n_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._keys.values())) + len(self._later)

    @locked
    def put(self, items: list[Item]) -> None:
        """Append the entries of one request.

        Raises QueueFullError, changing nothing, if a limit would be exceeded.
        """
        if items[0].background:
            self._later.extend(items)
            return
        n_requests, n_tokens = sum(item.n_requests for item in items), sum(item.n_tokens for item in items)
        key = items[0].key
        if self.max_per_key is not None and self._open[key] + n_requests > self.max_per_key:
            self._refuse(f"{self._open[key]} requests of this key wait or run already", f"{self.max_per_key}")
        self.expect_room(n_requests, n_tokens)
        self._keys.setdefault(key, collections.deque()).extend(items)
        self._open[key] += n_requests
        self.n_requests += n_requests
        self.n_tokens += n_tokens

    @locked
    def expect_room(self, n_requests: int = 1, n_tokens: int = 1) -> None:
        """Raise QueueFullError if so much would exceed a limit of all keys.

        The default is the least that a request has.
        """
        if self.n_requests + n_requests > self.max_requests + self._n_free():
            self._refuse(f"{self.n_requests} requests wait already", f"{self.max_requests}")
        if self.n_requests and self.n_tokens + n_tokens > self.max_tokens:
            self._refuse(f"prompts of {self.n_tokens} tokens wait already", f"{self.max_tokens} tokens")

    @locked
    def peek(self) -> Item | None:
        """Entry whose turn it is; None if the queue is empty."""
        return next((items[0] for items in (*self._keys.values(), *([self._later] if self._later else []))), None)

    @locked
    def take(self, item: Item) -> None:
        """Remove an entry that `peek` gave, and turn to the next key.

        Entries that came since may have the turn by now: they stay.
        """
        if item.background:
            self._later.remove(item)
            return
        items = self._keys.pop(item.key)
        items.remove(item)
        if items:
            self._keys[item.key] = items
        self._forget(item)

    @locked
    def remove_where(self, leaves: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the entries for which `leaves` is true."""
        found = [item for items in self._keys.values() for item in items if leaves(item)]
        gone = {id(item) for item in found}
        later = [item for item in self._later if leaves(item)]
        for item in later:
            self._later.remove(item)
        if found:
            for key, items in list(self._keys.items()):
                left = collections.deque(item for item in items if id(item) not in gone)
                if left:
                    self._keys[key] = left
                else:
                    del self._keys[key]
            for item in found:
                self._forget(item)
        return found + later

    @locked
    def closed(self, key: str) -> None:
        """Count a request of the key as ended."""
        self._open[key] -= 1
        if self._open[key] <= 0:
            del self._open[key]

    @locked
    def entries(self) -> Iterator[Item]:
        """The entries that wait."""
        return iter([*(item for items in self._keys.values() for item in items), *self._later])

    def _forget(self, item: Item) -> None:
        self.n_requests -= item.n_requests
        self.n_tokens -= item.n_tokens

    def _refuse(self, found: str, limit: str) -> None:
        raise QueueFullError(f"too many requests: {found}, {limit} are allowed", retry_after=self._retry_after())
