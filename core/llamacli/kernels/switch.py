"""Switch for compiled kernels: NUMBA_DISABLE_JIT.

A module of its own, because kernels need Numba and this does not.
"""

import functools
import os


@functools.cache
def jit_disabled() -> bool:
    """True if NUMBA_DISABLE_JIT forbids to compile kernels.

    Read once, as Numba reads it when it is imported.
    """
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
