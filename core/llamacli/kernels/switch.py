"""Whether kernels are compiled at all; apart from them, because they need Numba and this does not."""

import os


def jit_disabled() -> bool:
    """Whether NUMBA_DISABLE_JIT forbids to compile kernels."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
