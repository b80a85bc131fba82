"""Personas: tables of aliases.toml with a model, a system prompt and parameters."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.hub.names import DEMO, aliases_path, own_names
from llamacli.util.files import replacing
from llamacli.util.numbers import is_integer
from llamacli.util.sampling_params import PARAMETERS

_NAME = re.compile(r"[\w.-]+(?::[\w.-]+)?", re.ASCII)
_INTEGERS = ("seed", "max_tokens")


@attrs.frozen
class Persona:
    """Model under a user's own name.

    - `model`: its file, short name or repository.
    - `system`, `template`: system prompt and chat template, "" for none.
    - `sampling`: sampling parameters by name. `stop`: strings that end a text.
    - `seed`, `max_tokens`: None for none.
    """

    model: str
    system: str = ""
    template: str = ""
    sampling: dict[str, float] = attrs.field(factory=dict)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None

    @classmethod
    def of_table(cls, name: str, table: Mapping[str, Any]) -> Persona:
        """Persona of a table. Raises InvalidRequestError that names the key."""

        def expect(condition: bool, key: str, what: str) -> None:
            if not condition:
                raise InvalidRequestError(f"{name}: {key} must be {what}, not {table.get(key)!r}")

        expect(isinstance(table.get("from"), str) and bool(table["from"]), "from", "a model")
        for key in ("system", "template"):
            expect(isinstance(table.get(key, ""), str), key, "a text")
        stop = table.get("stop", [])
        expect(isinstance(stop, list) and all(isinstance(one, str) and one for one in stop), "stop", "a list of texts")
        for key in _INTEGERS:
            expect(table.get(key) is None or (is_integer(table[key]) and table[key] >= 0), key, "an integer from 0")
        sampling = {key: table[key] for key in table if key not in ("from", "system", "template", "stop", *_INTEGERS)}
        for key, value in sampling.items():
            one = PARAMETERS.get(key)
            if one is None:
                raise InvalidRequestError(f"{name}: there is no parameter {key!r}; {', '.join(PARAMETERS)} are known")
            high = float("inf") if one.high is None else one.high
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            expect(is_number and one.low <= value <= high, key, f"a number from {one.low:g} to {high:g}")
            expect(is_integer(value) or not one.is_integer, key, "an integer")
        known = {key: table[key] for key in ("system", "template", *_INTEGERS) if key in table}
        return cls(table["from"], sampling=sampling, stop=tuple(stop), **known)


def persona(name: str) -> Persona | None:
    """Persona of this name, None for another name or a file.

    Raises InvalidRequestError for a wrong table.
    """
    table = own_names().get(name)
    return Persona.of_table(name, table) if isinstance(table, dict) and not Path(name).exists() else None


def create_persona(name: str, table: Mapping[str, Any], *, replace: bool) -> None:
    """Add a persona to aliases.toml.

    Raises InvalidRequestError for a wrong table, and for a name that exists unless `replace`; OSError.
    """
    if not _NAME.fullmatch(name) or name == DEMO:
        raise InvalidRequestError(f"{name!r} is not a name of your own, such as tutor or tutor:small")
    Persona.of_table(name, table)
    if name in own_names():
        if not replace:
            raise InvalidRequestError(f"{name} exists; --force replaces it, llamacli rm {name} deletes it")
        remove_name(name)
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    before = _text()
    gap = "\n" * (bool(before) + (not before.endswith("\n") and bool(before)))
    _write(f"{before}{gap}[{json.dumps(name)}]\n" + "\n".join(lines) + "\n")


def remove_name(name: str) -> None:
    """Delete a name from aliases.toml, a line or a table of it.

    Raises InvalidRequestError for an unknown name, and if the file spells it in a way that this cannot edit.
    """
    own = own_names()
    if name not in own:
        raise InvalidRequestError(f"{name} is not a name of your own; llamacli list --names prints them")
    key = rf'(?:{re.escape(name)}|"{re.escape(name)}")'
    table = rf"^\[{key}\][^\n]*\n(?:(?!\[)[^\n]*(?:\n|\Z))*"
    text, n = re.subn(rf"{table}|^{key} *=[^\n]*(?:\n|\Z)", "", _text(), count=1, flags=re.MULTILINE)
    if n != 1 or tomllib.loads(text) != {other: value for other, value in own.items() if other != name}:
        raise InvalidRequestError(f"{aliases_path()}: delete {name} there with an editor")
    _write(text)


def _text() -> str:
    path = aliases_path()
    return path.read_text("utf-8") if path is not None and path.is_file() else ""


def _write(text: str) -> None:
    path = aliases_path()
    if path is None:
        raise InvalidRequestError("there is no home folder for aliases.toml: set XDG_CONFIG_HOME")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, overwrite=True) as file:
        file.write(text.encode())
