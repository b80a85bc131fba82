"""Registry of compiled programs: one file loaded twice shares its weights.

It refers to programs weakly. Each model holds its program, so closing one model frees nothing that another uses, and
the last to close frees the weights.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

from llamacli.engine.base import Program
from llamacli.util.locking import fork_safe

_log = logging.getLogger(__name__)

_programs: weakref.WeakValueDictionary[Hashable, Program] = weakref.WeakValueDictionary()
_lock = fork_safe(threading.Lock())


def file_key(paths: Iterable[Path]) -> Hashable:
    """Identity of files on disk: device, inode, size, times of changes.

    A file that was replaced or written to has another one. Raises OSError.
    """
    stats = map(os.stat, paths)
    return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats)


def find_program(key: Hashable) -> Program | None:
    """Get the program of a key if it is compiled and whole."""
    program = _programs.get(key)
    return program if program is not None and program.is_whole else None


def shared_program(key: Hashable, compile_program: Callable[[], Program]) -> Program:
    """Get the program of a key, or compile it.

    Threads that ask for one program at a time may each compile it; all get the same then.
    """
    program = find_program(key)
    if program is None:
        program = compile_program()
        with _lock:
            program = _programs[key] = find_program(key) or program
        return program
    _log.debug("weights are shared with a model that is loaded already")
    return program
