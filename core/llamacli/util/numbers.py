"""What passes for a number where a caller hands one over: Python's own and NumPy's, but no booleans."""

from numbers import Integral, Real
from typing import TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """Whether it is a real number."""
    return isinstance(value, Real) and not isinstance(value, bool)
