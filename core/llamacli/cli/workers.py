"""Options of models on several machines: --workers, --spare-workers and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli.command import in_group
from llamacli.cli.numbers import Form
from llamacli.cli.options import PATH, option
from llamacli.cli.output import note
from llamacli.util.settings import SplitMode

if TYPE_CHECKING:
    from llamacli.stages.link import Workers

_ADDRESS = r"(?:[^\s/,:]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}"

ADDRESS = Form(_ADDRESS, "an address such as 127.0.0.1:7070")
_ADDRESSES = Form(rf"{_ADDRESS}(?:,{_ADDRESS})*", "addresses such as node2:7070,node3:7070")
_UNDIVIDED = "none"
_SHARES = Form(r"\d+(?:\.\d+)?(?:,\d+(?:\.\d+)?)*", "shares such as 3,1")


def worker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of workers, which `pop_workers` reads."""
    return in_group(
        "Several machines",
        option(
            "--workers", metavar="HOST:PORT,...", type=_ADDRESSES,
            help="Divide the model among this process and workers, see `llamacli worker`.",
        ),
        option(
            "-sm", "--split-mode", type=click.Choice([*(mode.value for mode in SplitMode), _UNDIVIDED]),
            help="What is divided: layers (layer, the default), for models that are too large and for many texts at "
            "once, or the rows of matrix products (row), for the speed of one text. No effect without --workers.",
        ),
        option(
            "--spare-workers", metavar="HOST:PORT,...", type=_ADDRESSES,
            help="Workers that replace others, which do not answer or are lost.",
        ),
        option("--secret-file", type=PATH, help="File with the secret of the workers; only its owner may read it."),
        option(
            "-ts", "--tensor-split", metavar="N,...", type=_SHARES,
            help="Shares of the model, this process first. Default: by the memory and speed of each.",
        ),
    )(command)  # fmt: skip


def pop_workers(given: dict[str, Any], *unsupported: str) -> Workers | None:
    """Remove the options of workers from a command's parameters.

    Raises UsageError for options that do not go together, such as one of those `unsupported` with workers; OSError.
    """
    names = "workers", "spare_workers", "secret_file", "tensor_split", "split_mode"
    addresses, spares, secret_file, split, mode = found = [given.pop(name) for name in names]
    if all(value is None for value in found[:-1]):
        if mode is not None:  # command lines for llama.cpp divide a model among GPUs by it
            note("llamacli: note: without effect: --split-mode (there are no --workers)")
        return None
    from llamacli.stages.frames import address_of, read_secret
    from llamacli.stages.link import Workers

    secret = None if secret_file is None else read_secret(secret_file)
    if addresses is None:
        raise click.UsageError("--secret-file, --spare-workers and --tensor-split need --workers HOST:PORT.")
    if secret is None:
        raise click.UsageError("--workers needs --secret-file FILE.")
    if mode == _UNDIVIDED:
        raise click.UsageError("--split-mode none: --workers divide the model, by layer or row.")
    expect_alone(given, "workers", *unsupported)
    shares = None if split is None else tuple(map(float, split.split(",")))
    first, others = (tuple(map(address_of, text.split(","))) if text else () for text in (addresses, spares))
    return Workers(first, secret, shares, others, SplitMode(mode or SplitMode.LAYER))


def expect_alone(given: dict[str, Any], flag: str, *unsupported: str) -> None:
    """Raise UsageError for options that a divided model does not support."""
    for name in unsupported:
        if given.get(name):
            other = {"ray_address": "ray"}.get(name, name).replace("_", "-")
            raise click.UsageError(f"--{other} and --{flag} exclude each other.")
