"""Cancellation of work by events."""

import threading

from llamacli.util.cancellation import cancellable_by, is_cancelled


def test_work_is_cancelled_by_its_own_event_only() -> None:
    outer, inner = threading.Event(), threading.Event()
    assert not is_cancelled()
    with cancellable_by(outer):
        with cancellable_by(inner):
            assert not is_cancelled()
            inner.set()
            assert is_cancelled()
        assert not is_cancelled()
    assert not is_cancelled()
