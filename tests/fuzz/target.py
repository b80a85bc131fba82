"""Description of a fuzzing target."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from hypothesis import strategies as st

GIB = 1 << 30


@attrs.frozen
class Target:
    """Thing that takes input from strangers.

    - `cases`: strategy of inputs; they are Python literals, so that they can be kept as text.
    - `draw`: draws a case as cheaply as possible, where Hypothesis would take longer than what is tried.
    - `start`: prepares a child process, with a folder of its own, and returns the function that tries a case.
    - `per_process`: cases after which the child process is replaced.
    - `memory`: limit of the child's address space in bytes; `growth`: of its resident set, from the first quarter of
      its cases on.
    - `seconds`: limit of a case in CPU time; on the clock it is twelve times as much, for machines that are busy.
    """

    cases: st.SearchStrategy[Any]
    start: Callable[[Path], Callable[[Any], object]]
    draw: Callable[[random.Random], Any] | None = None
    per_process: int = 2000
    memory: int = 4 * GIB
    growth: int = 64 << 20
    seconds: float = 5.0
