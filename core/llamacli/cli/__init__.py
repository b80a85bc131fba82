"""The command line.

It starts fast and works even if a plugin is broken: modules import only click and the standard library at the top, and
everything else inside the function that needs it.
"""

import gc
import io
import os
import sys

from llamacli.cli.interrupts import EXIT_CODE, exit_now, install_handler

_GARBAGE = 10_000
"""Allocations between collections, which take a tenth of a start with 700."""

_IDLE_THREADS = "OPENBLAS_THREAD_TIMEOUT", "4"
"""Setting without which idle threads of NumPy keep a core busy for 0.1 s."""


def main() -> None:
    """Entry point of `llamacli`; ends the process with an exit code.

    0 success, 1 error, 2 usage error, 130 interrupted (128 + SIGINT), 141 stdout closed early (128 + SIGPIPE).
    """
    try:
        install_handler()
        gc.set_threshold(_GARBAGE)
        os.environ.setdefault(*_IDLE_THREADS)
        from llamacli.cli.app import app

        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # an encoding without a character must not end the program
                stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
        app.main(prog_name="llamacli")
    except KeyboardInterrupt:
        exit_now()
    except SystemExit as end:
        if end.code == EXIT_CODE:
            exit_now()
        gc.freeze()  # the last collection, of a model's tables, would take 0.1 s
        raise
