"""`llamacli warmup`: compile all kernels ahead of time."""

from __future__ import annotations

import time

import click

from llamacli.cli.command import Command
from llamacli.cli.options import global_options
from llamacli.cli.output import note
from llamacli.cli.progress import bar
from llamacli.errors import InvalidRequestError, plugin_errors


@click.command(cls=Command)
@global_options
def warmup() -> None:
    """Compile all kernels for this CPU, those of plugins too.

    They are cached on disk, so that no later run has to compile them; cached kernels are not compiled again.
    """
    compiled, started = list[str](), time.monotonic()
    with bar("compiling kernels") as progress:
        from llamacli.engine import jit_disabled
        from llamacli.engine.catalog import catalog
        from llamacli.kernels import jit
        from llamacli.plugins import ARCHITECTURES, GENERAL, installed_plugins

        if jit_disabled():
            raise InvalidRequestError("NUMBA_DISABLE_JIT is set, so kernels cannot be compiled")
        for group in (GENERAL, ARCHITECTURES):  # they register tensor types and define verbs
            installed_plugins().load_group(group)
        kernels = catalog()
        jit.listeners.append(compiled.append)
        try:
            for done, kernel in enumerate(kernels):
                progress(done, len(kernels))
                with plugin_errors(f"compiling {kernel.name}"):
                    kernel.compile()
        finally:
            jit.listeners.remove(compiled.append)
    note(f"{len(kernels)} kernels are ready: {len(compiled)} compiled in {time.monotonic() - started:.1f} s")
