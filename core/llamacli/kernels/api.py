"""Public interface for authors of kernels, with a version of its own.

A plugin whose verbs have kernels declares `LLAMACLI_KERNEL_API = 2` in its module; a core with another `VERSION`
refuses it by name. A kernel is a function `(args, run, thread, n_threads)` that every thread of a team runs at once:

- `args` is the address of the step's parameters, a record made by `llamacli.kernels.layout.record`;
- `run` is the address of a `RUN`: rows `first_row` to `n_rows` - 1 are to be computed;
- `thread` of `n_threads` does its `share` of the units of work and returns. Which thread does which unit must follow
  from these four numbers alone, so that results do not depend on the number of threads.

Addresses are integers. `carray(pointer(address), shape, type)` makes an array of memory, `simd` has vectors of 16
float32 lanes: `simd.load(address)`, `simd.store(address, x)`, `simd.add`, `simd.mul`, `simd.fma`, `simd.exp`,
`simd.sum_f32`, `simd.splat`, `simd.first_lanes`. Nothing is checked: the step's record decides what memory is touched.

Rows of activations are float32, `stride` bytes apart, padded with zeros to a whole number of blocks of
ACTIVATION_BLOCK numbers. A kernel keeps that padding zero: the last vector of a row may be written beyond its width
only with zeros.
"""

from __future__ import annotations

from llamacli.kernels import simd
from llamacli.kernels.deferred import carray, njit
from llamacli.kernels.jit import Kernel, kernel
from llamacli.kernels.layout import ACTIVATION_BLOCK, CACHE_FIELDS, LANES, ROW, RUN, STATE_FIELDS, record
from llamacli.kernels.recurrent import state_kernel
from llamacli.kernels.simd import pointer
from llamacli.kernels.work import rows_of, share
from llamacli.util.settings import KERNEL_API as VERSION

__all__ = [
    "ACTIVATION_BLOCK",
    "CACHE_FIELDS",
    "LANES",
    "ROW",
    "RUN",
    "STATE_FIELDS",
    "VERSION",
    "Kernel",
    "carray",
    "kernel",
    "njit",
    "pointer",
    "record",
    "rows_of",
    "share",
    "simd",
    "state_kernel",
]
