"""Limits of the address space: errors of one line."""

import subprocess
import sys

import pytest

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
@pytest.mark.parametrize("mib", [*range(272, 400, 8), 476, 484, 488, 492])
def test_small_address_spaces_end_in_one_line(mib: int) -> None:
    """Load, prompt, grammar and generation meet the limit in turn."""
    result = limited(mib)
    if result.returncode:
        assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
        assert result.stderr.startswith("llamacli: error: ")
    else:
        assert result.stdout.startswith("{")


@pytest.mark.medium
def test_address_space_without_room_for_libraries() -> None:
    result = limited(300)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "llamacli: error: not enough memory" in result.stderr
