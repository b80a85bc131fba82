"""What is closed when it is no longer needed, and can be used in a with statement."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self


class Closing(abc.ABC):
    """Something whose `close` a with statement calls at its end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what is held; closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
