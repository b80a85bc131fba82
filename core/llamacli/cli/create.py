"""`llamacli create`: a model with a system prompt and parameters under a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from llamacli.cli.command import Command
from llamacli.cli.options import PATH, global_options, option
from llamacli.cli.output import note
from llamacli.cli.sampling import FIELDS
from llamacli.cli.text import argument, read_file
from llamacli.errors import InvalidRequestError

_NAMES = {"n": "max_tokens", "num_predict": "max_tokens", "n_predict": "max_tokens"} | FIELDS
_CONTEXT = ("num_ctx", "ctx_size", "num_thread", "num_gpu", "num_batch")


@click.command(cls=Command)
@click.argument("name")
@option("--from", "origin", metavar="MODEL", allow_from_autoenv=False, help="Model: file, short name or USER/REPO.")
@option("-f", "--file", type=PATH, allow_from_autoenv=False, help="Read these settings from an ollama Modelfile.")
@option("-sys", "--system", metavar="TEXT", allow_from_autoenv=False, help="System prompt.")
@option(
    "--set", "settings", metavar="NAME=VALUE", multiple=True, allow_from_autoenv=False,
    help="Parameter, such as temperature=0.3, seed, max_tokens or stop. May be given several times.",
)  # fmt: skip
@option("--force", is_flag=True, allow_from_autoenv=False, help="Replace a name that exists.")
@global_options
def create(
    name: str, origin: str | None, file: str | None, system: str | None, settings: tuple[str, ...], force: bool
) -> None:
    """Give a model, a system prompt and parameters a name.

    `run NAME` and `serve NAME` use them where no option or request says otherwise. The name is a table of the file
    aliases.toml in the configuration folder; `rm NAME` deletes it, and nothing is downloaded or copied.
    """
    from llamacli.hub.names import lookup, reference
    from llamacli.hub.personas import create_persona

    table: dict[str, Any] = _of_modelfile(Path(file)) if file is not None else {}
    if origin is not None:
        table["from"] = str(Path(origin).absolute()) if Path(origin).exists() else origin
    if "from" not in table:
        raise click.UsageError(f"Which model? llamacli create {name} --from MODEL, or -f Modelfile.")
    if not Path(table["from"]).exists() and lookup(table["from"]) is None:
        reference(table["from"])
    if system is not None:
        table["system"] = argument(system)
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"{text!r} is not NAME=VALUE, as in temperature=0.3.")
        _set(table, key.strip(), value.strip())
    create_persona(name, table, replace=force)
    note(f"{name} is {table['from']}; llamacli run {name}")


def _of_modelfile(path: Path) -> dict[str, Any]:
    from llamacli.serve.catalogue import parse_modelfile

    fields = parse_modelfile(read_file(path))
    if fields["adapters"]:
        raise InvalidRequestError(f"{path}: ADAPTER is not supported in a name; give --lora to run and serve")
    table = {key: fields[key] for key in ("from", "system") if fields.get(key)}
    beside = path.parent / table["from"]
    if beside.exists():
        table["from"] = str(beside.absolute())
    if "template" in fields:
        note(f"{path}: TEMPLATE is left out, the model's own chat template is used; --chat-template gives another")
    for key, value in fields["parameters"].items():
        if key in _CONTEXT:
            note(f"{path}: PARAMETER {key} is left out; give run and serve -c or -t")
        elif key == "stop":
            table["stop"] = value
        else:
            _set(table, key, json.dumps(value))
    return table


def _set(table: dict[str, Any], name: str, text: str) -> None:
    key = _NAMES.get(name.replace("-", "_"), name)
    if key in ("from", "system", "template"):
        raise click.UsageError(f"{key} is not a parameter; give --{key}.")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if key == "stop":
        table[key] = [*table.get(key, []), *(value if isinstance(value, list) else [text])]
    else:
        table[key] = value
