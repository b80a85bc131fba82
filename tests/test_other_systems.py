"""Replies where the calls that macOS and Windows lack are taken away."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.medium

PROGRAM = Path(__file__).parent / "support" / "other_system.py"


@functools.cache
def reply(system: str) -> str:
    done = subprocess.run([sys.executable, PROGRAM, system], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_reply_is_the_same(system: str) -> None:
    assert len(reply("linux").split()) > 10
    assert reply(system) == reply("linux")
