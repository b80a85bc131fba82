"""Program that generates a reply on a simulated macOS or Windows.

Calls that the system lacks are taken away. Prints the reply. Used by tests/test_other_systems.py.
"""

import builtins
import io
import mmap
import os
import select
import signal
import subprocess  # noqa: F401 - before the platform changes
import sys
import threading
from pathlib import Path

import numba  # noqa: F401 - as above
import numpy as np  # noqa: F401 - as above
import platformdirs  # noqa: F401 - as above
import psutil  # noqa: F401 - as above

ONLY_LINUX = ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "fdatasync", "sched_yield")
NOT_ON_WINDOWS = (
    "fork", "register_at_fork", "getuid", "geteuid", "setpriority", "set_blocking", "fchmod", "preadv", "pread",
    "pwrite", "writev", "O_CLOEXEC", "getloadavg",
)  # fmt: skip
SIGNALS = ("SIGPROF", "SIGXCPU", "ITIMER_PROF", "setitimer", "SIGHUP", "SIGWINCH", "SIGPIPE", "pthread_sigmask")

_open = io.open


def _without_proc(path, *arguments, **options):
    asked_by = sys._getframe(1).f_globals.get("__name__", "")
    if str(path).startswith(("/proc", "/sys")) and not asked_by.startswith("psutil"):
        raise FileNotFoundError(2, "there is no such file on this system", str(path))
    return _open(path, *arguments, **options)


def _take(module, names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def simulate(system: str) -> None:
    """Take away what "darwin" or "win32" lacks."""
    io.open = builtins.open = _without_proc
    _take(os, ONLY_LINUX)
    _take(mmap, ("MADV_HUGEPAGE", "MADV_POPULATE_READ"))
    if system == "win32":
        sys.modules.update(dict.fromkeys(("fcntl", "resource", "grp", "pwd", "termios", "tty")))
        _take(os, NOT_ON_WINDOWS)
        _take(signal, SIGNALS)
        _take(select, ("poll", "epoll"))
        _take(mmap, [name for name in dir(mmap) if name.startswith(("MADV_", "MAP_"))])
    sys.platform = system


def share_kernels(machine: str) -> None:
    """Use this machine's kernels, and write an entry of the cache."""
    from llamacli.kernels import cpu, jit

    cpu.host()  # as this system finds it
    system, sys.platform = sys.platform, machine
    jit.fingerprint()
    sys.platform = system
    entry = jit._Entry(f"probe-{os.getpid()}")
    entry.save(b"probe")
    assert entry._read() == b"probe"
    entry._path.unlink()


def of_two_stages() -> str:
    """Text of the demo model, half of whose layers a worker computes."""
    import llamacli
    from llamacli.stages.link import Workers
    from llamacli.stages.worker import Worker, listen

    secret = bytes(16)
    with listen(("127.0.0.1", 0)) as listener:
        worker = Worker(Path(llamacli.demo_path()), secret, threads=1)
        threading.Thread(target=worker.serve, args=(listener,), daemon=True).start()
        engine = Workers((listener.getsockname()[:2],), secret, (1, 1)).engine(1, "memory")
        with llamacli.load_model("demo", engine=engine) as model:
            return next(iter(model.generate(["Once upon a time"], max_tokens=12))).text


if __name__ == "__main__":
    machine = sys.platform
    simulate(sys.argv[1])
    import llamacli

    share_kernels(machine)
    from llamacli.engine.packed_copies import finish_copies

    print(of_two_stages())
    for load in ("memory", "map") if sys.platform != "win32" else ("memory",):
        with llamacli.load_model("demo", threads=2, load=load) as model, model.create_session() as session:
            session.eval(model.encode("Once upon a time"))
        finish_copies()
    with llamacli.load_model("demo", threads=2) as model, model.create_chat(max_tokens=24) as chat:
        chat.add_user("Tell me a story about a fox.")
        print("".join(piece.text for piece in chat.respond(llamacli.SamplingParams())))
