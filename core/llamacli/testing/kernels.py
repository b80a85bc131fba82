"""Single kernels, run on arrays."""

import numpy as np

from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import RUN
from llamacli.kernels.team import STEP, Team


def run_kernel(
    team: Team,
    kernel: Kernel,
    record: np.dtype,
    *,
    n_rows: int,
    first_row: int = 0,
    rows: np.ndarray | None = None,
    **params: object,
) -> None:
    """Run one kernel on a team of threads.

    `record` is the dtype of its parameters, `params` their values by name; arrays are passed as their addresses. Rows
    `first_row` to `n_rows` - 1 are computed; `rows` is an array of `llamacli.kernels.layout.ROW`, one for each token.
    """
    args, run, steps = np.zeros(1, record), np.zeros(1, RUN), np.zeros(1, STEP)
    for name, value in params.items():
        args[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    run["n_rows"], run["first_row"], run["rows"] = n_rows, first_row, 0 if rows is None else rows.ctypes.data
    steps["function"], steps["args"] = kernel.address, args.ctypes.data
    team.run(steps.ctypes.data, 0, 1, run.ctypes.data)
