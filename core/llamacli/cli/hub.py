"""`llamacli pull`, `list` and `rm`: models in the Hugging Face cache."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import click

from llamacli.cli.command import Command
from llamacli.cli.options import global_options, option
from llamacli.cli.output import human_bytes, local_minute, note, print_json, print_table
from llamacli.errors import LlamaCliError, ModelNotFoundError
from llamacli.hub.demo import demo_path

REFERENCE = "USER/REPO[:QUANT]"

_FITS = {True: "yes", False: "no", None: ""}


@click.command(cls=Command)
@click.argument("reference", metavar=REFERENCE)
@global_options
def pull(reference: str) -> None:
    """Download a model from the Hugging Face hub.

    Prints its path. A short name, such as `family:8b`, may be given instead; `list --names` prints them. QUANT selects
    one of several files, as in user/repo:Q5_K_M; default: Q4_K_M, else Q8_0, else the first
    file; of these and smaller ones the one that fits the free memory.
    Cached files are not downloaded again unless there is a newer revision.
    """
    from llamacli.hub.names import reference as named
    from llamacli.hub.repositories import fetch

    click.echo(fetch(named(reference))[0])


@click.command("list", cls=Command)
@option("--names", is_flag=True, help="List the short names of models instead, your own first.")
@option("--packed", is_flag=True, help="List the packed copies of models in the cache folder instead.")
@option("--supported", metavar="NAME", help="Say whether a model runs: a repository, an architecture, or its name.")
@option("--json", is_flag=True, help="Print JSON.")
@global_options
def list_models(names: bool, packed: bool, supported: str | None, json: bool) -> None:
    """List the models in the Hugging Face cache.

    The column fits compares the free memory with a model's weights and the cache of 4096 tokens.
    `run -hf` and `rm` accept the names. `run` and other commands also accept short names: those of a list in the
    package, and your own from the file aliases.toml in the configuration folder (~/.config/llamacli on Linux), with a
    line such as `name = "user/repo:Q4_K_M"` for each. Packed copies are files that are mapped when a model is loaded
    again; `rm --packed` deletes them. --supported ends with status 1 if no plugin runs the model.
    """
    if names + packed + (supported is not None) > 1:
        raise click.UsageError("--names, --packed and --supported exclude each other.")
    if supported is not None:
        _print_support(supported, json)
        return
    if names:
        _print_names(json)
        return
    if packed:
        from llamacli.engine.packed_copies import copies

        time_key, columns = "used", ["model", "size:", "last used"]
        found = [(copy.model, copy.path, copy.n_bytes, copy.used) for copy in copies()]
        none = "there are no packed copies; loading a model of 64 MiB or more makes one"
    else:
        from llamacli.hub.repositories import cached_models

        time_key, columns = "modified", ["model", "size:", "fits", "modified", "file"]
        found = [(str(model.reference), model.path, model.n_bytes, model.modified) for model in cached_models()]
        none = "the cache has no GGUF files; llamacli pull downloads one"
    fit = {} if packed else {path: _fits(path, size) for _, path, size, _ in found}
    if json:
        keys = ("model", "path", "n_bytes", time_key)
        rows = [(path, dict(zip(keys, (name, str(path), *rest), strict=True))) for name, path, *rest in found]
        print_json([row | ({"fits": fit[path]} if fit else {}) for path, row in rows])
    elif found:
        lines = [
            (name, human_bytes(size), *([_FITS[fit[path]]] if fit else ()), local_minute(time), path.name)
            for name, path, size, time in found
        ]
        print_table(columns, [line[: len(columns)] for line in lines])
    else:
        note(none)


def _fits(path: Path, size: int) -> bool | None:
    """Test if a model and a context fit into the free memory.

    A file that cannot be read counts with its size.
    """
    from llamacli.model import need_of
    from llamacli.plugins import installed_plugins
    from llamacli.util.system import fits

    with contextlib.suppress(LlamaCliError, OSError):
        size = need_of(path, installed_plugins()).n_bytes
    return fits(size)


def _print_support(name: str, json: bool) -> None:
    import attrs

    from llamacli.tools.supported import support

    found = support(name)
    if json:
        print_json([attrs.asdict(one) for one in found])
    elif found:
        answers = [("yes" if one.runs else "no", one.architecture, one.plugin or "", one.models) for one in found]
        print_table(("runs", "architecture", "plugin", "models"), answers)
        for text in dict.fromkeys(one.note for one in found if one.note):
            note(text)
    else:
        note(f"{name}: no model of this name is known; `llamacli inspect FILE` reads a file's architecture")
    if not any(one.runs for one in found):
        raise SystemExit(1)


def _print_names(json: bool) -> None:
    from llamacli.hub.names import DEMO, aliases, shipped_names

    shipped = {DEMO: str(demo_path())} | shipped_names()
    own = aliases()
    known = own | {name: repo for name, repo in shipped.items() if name not in own}
    if json:
        print_json(known)
    else:
        print_table(("name", "model"), list(known.items()))


@click.command(cls=Command)
@click.argument("references", metavar=f"{REFERENCE}...", nargs=-1)
@option("--packed", is_flag=True, help="Delete all packed copies of models in the cache folder instead.")
@global_options
def rm(references: tuple[str, ...], packed: bool) -> None:
    """Delete models from the Hugging Face cache, or names of your own.

    Without QUANT all GGUF files of the repository are deleted; its other files stay. Packed copies are made
    again when their models are loaded.
    """
    if packed == bool(references):
        raise click.UsageError(f"Give models to delete, {REFERENCE}, or --packed.")
    if packed:
        from llamacli.engine.packed_copies import remove_copies

        note(f"packed copies: {human_bytes(remove_copies())} freed")
        return
    from llamacli.hub.names import own_names
    from llamacli.hub.names import reference as named
    from llamacli.hub.personas import remove_name
    from llamacli.hub.repositories import remove

    own = [name for name in references if name in own_names()]
    for name in own:
        remove_name(name)
        note(f"{name}: the name is deleted, its model stays")
    references = tuple(name for name in references if name not in own)
    for reference in list(map(named, references)):
        note(f"{reference}: {human_bytes(remove(reference))} freed")


def model_from_hub(text: str) -> str:
    """Path of a hub model's file, downloaded unless cached."""
    from llamacli.hub.names import located, reference

    return str(located(reference(text)))


def resolve_model(name: str) -> str:
    """Path of a model's file, from its path or a name."""
    from llamacli.hub.names import resolve

    try:
        return str(resolve(name)) if name else name
    except ModelNotFoundError:
        _expect_order(name)
        raise


def _expect_order(name: str) -> None:
    """Raise UsageError if another argument of the command is the model."""
    context = click.get_current_context(silent=True)
    params = context.command.params if context else []
    values = [context.params.get(one.name or "") for one in params if context and isinstance(one, click.Argument)]
    given = [text for value in values for text in (value if isinstance(value, tuple) else (value,)) if text]
    model = next((text for text in given if text.endswith(".gguf") and Path(text).is_file()), None)
    if context and name in given and model is not None:
        others = [text for text in given if text != model]
        raise click.UsageError(f"MODEL comes first. Here: {context.command_path} {shlex.join([model, *others])}")
