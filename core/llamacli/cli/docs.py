"""Writes docs/cli.md from the commands themselves: `python -m llamacli.cli.docs > docs/cli.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from llamacli.cli.app import app

_INTRODUCTION = """\
# The command line

<!-- Written by `python -m llamacli.cli.docs > docs/cli.md`; a test says when it has to be run again. -->

Text goes to stdout and everything else to stderr. Exit codes: 0 success, 1 error (one line on stderr), 2 wrong usage,
130 interrupted with Ctrl-C, 141 when the reader of stdout closed it early, as with any program that a closed pipe ends.

An option that is not given is taken from its environment variable, where it has one.
"""


def reference() -> str:
    """The whole page, in Markdown."""
    with click.Context(app, info_name="llamacli", **app.context_settings) as root:
        sections = [_INTRODUCTION, *_section(app, root)]
        for name in app.list_commands(root):
            command = app.commands[name]
            with click.Context(command, parent=root, info_name=name) as ctx:
                sections += _section(command, ctx)
    return "\n".join(sections)


def _section(command: click.Command, ctx: click.Context) -> Iterator[str]:
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    usage = [ctx.command_path, "[OPTIONS]", *map(_argument, arguments)]
    if isinstance(command, click.Group):
        usage.append("COMMAND ...")
    yield f"## {ctx.command_path}\n"
    yield f"```\n{' '.join(usage)}\n```\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    if command.epilog:
        yield f"{command.epilog}\n"
    yield "| option | meaning | environment |\n|---|---|---|"
    for param in command.params:
        if isinstance(param, click.Option):
            yield _row(param, ctx)
    yield ""


def _argument(argument: click.Argument) -> str:
    if argument.metavar:
        return argument.metavar
    name = str(argument.name).upper()
    return name if argument.required else f"[{name}]"


def _row(option: click.Option, ctx: click.Context) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" {_value(option)}"
    default = f" Default: {option.default}." if option.show_default and not option.is_flag else ""
    variable = ""
    if option.allow_from_autoenv and option.expose_value | (ctx.parent is None):
        variable = f"`{ctx.auto_envvar_prefix}_{str(option.name).upper()}`"
    return f"| {flags}{value} | {option.help}{default}{_range(option.type)} | {variable} |"


def _value(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return " or ".join(f"`{choice}`" for choice in option.type.choices)
    return option.metavar or option.type.name.upper()


def _range(kind: object) -> str:
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    return f" At least {kind.min}." if kind.max is None else f" From {kind.min} to {kind.max}."


if __name__ == "__main__":
    click.echo(reference(), nl=False)
