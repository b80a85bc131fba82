"""Methods that one thread at a time may be in."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def locked(method: Method) -> Method:
    """A method that holds its object's `lock`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *args, **options)

    return run  # type: ignore[return-value]
