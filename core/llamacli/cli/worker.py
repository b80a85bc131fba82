"""`llamacli worker`: a part of a model on several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llamacli.cli import options
from llamacli.cli.command import Command
from llamacli.cli.hub import resolve_model
from llamacli.cli.options import PATH, option
from llamacli.cli.output import note
from llamacli.cli.workers import ADDRESS
from llamacli.util.settings import LoadMode


@click.command(cls=Command)
@click.argument("model", type=PATH)
@option(
    "--listen",
    metavar="HOST:PORT",
    type=ADDRESS,
    default="127.0.0.1:7070",
    show_default=True,
    help="Address for callers; port 0: a free one, which is printed.",
)
@option(
    "--secret-file",
    type=PATH,
    required=True,
    help="File with the secret that callers must have too, of at least 16 bytes; only its owner may read it.",
)
@options.threads_option
@options.load_option
@options.global_options
def worker(model: str, *, listen: str, secret_file: str, threads: int | None, load_mode: str, **_: Any) -> None:
    """Compute a part of MODEL for `run` or `serve` with --workers.

    MODEL is the same file as theirs. Which layers, or rows of products, it computes the caller says; only these are
    loaded, and their part of the KV cache is here. One caller is served at a time. Activations go over TCP,
    authenticated and not encrypted.
    """
    from llamacli.stages.frames import address_of, read_secret
    from llamacli.stages.worker import Worker
    from llamacli.stages.worker import listen as listening

    secret, address = read_secret(secret_file), address_of(listen)
    with listening(address) as listener:
        server = Worker(Path(resolve_model(model)), secret, threads=threads, load=LoadMode(load_mode))
        host, port = listener.getsockname()[:2]
        note(f"listening on {host}:{port}")
        try:
            server.serve(listener)
        except KeyboardInterrupt:
            note("ended")
