"""Switch for compiled kernels: NUMBA_DISABLE_JIT.

A module of its own, because kernels need Numba and this does not.
"""

import functools
import os


@functools.cache
def jit_disabled() -> bool:
    """True if NUMBA_DISABLE_JIT forbids compiling; read once, as by Numba."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
