"""Context variables of a block, and cancellation of work in threads."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

_cancelled: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("_cancelled", default=None)


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable for this block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def cancellable_by(event: threading.Event) -> contextlib.AbstractContextManager[None]:
    """Cancel this block's work, which asks `is_cancelled`, by an event."""
    return setting(_cancelled, event)


def is_cancelled() -> bool:
    """True if nobody waits any more for the present work."""
    event = _cancelled.get()
    return event is not None and event.is_set()
