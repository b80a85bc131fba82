"""Slot map (generational arena): values by integer handles that are never reused."""

from __future__ import annotations

from collections.abc import Iterator, ValuesView
from typing import Generic, TypeVar

T = TypeVar("T")

_SLOT_BITS = 16
MAX_SLOTS = 1 << _SLOT_BITS


class SlotMap(Generic[T]):
    """Slot map of up to MAX_SLOTS values.

    A handle combines a slot and the generation of its value; 0 is never valid.
    """

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._generations: list[int] = []  # of each slot, 0 if it was never used
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, handle: object) -> bool:
        return handle in self._values

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __getitem__(self, handle: int) -> T:
        return self._values[handle]

    def get(self, handle: int) -> T | None:
        """Get the value of a handle, None if there is none."""
        return self._values.get(handle)

    def values(self) -> ValuesView[T]:
        """All values."""
        return self._values.values()

    def add(self, value: T) -> int:
        """Add a value; returns its handle."""
        if not self._free:
            self._free.append(len(self._generations))
            self._generations.append(0)
        slot = self._free.pop()
        self._generations[slot] += 1
        handle = self._generations[slot] << _SLOT_BITS | slot
        self._values[handle] = value
        return handle

    def remove(self, handle: int) -> None:
        """Remove a value. Raises KeyError if there is none."""
        del self._values[handle]
        self._free.append(handle & (MAX_SLOTS - 1))

    def clear(self) -> None:
        """Remove all values."""
        for handle in list(self._values):
            self.remove(handle)
