"""Cache strategies: whether to cache keys and values or to recompute them."""

from __future__ import annotations

import enum

from llamacli.errors import InvalidRequestError
from llamacli.util.system import available_memory

LONG_SEQUENCE, UNKNOWN_MEMORY_SEQUENCE = 512, 256
"""Tokens above which LONG_SEQUENCE_ONLY caches, and ADAPTIVE if the available memory is unknown."""

BYTES_PER_TOKEN = 2 * 1024
"""Memory that ADAPTIVE assumes for a cached token."""


class CacheStrategy(enum.StrEnum):
    """Cache strategy: store keys and values, or recompute them."""

    ALWAYS = "always"
    LONG_SEQUENCE_ONLY = "long_sequence_only"
    ADAPTIVE = "adaptive"
    DISABLED = "disabled"

    def should_cache(self, length: int, available_memory: int | None = None) -> bool:
        """Decide if `length` tokens are cached; `available_memory` in bytes, or None."""
        match self:
            case CacheStrategy.ALWAYS:
                return True
            case CacheStrategy.LONG_SEQUENCE_ONLY:
                return length > LONG_SEQUENCE
            case CacheStrategy.ADAPTIVE:
                if available_memory is None:
                    return length > UNKNOWN_MEMORY_SEQUENCE
                return available_memory > BYTES_PER_TOKEN * length
            case CacheStrategy.DISABLED:
                return False

    def caches(self, length: int) -> bool:
        """`should_cache` with the memory available now, which is measured for ADAPTIVE only."""
        return self.should_cache(length, available_memory() if self is CacheStrategy.ADAPTIVE else None)

    @classmethod
    def of(cls, name: str | CacheStrategy) -> CacheStrategy:
        """Get a strategy by name. Raises InvalidRequestError for an unknown one."""
        try:
            return cls(name)
        except ValueError:
            raise InvalidRequestError(f"cache strategy {name!r} is not one of {', '.join(cls)}") from None
