"""Sampling options, with defaults of the model's file and of llama.cpp."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llamacli.cli.command import in_group
from llamacli.cli.numbers import Integer, Number
from llamacli.cli.options import PATH, option
from llamacli.cli.text import argument, read_file, unescaped
from llamacli.util.sampling_params import ORDER, PARAMETERS, Parameter

if TYPE_CHECKING:
    from llamacli import SamplingParams
    from llamacli.gguf import Metadata
    from llamacli.sampling import FindSampler

Decorated = TypeVar("Decorated")

FIELDS = {flag.replace("-", "_"): field for field, one in PARAMETERS.items() for flag in (field, *one.flags)}
"""Fields of SamplingParams by the names of their options."""

_BIAS = re.compile(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", re.ASCII)


def _biases(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[int, float]:
    """Sum the biases of each token; -inf stays -inf."""
    sums: dict[int, float] = {}
    for value in values:
        match = _BIAS.fullmatch(value)
        bias = float(match[2]) if match else math.nan
        if match is None or not (abs(bias) <= 1_000_000 or math.isinf(bias)):
            form = "a token id and a number from -1000000 to 1000000 or inf, as in 15043-1.5"
            raise click.BadParameter(f"{value!r} is not {form}.", ctx, param)
        token = int(match[1])
        sums[token] = -math.inf if -math.inf in (sums.get(token), bias) else sums.get(token, 0.0) + bias
    return sums


def _sampler_options(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE, as in strength=0.5.", ctx, param)
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


_OTHERS = (
    option(
        "--reasoning-budget-message", metavar="TEXT", help="Text that is written before a forced end of reasoning.",
    ),
    option(
        "--dry-sequence-breaker", multiple=True, metavar="TEXT",
        help="DRY: text that ends a repetition; may be given several times. Default: a newline, a colon, a quote, an "
        "asterisk; none: no breakers.",
    ),
    option(
        "-l", "--logit-bias", multiple=True, metavar="ID+BIAS", callback=_biases,
        help="Bias added to a token's logit, as in 15043+1 or 15043-1; 15043-inf bans it. May be given several times.",
    ),
    option(
        "-r", "--stop", "--reverse-prompt", "stop", multiple=True, metavar="TEXT",
        help="Stop string: the text ends before it. May be given several times.",
    ),
    option(
        "--samplers", metavar="NAMES",
        help=f"Samplers in order; others are off. Default: the model's, else {'; '.join(ORDER)}.",
    ),
    option(
        "--sampler-option", multiple=True, metavar="NAME=VALUE", callback=_sampler_options,
        help="Option of a plugin's sampler, its value JSON or a text. May be given several times.",
    ),
)  # fmt: skip

_CONSTRAINTS = (
    option(
        "--grammar", metavar="TEXT",
        help="Constrain generation to a grammar in GBNF.",
    ),
    option("--grammar-file", type=PATH, help="Read the grammar from a file."),
    option("-j", "--json-schema", metavar="JSON", help="Constrain generation to JSON valid under a JSON Schema."),
    option("-jf", "--json-schema-file", type=PATH, help="Read the JSON Schema from a file."),
)  # fmt: skip


def sampling_options(command: Decorated) -> Decorated:
    """Add the sampling options to a command; those not given are None."""
    command = in_group("Grammar", *_CONSTRAINTS)(command)
    return in_group("Sampling", *number_options(), *_OTHERS)(command)


def number_options() -> tuple[Callable[[Any], Any], ...]:
    """Options of the numeric parameters."""
    return tuple(map(_option, PARAMETERS.values()))


def _option(one: Parameter) -> Callable[[Any], Any]:
    kind: Integer | Number = Number(one.low, one.high)
    if one.is_integer:
        kind = Integer(int(one.low), None if one.high is None else int(one.high))
    source = "the model's, else " if one.key else ""
    text = f"{one.help} Default: {source}{one.default:g}."
    metavar = "N" if one.is_integer else "X"
    flags = (f"--{flag.replace('_', '-')}" for flag in (one.name, *one.flags))
    return option(*flags, type=kind, metavar=metavar, help=text)


def sampling_params(
    given: Mapping[str, Any],
    metadata: Metadata,
    n_ctx: int,
    find: FindSampler | None = None,
    names: Callable[[], Sequence[str]] = tuple,
) -> SamplingParams:
    """Sampling parameters of options, else metadata, else llama.cpp's defaults.

    `find` looks up samplers of plugins by name, `names` lists them. Raises ModelFormatError for metadata outside of an
    option's range, UsageError for an unknown sampler.
    """
    from llamacli.sampling.defaults import params_with_defaults

    values = {field: given.get(field) for field in PARAMETERS}
    process = unescaped if given.get("escape") else str
    breakers = [process(argument(text)) for text in given.get("dry_sequence_breaker") or ()]
    if breakers:
        values["dry_sequence_breakers"] = () if "none" in breakers else breakers
    return params_with_defaults(
        {
            **values,
            **_constraint(given),
            "samplers": _samplers(given.get("samplers"), find, names),
            "reasoning_budget_message": given.get("reasoning_budget_message"),
            "options": given.get("sampler_option") or {},
            "logit_bias": given.get("logit_bias") or {},
            "n_probs": given.get("logprobs") or 0,
            "stop": stop_strings(given),
        },
        metadata,
        n_ctx,
        find,
    )


def stop_strings(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Stop strings of the options; raises UsageError for an empty one."""
    texts = tuple(map(argument, given.get("stop") or ()))
    if "" in texts:
        raise click.UsageError("Invalid value for '--stop': it is empty. Give the text to stop at, as in --stop '\\n'.")
    return tuple(map(unescaped, texts)) if given.get("escape") else texts


def check_constraint(given: Mapping[str, Any]) -> list[str]:
    """Names, at most 1, of grammar options given; UsageError for more."""
    names = ("grammar", "grammar_file", "json_schema", "json_schema_file")
    named = [name for name in names if given.get(name) is not None]
    if len(named) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in named)
        raise click.UsageError(f"{flags} exclude each other.")
    return named


def _constraint(given: Mapping[str, Any]) -> dict[str, str]:
    named = check_constraint(given)
    for name in ("grammar", "json_schema"):
        if name in named and len(given[name]) < 256 and "\0" not in given[name] and Path(given[name]).is_file():
            flag = name.replace("_", "-")
            raise click.UsageError(f"{given[name]} is a file. Here: --{flag}-file {given[name]}")
    return {
        name.removesuffix("_file"): read_file(Path(given[name])) if name.endswith("_file") else argument(given[name])
        for name in named
    }


def _samplers(
    given: str | None, find: FindSampler | None, others: Callable[[], Sequence[str]]
) -> tuple[str, ...] | None:
    if given is None:
        return None
    from llamacli.sampling import BUILT_IN, sampler_type
    from llamacli.sampling.defaults import sampler_names

    names = sampler_names(given)
    missing = [name for name in names if sampler_type(name, find) is None]
    if missing:
        known = "; ".join(sorted({*(kind.name for kind in BUILT_IN), *others()}))
        raise click.UsageError(f"Invalid value for '--samplers': unknown sampler {missing[0]!r}; known are {known}.")
    return names
