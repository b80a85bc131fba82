"""Writers that are killed at random instants."""

import os
import signal
import time
from collections.abc import Callable

import numpy as np


def kill_writers(write: Callable[[], object], check: Callable[[], object], n: int, seed: int, seconds: float) -> None:
    """Kill n forked processes that write without end.

    Each is killed within some seconds, and what it leaves is checked.
    `write` was called once by this process, which has no other threads.
    """
    random = np.random.default_rng(seed)
    for _ in range(n):
        writer = os.fork()
        if not writer:
            while True:
                write()
        time.sleep(random.uniform(0, seconds))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        check()
