"""`llamacli convert`: write a Hugging Face folder as a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from llamacli.cli.command import Command
from llamacli.cli.options import PATH, global_options, option, threads_option
from llamacli.cli.output import human_bytes, printable
from llamacli.cli.progress import bar
from llamacli.cli.quantize import check_out, complete_type, finish
from llamacli.errors import InvalidRequestError


@click.command(cls=Command)
@click.argument("folder", type=PATH)
@click.argument("out", type=PATH)
@click.argument("kind", metavar="[TYPE]", required=False, shell_complete=complete_type)
@option("--imatrix", metavar="FILE", type=PATH, help="Importance matrix, from `llamacli imatrix` or llama.cpp.")
@option("--base", metavar="FOLDER", type=PATH, help="Folder of the model of a PEFT adapter or draft head.")
@option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@option("--dry-run", is_flag=True, help="Show the resulting types and sizes without writing.")
@threads_option
@global_options
def convert(
    folder: str,
    out: str,
    kind: str | None,
    imatrix: str | None,
    base: str | None,
    force: bool,
    dry_run: bool,
    threads: int | None,
) -> None:
    """Convert a Hugging Face folder to a GGUF file.

    Reads FOLDER, with config.json, safetensors and tokenizer, and writes OUT.

    TYPE is one of `llamacli quantize`. Without it matrices keep their type: BF16, F16 or F32; those in FP8 become that
    of the others. Tensors are converted one at a time. `llamacli run FOLDER` runs the same without a file.
    A folder of a PEFT adapter becomes a file for --lora, in F32; it needs --base unless adapter_config.json names a
    folder. That of a draft head becomes a file for --draft, with the tokenizer of --base.
    """
    if not os.path.basename(out):
        raise click.BadParameter(f"{out!r} is not a file name.", param_hint="OUT")
    if base and not os.path.isdir(base):
        raise click.BadParameter(f"{base!r} is no folder.", param_hint="--base")
    if os.path.isfile(os.path.join(folder, "adapter_config.json")):
        if kind or imatrix:
            raise click.UsageError("A PEFT adapter is written in F32: give neither TYPE nor --imatrix.")
        _convert_adapter(Path(folder), Path(out), base, force, dry_run)
        return
    with bar(f"reading {os.path.basename(os.path.normpath(folder))}"):
        from llamacli.architecture import configured
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
        file = installed.open_folder(Path(folder), stored, Path(base) if base else None)
        architecture = installed.resolve(file.metadata)
        architecture.tensors(configured(architecture, file)).bind(file)
    if wanted is None or stored is not None:
        if importance:
            raise InvalidRequestError("--imatrix is for a TYPE that quantizes")
        planned = unchanged(file, file_type(file.file_type))
    else:
        planned = plan(file, wanted, imatrix=importance)
    finish(planned, out, threads, force=force, dry_run=dry_run)


def _convert_adapter(folder: Path, out: Path, base: str | None, force: bool, dry_run: bool) -> None:
    from llamacli.checkpoints import Folder, PeftAdapter
    from llamacli.plugins import installed_plugins

    adapter = PeftAdapter(folder)
    model = Path(base) if base else adapter.base
    if model is None:
        named = adapter.fields.get("base_model_name_or_path")
        raise InvalidRequestError(
            f"{folder}/adapter_config.json: base_model_name_or_path is {named!r}, which is no folder here: give the "
            "folder of the model, or of its config.json alone, by --base"
        )
    found = Folder(model)
    layout = installed_plugins().checkpoint(found)
    source = f"{model}/config.json"
    if dry_run:
        pairs = adapter.pairs(layout, found.config, source)
        click.echo(f"{out} would be: LoRA of {layout.architecture}, {len(pairs)} matrices")
        return
    check_out(str(out), force=force)
    tensors = adapter.write(out, layout, found.config, source, overwrite=force)
    size = human_bytes(sum(info.n_bytes for info in tensors))
    click.echo(printable(f"{out}: LoRA of {layout.architecture}, {len(tensors) // 2} matrices, {size}"))
