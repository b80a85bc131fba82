"""`carray` as an intrinsic: arrays of memory at an address.

Numba's own function is compiled anew for each type of array.

To be imported once something has to be compiled: this module imports Numba.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.core.typing.npydecl import parse_shape
from numba.extending import intrinsic
from numba.np.arrayobj import np_cfarray


@intrinsic
def carray(typingctx: Any, pointer: Any, shape: Any, dtype: Any) -> Any:
    """Contiguous array of a type at a pointer, as `numba.carray`."""
    return types.Array(dtype.dtype, parse_shape(shape), "C")(pointer, shape, dtype), np_cfarray
