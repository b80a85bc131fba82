"""Memory bounds of kernels; `make test-bounds` guards all tests of ops."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COPY = """
import numpy as np
from llamacli.testing import guarded
guarded.install({side!r})
from llamacli.ops.columns import COLUMNS, columns_kernel
from llamacli.kernels.team import Team
from llamacli.kernels.team import run_kernel
a = np.ones((5, 64), np.float32)
out = np.zeros_like(a)
rows = dict(n_rows={rows[1]}, first_row={rows[0]})
run_kernel(Team(1), columns_kernel(), COLUMNS, **rows, x=a, x_stride=256, out=out, out_stride=256, width=64)
print(int(out.sum()))
"""

READ = """
import numpy as np
from llamacli.kernels.jit import array_function
def read(x, i):
    return x[i]
print(array_function("float32(float32[::1], int64)")(read)(np.ones(5, np.float32), {index}))
"""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths} | env, capture_output=True,
        text=True, timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize(
    ("side", "rows", "fine"),
    [("end", (0, 5), True), ("end", (0, 6), False), ("start", (0, 5), True), ("start", (-1, 5), False)],
)
def test_row_out_of_bounds_ends_the_process(side, rows, fine) -> None:
    done = run("-c", COPY.format(side=side, rows=rows))
    assert (done.returncode, done.stdout) == ((0, "320\n") if fine else (-signal.SIGSEGV, "")), done.stderr


@pytest.mark.medium
@pytest.mark.parametrize(("index", "fine"), [(4, True), (5, False)])
def test_array_functions_can_be_compiled_with_bounds_checks(index, fine, tmp_path) -> None:
    done = run("-c", READ.format(index=index), NUMBA_BOUNDSCHECK="1", LLAMACLI_CACHE=str(tmp_path))
    if fine:
        assert done.stdout == "1.0\n", done.stderr
    else:
        assert "IndexError: index is out of bounds" in done.stderr
