#!/usr/bin/env python3
"""Time a kernel of the core beside its copy in a plugin.

    python benchmarks/verbs.py

The kernel of RMS norm is compiled twice: as the core's, and from the same source in a module outside the core. Prints
microseconds per run of both, alternating, and the median ratio with its interquartile range.
"""

import inspect
import linecache
import statistics
import time

import numpy as np

from llamacli.kernels.api import Kernel
from llamacli.kernels.layout import RUN
from llamacli.kernels.team import STEP, Team
from llamacli.ops import rms_norm
from llamacli.ops.norms import NORM

N_ROWS, WIDTH, N_RUNS = 64, 2048, 400


def plugin_kernel() -> Kernel:
    """The core's kernel, compiled from its source as a plugin's."""
    name, source = "<llamacli_copy>", inspect.getsource(rms_norm.rms_norm_kernel)
    source = f"from __future__ import annotations\n{source}"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    namespace = {**vars(rms_norm), "__name__": "llamacli_copy"}
    exec(compile(source, name, "exec"), namespace)
    made = namespace["rms_norm_kernel"]()
    assert isinstance(made, Kernel)
    assert made.name != "rms_norm", "a plugin's kernel carries a digest"
    return made


def main() -> None:
    """Measure and print."""
    team, x = Team(1), np.random.default_rng(0).normal(size=(N_ROWS, WIDTH)).astype(np.float32)
    out, weight = np.zeros_like(x), np.ones(WIDTH, np.float32)
    args, run, steps = np.zeros(1, NORM), np.zeros(1, RUN), np.zeros(1, STEP)
    args["x"], args["out"], args["weight"] = x.ctypes.data, out.ctypes.data, weight.ctypes.data
    args["stride"], args["n_heads"], args["head_dim"], args["eps"] = 4 * WIDTH, 1, WIDTH, 1e-6
    run["n_rows"] = N_ROWS
    steps["args"] = args.ctypes.data

    def microseconds(kernel: Kernel) -> float:
        steps["function"] = kernel.address
        started = time.perf_counter()
        for _ in range(20):
            team.run(steps, 0, 1, run)
        return (time.perf_counter() - started) / 20 * 1e6

    kernels = rms_norm.rms_norm_kernel(), plugin_kernel()
    times = [[microseconds(kernel) for kernel in kernels] for _ in range(N_RUNS)]
    ratios = sorted(plugin / core for core, plugin in times)
    core, plugin = (statistics.median(column) for column in zip(*times, strict=True))
    quarter = len(ratios) // 4
    print(f"core {core:.1f} us, plugin {plugin:.1f} us, plugin / core {statistics.median(ratios):.3f}", end=" ")
    print(f"({ratios[quarter]:.3f} to {ratios[-quarter]:.3f})")


if __name__ == "__main__":
    main()
