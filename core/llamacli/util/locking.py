"""Decorator for methods that hold a lock, and locks across forks."""

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
Lock = TypeVar("Lock")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe(lock: Lock) -> Lock:
    """Lock that is free in a forked process.

    Threads that held it do not exist there. What it protects must be whole at any moment, as for an interrupt.
    """
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in list(_locks):
        if not getattr(lock, "_is_owned", bool)():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def locked(method: Method) -> Method:
    """Make a method hold its object's `lock` while it runs."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *args, **options)

    return run  # type: ignore[return-value]
