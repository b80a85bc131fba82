"""`llamacli pull`, `list` and `rm`: models in the Hugging Face cache."""

from __future__ import annotations

import time

import click

from llamacli.cli.command import Command
from llamacli.cli.options import global_options, option
from llamacli.cli.output import human_bytes, note, print_json, print_table

REFERENCE = "USER/REPO[:QUANT]"


@click.command(cls=Command)
@click.argument("reference", metavar=REFERENCE)
@global_options
def pull(reference: str) -> None:
    """Download a model from the Hugging Face hub and print its path.

    QUANT selects one of several files, as in user/repo:Q5_K_M; default: Q4_K_M, else Q8_0, else the first file.
    Cached files are not downloaded again unless there is a newer revision. Needs the extra `hub`.
    """
    from llamacli.tools.hub import Reference, fetch

    click.echo(fetch(Reference.parse(reference)))


@click.command("list", cls=Command)
@option("--json", is_flag=True, help="Print JSON.")
@global_options
def list_models(json: bool) -> None:
    """List the models in the Hugging Face cache.

    `run -hf` and `rm` accept the names. Needs the extra `hub`.
    """
    from llamacli.tools.hub import cached_models

    models = cached_models()
    if json:
        print_json(
            [
                {
                    "model": str(model.reference),
                    "path": str(model.path),
                    "n_bytes": model.n_bytes,
                    "modified": model.modified,
                }
                for model in models
            ]
        )
    elif models:
        print_table(
            ("model", "size:", "modified", "file"),
            [
                (
                    str(model.reference),
                    human_bytes(model.n_bytes),
                    time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified)),
                    model.path.name,
                )
                for model in models
            ],
        )
    else:
        note("the cache has no GGUF files; llamacli pull downloads one")


@click.command(cls=Command)
@click.argument("references", metavar=f"{REFERENCE}...", nargs=-1, required=True)
@global_options
def rm(references: tuple[str, ...]) -> None:
    """Delete models from the Hugging Face cache.

    Without QUANT all GGUF files of the repository are deleted; its other files stay. Needs the extra `hub`.
    """
    from llamacli.tools.hub import Reference, remove

    for reference in [Reference.parse(text) for text in references]:
        note(f"{reference}: {human_bytes(remove(reference))} freed")


def model_from_hub(text: str) -> str:
    """Path of a hub model's file, downloaded unless cached."""
    from llamacli.tools.hub import Reference, cached, fetch

    reference = Reference.parse(text)
    return str(cached(reference) or fetch(reference))
