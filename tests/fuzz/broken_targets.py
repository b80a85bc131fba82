"""Targets with faults that the fuzzer must find."""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.target import Target
from llamacli.errors import InvalidRequestError, plugin_errors

_FAULTY = 77
_kept: list[bytearray] = []


def _target(fault: Callable[[], object], **limits: Any) -> Target:
    def attempt(case: int) -> None:
        if case == _FAULTY:
            fault()
        if case % 2:
            raise InvalidRequestError("odd")

    return Target(st.integers(0, 99), lambda folder: attempt, per_process=200, **limits)


def _write(folder: Path) -> Callable[[int], object]:
    return lambda case: (folder / "file").write_text(str(case))


def _fail_as_plugin() -> None:
    with plugin_errors("loader 'x'"):
        raise KeyError("missing")


def _fail(folder: Path) -> Callable[[int], object]:
    raise FileNotFoundError(folder / "base")


TARGETS = {
    "sound": _target(lambda: None),
    "files": Target(st.integers(0, 99), _write),
    "raises": _target(lambda: {}["missing"]),
    "plugin": _target(_fail_as_plugin),
    "signal": _target(lambda: ctypes.string_at(0)),
    "hangs": _target(lambda: time.sleep(60), seconds=0.2),
    "loops": _target(lambda: sum(range(10**12)), seconds=0.2),
    "memory": _target(lambda: bytearray(8 << 30)),
    "cannot start": Target(st.integers(), _fail),
    "grows": Target(
        st.integers(0, 10**6), lambda folder: lambda case: _kept.append(bytearray(b"x") * (1 << 18)), per_process=600
    ),
}
"""Targets by name; all but the first two are faulty."""
