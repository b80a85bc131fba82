"""A short form of `make day`."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "day.py"


@pytest.mark.slow
def test_a_server_is_the_same_after_loads_batches_and_kills() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--seconds", "20"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no fault" in done.stdout
