"""`llamacli plugins`, and commands registered by plugins."""

from __future__ import annotations

import logging
from typing import Any

import click

from llamacli.cli.options import global_options
from llamacli.cli.output import print_json, print_table

_log = logging.getLogger(__name__)


def plugin_commands() -> dict[str, click.Command]:
    """Load the plugins and return their commands by name."""
    return {name: command for group in _commands_by_module().values() for name, command in group.commands.items()}


def _commands_by_module() -> dict[str, click.Group]:
    """Commands by plugin module.

    A plugin that fails is skipped with a warning.
    """
    from llamacli.plugins import GENERAL, installed_plugins

    installed = installed_plugins()
    installed.load_group(GENERAL)
    found: dict[str, click.Group] = {}
    for hook in installed.hook.register_commands.get_hookimpls():
        group = click.Group()
        try:
            hook.function(*(group for _ in hook.argnames))
        except Exception as error:
            _log.warning("plugin %s cannot add its commands: %s: %s", hook.plugin_name, type(error).__name__, error)
        else:
            found[hook.plugin_name] = group
    return found


@click.command()
@click.option("--json", is_flag=True, help="Print JSON.")
@global_options
def plugins(json: bool) -> None:
    """List the installed plugins and their status.

    A plugin that cannot be loaded is listed with the reason; others still work.
    """
    from llamacli.plugins import installed_plugins

    infos = installed_plugins().infos()  # first, so that a broken plugin is listed without a warning
    groups = _commands_by_module()
    rows: list[dict[str, Any]] = [
        {
            "module": info.module,
            "distribution": info.distribution,
            "version": info.version,
            "architectures": list(info.architectures),
            "commands": sorted(groups[info.module].commands) if info.module in groups else [],
            "error": info.error,
        }
        for info in infos
    ]
    if json:
        print_json(rows)
    elif rows:
        print_table(
            ("module", "distribution", "version", "architectures", "commands", "status"),
            [
                (
                    row["module"],
                    row["distribution"],
                    row["version"],
                    " ".join(row["architectures"]) or "-",
                    " ".join(row["commands"]) or "-",
                    row["error"] or "ok",
                )
                for row in rows
            ],
        )
    else:
        click.echo("no plugins are installed; model families are plugins: pip install 'llamacli[all]'")
