"""`llamacli plugins`: list, write and check plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from llamacli.cli.command import Command
from llamacli.cli.commands import Commands, distribution_of, is_ours
from llamacli.cli.options import PATH, global_options
from llamacli.cli.output import note, print_json, print_table
from llamacli.cli.progress import bar, working

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from pathlib import Path

    from llamacli.architecture import Architecture
    from llamacli.testing.parametrize import Check


def _plugin_commands() -> tuple[dict[str, list[EntryPoint]], dict[str, list[str]]]:
    root = click.get_current_context().find_root().command
    table = root.commands if isinstance(root, click.Group) else None
    found: dict[str, list[EntryPoint]] = {}
    if not isinstance(table, Commands):
        return found, {}
    for entry in table.entries.values():
        if not is_ours(entry):
            found.setdefault(distribution_of(entry), []).append(entry)
    return found, dict(table.problems)


def _brings() -> dict[str, dict[str, list[str]]]:
    from llamacli.engine.examples import op_classes
    from llamacli.ops.rope import Rope

    found: dict[str, dict[str, list[str]]] = {}
    for kind, classes in (("verbs", op_classes()), ("RoPE variants", Rope.__subclasses__())):
        for module, name in sorted({(made.__module__, made.__name__) for made in classes}):  # attrs makes some twice
            found.setdefault(module.partition(".")[0], {}).setdefault(kind, []).append(name)
    return found


@click.group(invoke_without_command=True)
@click.option("--json", is_flag=True, help="Print JSON.")
@click.pass_context
@global_options
def plugins(context: click.Context, json: bool) -> None:
    """List the installed plugins and what they bring.

    A plugin that cannot be loaded is listed with the reason; others still work. LLAMACLI_TRACE_PLUGINS=1 prints each
    call of a plugin's hook to stderr.
    """
    if context.invoked_subcommand is None:
        _list(json)


def _list(json: bool) -> None:
    import attrs

    from llamacli.plugins import PluginInfo, installed_plugins

    with working("loading plugins"):
        infos = installed_plugins().infos()  # first, so that a broken plugin is listed without a warning
        defined = _brings()
    commands, problems = _plugin_commands()
    infos += [  # distributions that have commands alone
        PluginInfo(
            module=" ".join(sorted({entry.module for entry in commands.get(distribution, [])})),
            distribution=distribution,
            version=next((entry.dist.version for entry in commands.get(distribution, []) if entry.dist), ""),
            architectures=(),
            error=None,
        )
        for distribution in sorted({*commands, *problems} - {info.distribution for info in infos})
    ]
    rows: list[dict[str, Any]] = []
    for info in infos:
        row = attrs.asdict(info)
        brings = {kind: list(names) for kind, names in info.brings.items() if kind != "architectures"}
        own = defined.get(info.module, {})  # of a package that several modules share, the first one brings them
        # The first module of a distribution has its commands.
        row["commands"] = sorted(entry.name for entry in commands.pop(info.distribution, []))
        row["brings"] = brings | {kind: sorted(names) for kind, names in own.items()}
        row["error"] = "; ".join([*filter(None, [info.error]), *problems.pop(info.distribution, [])]) or None
        rows.append(row)
    if json:
        print_json(rows)
    elif rows:
        cells = [
            (
                row["module"], f"{row['distribution']} {row['version']}".rstrip(),
                " ".join(row["architectures"]) or "-", "; ".join(_described(row)) or "-",
            )
            for row in rows
        ]  # fmt: skip
        print_table(("module", "distribution", "architectures", "brings"), cells)
    else:
        click.echo("no plugins are installed; model families are plugins: pip install llamacli")


def _described(row: Mapping[str, Any]) -> Iterator[str]:
    kinds = dict(row["brings"]) | ({"commands": row["commands"]} if row["commands"] else {})
    yield from (f"{kind}: {', '.join(names)}" for kind, names in kinds.items())
    if row["error"]:
        yield f"error: {row['error']}"


@plugins.command(cls=Command)
@click.argument("name")
@click.option(
    "--from",
    "source",
    metavar="MODEL",
    type=PATH,
    help="GGUF file, or Hugging Face folder, whose keys and tensors are taken.",
)
@click.option(
    "--like",
    "kind",
    type=click.Choice(["dense", "moe", "hybrid", "encoder", "vision", "sound"]),
    help="Kind of model instead.",
)
@click.option("--folder", metavar="FOLDER", type=PATH, help="Folder to write; default: llamacli-NAME.")
@global_options
def new(name: str, source: str | None, kind: str | None, folder: str | None) -> None:
    """Write the skeleton of a plugin: a distribution with tests.

    From a mmproj file it is a media encoder, with the tensors of its projector. From a model it has every key, every
    tensor with its shape in terms of the configuration, and a forward pass of the parts that are known; the rest is
    marked as left to do. The plugin can be installed, and its tests say what is left. MODEL is a GGUF file, or a
    Hugging Face folder. Of a folder whose `architectures` no plugin reads, the skeleton reads the folder itself, and
    its tests compare with transformers where that and torch are installed.
    """
    from pathlib import Path

    if (source is None) == (kind is None):
        raise click.UsageError("Give either --from MODEL or --like KIND.")
    target = Path(folder or f"llamacli-{name}")
    with working("describing the model"):
        from llamacli.testing.scaffold import like, write_encoder_plugin, write_plugin

        if kind in ("vision", "sound"):
            written = write_encoder_plugin(target, name, hears=kind == "sound")
        elif source is not None:
            written = _write_from(target, Path(source), name)
        else:
            written = write_plugin(target, name, like(str(kind), name), from_file=False)
    for path in written:
        click.echo(path)
    click.echo(f"next: pip install -e '{target}[test]' && pytest {target}")


def _write_from(target: Path, source: Path, name: str) -> list[Path]:
    """Write the skeleton for a file or a folder."""
    from llamacli.checkpoints import Folder
    from llamacli.errors import UnknownArchitectureError
    from llamacli.loaders import open_model_file
    from llamacli.plugins import installed_plugins
    from llamacli.testing.scaffold import Description, describe_folder, write_encoder_plugin, write_plugin

    installed = installed_plugins()
    if source.is_dir():
        folder = Folder(source)
        try:
            installed.checkpoint(folder)
        except UnknownArchitectureError:
            description, layout = describe_folder(folder, name)
            return write_plugin(target, name, description, from_file=True, layout=layout)
    file = open_model_file(source, installed.loaders())
    try:
        if file.metadata.get("general.architecture") == "clip":
            return write_encoder_plugin(target, name, file)
        architecture = file.metadata.get_str("general.architecture")
        for entry in installed.claimed_architectures().get(architecture, ()):
            other = f"{distribution_of(entry)} has the architecture {architecture!r} too"
            note(f"llamacli: note: {other}: models of it are an error while both are installed")
        return write_plugin(target, name, Description.of(file), from_file=True)
    finally:
        file.close()


@plugins.command(cls=Command)
@click.argument("name")
@click.option("--variants", metavar="FILE.py", type=PATH, help="Python file with tiny models, VARIANTS.")
@click.option("--peer", is_flag=True, help="Compare logits and greedy tokens with llama-cpp-python too.")
@click.option("--transformers", is_flag=True, help="Compare with Hugging Face's transformers on random models too.")
@click.option("--json", is_flag=True, help="Print JSON.")
@global_options
def check(name: str, variants: str | None, peer: bool, transformers: bool, json: bool) -> None:
    """Check architectures and media encoders of a plugin on tiny models.

    NAME is an architecture, a media encoder, or a plugin's module or distribution. The models are those of VARIANTS or
    MEDIA in Python files, by default `tests/tiny_*.py` of the folder that it was installed from, else `tiny.py` and
    `tiny_*.py` of its package; without these they are made from the architecture's own table. These checks are those of
    `llamacli.testing.parametrize_with_checks`. The exit code is 1 if one fails.

    --transformers needs torch and transformers. The models to compare with are those of TRANSFORMERS in the same file;
    without it, of the model type that is named as the architecture.
    """
    from pathlib import Path

    with working("loading plugins"):
        try:
            from llamacli.testing.installed import TinyModels, tiny_models_of
            from llamacli.testing.parametrize import checks_of
        except ModuleNotFoundError as error:
            from llamacli.errors import InvalidRequestError

            raise InvalidRequestError(f"checks need {error.name}: pip install 'llamacli-core[testing]'") from error

        given = TinyModels.of(Path(variants)) if variants else None
        architectures = _architectures(name)
    rows: list[dict[str, Any]] = []
    for architecture, distribution in architectures:
        tiny = given or tiny_models_of(distribution)
        originals = tiny.originals(architecture.name) if transformers else ()
        checks = checks_of(
            architecture, tiny.variants, inert=tiny.inert, unread=tiny.unread, peer=peer, transformers=originals
        )
        with working(f"making tiny models of {architecture.name}"):
            _write_models(checks[-1], from_table=tiny.variants is None)
        rows += [row for one in checks if (row := _check_row(one, json))]
    n_failed = sum(row["error"] is not None for row in rows)
    if json:
        print_json(rows)
    else:
        click.echo(f"{len(rows) - n_failed} of {len(rows)} checks passed")
    if n_failed:
        raise Exit(1)


def _write_models(check: Check, *, from_table: bool) -> None:
    from llamacli.errors import ModelFormatError

    try:
        check.models()
    except ModelFormatError as error:
        if not from_table:
            raise
        advice = "tiny models made from the architecture's own table lack its keys: give others by --variants FILE.py"
        raise ModelFormatError(f"{error}; {advice}, or install the plugin from its folder") from error


def _check_row(one: Check, json: bool) -> dict[str, Any] | None:
    import time

    from llamacli.errors import LlamaCliError, reason_of
    from llamacli.testing import result_checks
    from llamacli.testing.conformance import ConformanceError

    start, error, nmse, remarks = time.perf_counter(), None, None, list[str]()
    try:
        if not one.models():
            return None
        with bar(f"checking {one.id}"):
            nmse = one()
            remarks = [*result_checks.remarks]
    except (ConformanceError, LlamaCliError, ImportError) as found:
        error = str(found)
    except Exception as found:  # of the plugin: the other checks may say more
        error = reason_of(found)
    seconds = time.perf_counter() - start
    if not json:
        said = error or (None if nmse is None else f"NMSE {nmse:.2g}")
        click.echo(f"{'FAILED' if error else 'ok':6} {seconds:6.1f} s  {one.id}{f': {said}' if said else ''}")
        for remark in remarks:
            click.echo(f"{'':18}{remark}")
    return {"check": one.id, "seconds": round(seconds, 3), "nmse": nmse, "error": error, "remarks": remarks}


def _architectures(name: str) -> list[tuple[Architecture, str]]:
    from llamacli.plugins import installed_plugins

    installed = installed_plugins()
    infos = installed.infos()
    kinds = {"architectures": installed.architecture, "media encoders": installed.media_encoder}
    brought = [(kind, claimed, info) for info in infos for kind in kinds for claimed in info.brings.get(kind, ())]
    found = [
        (kinds[kind](claimed), info.distribution)
        for kind, claimed, info in brought
        if name in (info.module, info.distribution, claimed)
    ]
    return found or [(installed.architecture(name), "")]
