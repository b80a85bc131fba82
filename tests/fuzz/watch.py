"""Shared memory with the progress of a child process."""

import mmap
import struct
import time
from pathlib import Path

_HEAD = struct.Struct("<ddqqqdq")  # start on the clock and in CPU time, cases done, refused, growth, slowest, length
_ROOM = 1 << 20


class Watch:
    """Progress of a child process in a file that both have mapped.

    - `started`, `cpu`: time.monotonic() at the start of the current case, 0 between cases, and the process's CPU time.
    - `n_done`, `n_refused`: cases that ended, and those of them that raised an error of `llamacli.errors`.
    - `n_bytes`: growth of the resident set after the first quarter of the cases, in bytes.
    - `slowest`: seconds of CPU time of the slowest case.
    """

    def __init__(self, path: Path, *, create: bool = False):
        if create:
            path.write_bytes(bytes(_ROOM))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _ROOM)
        self.read()

    def read(self) -> None:
        """Read the other process's progress."""
        head = _HEAD.unpack_from(self._memory)
        self.started, self.cpu, self.n_done, self.n_refused, self.n_bytes, self.slowest, self._length = head

    @property
    def case(self) -> str:
        """Current case, or the last one."""
        return self._memory[_HEAD.size : _HEAD.size + self._length].decode("utf-8", "surrogatepass")

    def begin(self, case: str) -> None:
        """Store a case that is tried now."""
        data = case.encode("utf-8", "surrogatepass")[: _ROOM - _HEAD.size]
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        self._length, self.started, self.cpu = len(data), time.monotonic(), time.process_time()
        self._write()

    def end(self, *, refused: bool) -> None:
        """Count the case."""
        self.slowest = max(self.slowest, time.process_time() - self.cpu)
        self.started, self.n_done, self.n_refused = 0.0, self.n_done + 1, self.n_refused + refused
        self._write()

    def grown(self, n_bytes: int) -> None:
        """Store the growth of memory."""
        self.n_bytes = n_bytes
        self._write()

    def _write(self) -> None:
        _HEAD.pack_into(
            self._memory,
            0,
            self.started,
            self.cpu,
            self.n_done,
            self.n_refused,
            self.n_bytes,
            self.slowest,
            self._length,
        )
