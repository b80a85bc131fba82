"""Type guards for integers and reals, NumPy's included, bool excluded."""

from numbers import Integral, Real
from typing import TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Test for an integer of Python or NumPy, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """Test for a real number of Python or NumPy, not bool."""
    return isinstance(value, Real) and not isinstance(value, bool)
