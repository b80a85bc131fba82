"""Commands by name: entry points of the group `llamacli.commands`.

Commands of the core and of plugins alike. A command's module is imported when the command is run. Its line in
`llamacli --help` is the docstring of its function, read from the source: it stands in one place and costs no import.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import UserDict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import click

from llamacli.errors import PluginError, reason_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "llamacli.commands"


class Commands(UserDict[str, click.Command]):
    """Commands by name, each loaded when it is first looked up.

    `problems` are messages on entry points that are ignored, by the name of their distribution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: dict[str, list[str]] = {}

    @cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """Entry points by command name; imports none of their modules.

        A name that several distributions have is the core's, or else that of the first module.
        """
        from importlib.metadata import entry_points

        def place(entry: EntryPoint) -> str:
            return "" if is_ours(entry) else entry.value  # a file would be read for the distribution's name

        found: dict[str, EntryPoint] = {}
        for entry in sorted(entry_points(group=GROUP), key=place):
            problem = ""
            if not entry.pattern.match(entry.value) or not entry.attr:
                problem = f"entry point {entry.value!r} names no command, as in module:function"
            elif entry.name in found:
                problem = f"{distribution_of(found[entry.name])} has a command of this name"
            else:
                found[entry.name] = entry
            if problem:
                message = f"command {entry.name!r} is ignored: {problem}"
                self.problems.setdefault(distribution_of(entry), []).append(message)
        if not any(map(is_ours, found.values())):
            raise PluginError("the installed distribution llamacli-core names no commands; install it again")
        return found

    def __missing__(self, name: str) -> click.Command:
        self[name] = _load(self.entries[name])
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self.entries, *self.data}))

    def __len__(self) -> int:
        return len({*self.entries, *self.data})

    def help_line(self, name: str) -> str:
        """First paragraph of a command's help, "" if it is not found."""
        if name in self.data:
            return self.data[name].help or ""
        entry = self.entries[name]
        try:
            with open(_source(entry.module), encoding="utf-8") as file:
                text = file.read()
        except (ImportError, OSError, ValueError, AttributeError):
            return ""
        found = re.search(
            rf'^def {re.escape(entry.attr)}\(.*?:\n\s+"""(.*?)(?:\n\n|""")', text, re.DOTALL | re.MULTILINE
        )
        return " ".join(found[1].split()) if found else ""


def is_ours(entry: EntryPoint) -> bool:
    """True for a command of the core."""
    return entry.value.startswith("llamacli.")


def distribution_of(entry: EntryPoint) -> str:
    """Name of the distribution that has an entry point."""
    return entry.dist.name if entry.dist else "(unknown)"


def _load(entry: EntryPoint) -> click.Command:
    if is_ours(entry):
        return entry.load()
    where = f"command {entry.name!r} of plugin {distribution_of(entry)}"
    try:
        command = entry.load()
    except (Exception, SystemExit) as error:
        raise PluginError(f"{where} cannot be loaded: {reason_of(error)}") from error
    if not isinstance(command, click.Command):
        raise PluginError(f"{where}: {entry.value} is {command!r}, expected a click.Command")
    return command


def _source(module: str) -> str:
    """Path of a module's source, found without importing its package."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec
    if not rest:
        return str(spec.origin)
    path = os.path.join(list(spec.submodule_search_locations or [])[0], *rest)  # noqa: RUF015
    return f"{path}.py" if os.path.isfile(f"{path}.py") else os.path.join(path, "__init__.py")
