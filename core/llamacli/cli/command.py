"""Commands with groups of options in their help, and llama.cpp's options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import click

from llamacli.cli.numbers import Integer, IntList, Number
from llamacli.cli.output import note
from llamacli.cli.peer_options import FOREIGN

Decorated = TypeVar("Decorated")

_FACTS = re.compile(r"\[[^][]+\]$")
"""Default and range at the end of an option's help."""
_NO_BREAK = "\N{NO-BREAK SPACE}"

_WIDE = 100_000
"""Limit from which the help does not show a range."""


class Option(click.Option):
    """Option in a `group` of the help."""

    group = ""

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Further facts for the help; narrow ranges in words."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        if isinstance(self.type, Integer | Number) and self.type.max is not None and self.type.max < _WIDE:
            extra["range"] = self.type.bounds
        return extra


def output_option(*formats: str) -> Callable[[Any], Any]:
    """Decorator that adds `-o`, `--output`: a format, by default the first."""
    return click.option(
        "-o", "--output", cls=Option, type=click.Choice(formats), default=formats[0], show_default=True,
        help="Output format.",
    )  # fmt: skip


def in_group(group: str, *options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Decorator that adds options as a group of the help."""

    def decorate(command: Any) -> Any:
        others = {id(param) for param in getattr(command, "__click_params__", ())}
        for add in reversed(options):
            command = add(command)
        for param in command.__click_params__:
            if id(param) not in others:
                param.group = group
        return command

    return decorate


class Command(click.Command):
    """Command that shows its options in groups.

    Options of llama.cpp without an effect here are accepted with a note. Options that are misspelled are errors that
    name similar ones.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, each group under its name."""
        for name, options in grouped(self.get_params(ctx)).items():
            records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
            with formatter.section(name):
                formatter.write_dl(
                    [
                        (flags, _FACTS.sub(lambda found: found[0].replace(" ", _NO_BREAK), text))
                        for flags, text in records
                    ]
                )

    def get_help(self, ctx: click.Context) -> str:
        """Format the help; the default of an option stands in one line."""
        return super().get_help(ctx).replace(_NO_BREAK, " ")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, without those of llama.cpp."""
        ignored: dict[str, str] = {}
        options = [param for param in self.params if isinstance(param, click.Option)]
        known = {flag: option for option in options for flag in (*option.opts, *option.secondary_opts)}
        args = list(_supported(ctx, args, known, ignored))
        if ignored and not ctx.resilient_parsing:
            note(f"llamacli: note: without effect: {', '.join(f'{name} ({why})' for name, why in ignored.items())}")
        return super().parse_args(ctx, args)


def grouped(params: Iterable[click.Parameter]) -> dict[str, list[click.Option]]:
    """Options by the heading of their group, ungrouped ones last."""
    groups: dict[str, list[click.Option]] = {}
    options = [param for param in params if isinstance(param, click.Option)]
    for option in sorted(options, key=lambda option: not getattr(option, "group", "")):
        groups.setdefault(getattr(option, "group", "") or "Options", []).append(option)
    return {name if len(groups) == 1 or name != "Options" else "Other": found for name, found in groups.items()}


def _supported(
    ctx: click.Context, args: list[str], known: dict[str, click.Option], ignored: dict[str, str]
) -> Iterator[str]:
    """Arguments without those of llama.cpp, which go to `ignored`.

    Raises UsageError for options that would have one, NoSuchOption for unknown ones.
    """
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        name, has_value, _ = arg.partition("=") if arg.startswith("--") else (arg, "", "")
        if arg == "--":
            yield arg
            yield from rest
            return
        if not name.startswith("-") or name == "-":
            yield arg
        elif name in known:
            yield arg
            if rest and not has_value and not known[name].is_flag:
                yield rest.pop(0)
        elif name in FOREIGN:
            foreign = FOREIGN[name]
            if not foreign.works:
                raise click.UsageError(f"{name} is an option of {foreign.of}; here: {foreign.reason}.", ctx)
            if foreign.n_values and not has_value:
                del rest[:1]
            elif rest and rest[0] in foreign.values:
                del rest[0]
            if foreign.reason:
                ignored[name] = foreign.reason
            yield from foreign.instead
        else:
            _check_short(ctx, arg, known)
            yield arg


def _check_short(ctx: click.Context, arg: str, known: dict[str, click.Option]) -> None:
    """Refuse a long option with one hyphen: `-nlg` would be `-n lg`."""
    short = known.get(arg[:2])
    if arg.startswith("--") or (short is not None and not isinstance(short.type, Integer | Number | IntList)):
        return
    if short is None or arg[2] not in "0123456789.,=+-":
        similar = difflib.get_close_matches(arg, [*known, *FOREIGN])
        raise click.NoSuchOption(arg, possibilities=similar, ctx=ctx)
