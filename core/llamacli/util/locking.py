"""Decorator for methods that hold their object's lock."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def locked(method: Method) -> Method:
    """Make a method hold its object's `lock` while it runs."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *args, **options)

    return run  # type: ignore[return-value]
