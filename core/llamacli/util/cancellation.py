"""Cooperative cancellation of long work in threads."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator

_cancelled: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("_cancelled", default=None)


@contextlib.contextmanager
def cancellable_by(event: threading.Event) -> Iterator[None]:
    """Cancel the work of this block by an event.

    Others set it, and the work asks `is_cancelled`.
    """
    token = _cancelled.set(event)
    try:
        yield
    finally:
        _cancelled.reset(token)


def is_cancelled() -> bool:
    """True if nobody waits any more for the present work."""
    event = _cancelled.get()
    return event is not None and event.is_set()
