"""`llamacli convert`: write a Hugging Face folder as a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from llamacli.cli.command import Command
from llamacli.cli.options import PATH, global_options, option, threads_option
from llamacli.cli.progress import bar
from llamacli.cli.quantize import check_out, complete_type, finish
from llamacli.errors import InvalidRequestError


@click.command(cls=Command)
@click.argument("folder", type=PATH)
@click.argument("out", type=PATH)
@click.argument("kind", metavar="[TYPE]", required=False, shell_complete=complete_type)
@option("--imatrix", metavar="FILE", type=PATH, help="Importance matrix, from `llamacli imatrix` or llama.cpp.")
@option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@option("--dry-run", is_flag=True, help="Show the resulting types and sizes without writing.")
@threads_option
@global_options
def convert(
    folder: str, out: str, kind: str | None, imatrix: str | None, force: bool, dry_run: bool, threads: int | None
) -> None:
    """Convert a Hugging Face folder to a GGUF file.

    Reads FOLDER, with config.json, safetensors and tokenizer, and writes OUT.

    TYPE is one of `llamacli quantize`. Without it matrices keep their type: BF16, F16 or F32; those in FP8 become that
    of the others. Tensors are converted one at a time. `llamacli run FOLDER` runs the same without a file.
    """
    if not os.path.basename(out):
        raise click.BadParameter(f"{out!r} is not a file name.", param_hint="OUT")
    with bar(f"reading {os.path.basename(os.path.normpath(folder))}"):
        from llamacli.checkpoints import FILE_TYPES
        from llamacli.conversion import file_type, plan, read_imatrix, unchanged
        from llamacli.plugins import installed_plugins

        importance = read_imatrix(Path(imatrix)) if imatrix else None
        if not Path(folder).is_dir():
            raise InvalidRequestError(f"{folder} is no folder; llamacli quantize converts GGUF files")
        installed = installed_plugins()
        installed.loaders()  # the tensor types of plugins
        try:
            wanted = file_type(kind) if kind else None
        except InvalidRequestError as error:
            raise click.BadParameter(f"{error}.", param_hint="TYPE") from None
        if not dry_run:
            check_out(out, force=force)
        stored = next((name for name in FILE_TYPES if wanted and name == wanted.type), None)
        file = installed.open_folder(Path(folder), stored)
        architecture = installed.resolve(file.metadata)
        architecture.tensors(architecture.configure(file.metadata)).bind(file)
    if wanted is None or stored is not None:
        if importance:
            raise InvalidRequestError("--imatrix is for a TYPE that quantises")
        planned = unchanged(file, file_type(file.kind.name))
    else:
        planned = plan(file, wanted, imatrix=importance)
    finish(planned, out, threads, force=force, dry_run=dry_run)
