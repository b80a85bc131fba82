"""Switch for compiled kernels: NUMBA_DISABLE_JIT.

A module of its own, because kernels need Numba and this does not.
"""

import os


def jit_disabled() -> bool:
    """True if NUMBA_DISABLE_JIT forbids to compile kernels."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
