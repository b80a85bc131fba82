"""Limits of the address space: errors of one line."""

import subprocess
import sys

import pytest

from llamacli.cli.progress import MIN_ADDRESS_SPACE
from llamacli.hub.demo import demo_path

SCHEMA = '{"type": "object", "properties": {"fox": {"type": "string"}}}'


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile the kernels without a limit.

    LLVM ends a process that has no memory for that.
    """
    assert not limited(64 << 10).returncode


def limited(mib: int) -> subprocess.CompletedProcess[str]:
    """Run a schema in a limited address space."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({mib << 20}, {mib << 20}))\n"
        "from llamacli.cli import main; main()"
    )
    words = [str(demo_path()), "Once upon a time. " * 80, "-n", "8", "--json-schema", SCHEMA, "--seed", "1"]
    command = [sys.executable, "-c", code, "run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize("mib", [*range(400, 480, 8), 484, 492, 500, 512, 544])
def test_small_address_spaces_end_in_one_line(mib: int) -> None:
    """Load, prompt, grammar and generation meet the limit in turn."""
    result = limited(mib)
    if result.returncode:
        assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
        assert result.stderr.startswith("llamacli: error: ")
    else:
        assert result.stdout.startswith("{")


@pytest.mark.medium
@pytest.mark.parametrize("mib", [300, (MIN_ADDRESS_SPACE >> 20) - 1])
def test_address_space_without_room_for_libraries(mib: int) -> None:
    """No library is imported, as imports fail by any error there."""
    result = limited(mib)
    told = f"the address space is limited to {mib}.00 MiB; 400.00 MiB and the model are needed"
    assert (result.returncode, result.stderr) == (1, f"llamacli: error: not enough memory: {told}\n")
