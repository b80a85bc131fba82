"""The command line.

Starting must be quick and must work when a plugin does not: the modules here import click and the standard library
only, and everything else inside the function that needs it.
"""

import io
import sys

from llamacli.cli.interrupts import EXIT_CODE, leave, listen


def main() -> None:
    """Entry point of `llamacli`; ends the process with its exit code.

    0 success, 1 error, 2 wrong usage, 130 interrupted (128 + SIGINT), 141 stdout closed early (128 + SIGPIPE).
    """
    try:
        listen()
        from llamacli.cli.app import app

        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # one that cannot show a character must not end the program
                stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
        app.main(prog_name="llamacli")
    except KeyboardInterrupt:
        leave()
    except SystemExit as end:
        if end.code == EXIT_CODE:
            leave()
        raise
