"""Sampling options, with defaults of the model's file and of llama.cpp."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from llamacli.cli.command import in_group
from llamacli.cli.numbers import Integer, Number
from llamacli.cli.options import PATH, option
from llamacli.cli.text import argument, read_file, unescaped
from llamacli.util.sampling_defaults import DEFAULTS, ORDER, Default

if TYPE_CHECKING:
    from llamacli import SamplingParams
    from llamacli.gguf import Metadata
    from llamacli.sampling import FindSampler

Decorated = TypeVar("Decorated")

_COUNT = Integer(0)


class _Setting(NamedTuple):
    """Option of a sampling parameter.

    `field` is its name in SamplingParams; the first of the `flags` is the same, the others are llama.cpp's options.
    """

    field: str
    flags: tuple[str, ...]
    help: str

    @property
    def default(self) -> Default:
        """Default value, range, and metadata key."""
        return DEFAULTS[self.field]

    @property
    def type(self) -> Integer | Number:
        """Parameter type for click."""
        default = self.default
        if isinstance(default.value, int):
            return Integer(int(default.low), None if default.high is None else int(default.high))
        return Number(default.low, default.high)


_SETTINGS = (
    _Setting("temperature", ("--temperature", "--temp"),
             "Temperature; 0: greedy decoding."),
    _Setting("dynatemp_range", ("--dynatemp-range",),
             "Range of the dynamic temperature; 0: off."),
    _Setting("dynatemp_exponent", ("--dynatemp-exponent", "--dynatemp-exp"),
             "Exponent of the entropy in the dynamic temperature."),
    _Setting("top_k", ("--top-k",),
             "Keep the k most likely tokens; 0: off."),
    _Setting("top_p", ("--top-p",),
             "Nucleus sampling: keep the most likely tokens with a total probability of p; 1: off."),
    _Setting("min_p", ("--min-p",),
             "Drop tokens with less than p times the probability of the most likely one; 0: off."),
    _Setting("typical_p", ("--typical-p", "--typical"),
             "Locally typical sampling with a total probability of p; 1: off."),
    _Setting("top_n_sigma", ("--top-n-sigma", "--top-nsigma"),
             "Drop tokens with logits more than n standard deviations below the maximum; 0 or less: off."),
    _Setting("xtc_probability", ("--xtc-probability",),
             "XTC: chance to drop all tokens above --xtc-threshold but the least likely; 0: off."),
    _Setting("xtc_threshold", ("--xtc-threshold",),
             "XTC: probability from which tokens are dropped; above 0.5: off."),
    _Setting("repeat_penalty", ("--repeat-penalty",),
             "Penalty for repeated tokens; 1: off."),
    _Setting("frequency_penalty", ("--frequency-penalty",),
             "Penalty subtracted from a token's logit for each repetition; 0: off."),
    _Setting("presence_penalty", ("--presence-penalty",),
             "Penalty subtracted once from the logits of repeated tokens; 0: off."),
    _Setting("repeat_last_n", ("--repeat-last-n",),
             "Number of last tokens to consider for penalties; 0: none, -1: all."),
    _Setting("dry_multiplier", ("--dry-multiplier",),
             "DRY: multiplier of the penalty for tokens that extend a repeated sequence; 0: off."),
    _Setting("dry_base", ("--dry-base",),
             "DRY: base of the penalty, which grows exponentially with the repetition."),
    _Setting("dry_allowed_length", ("--dry-allowed-length",),
             "DRY: length of repetitions without penalty."),
    _Setting("dry_penalty_last_n", ("--dry-penalty-last-n",),
             "DRY: number of last tokens to search for repetitions; 0: none, -1: all."),
    _Setting("mirostat", ("--mirostat",),
             "Mirostat version 1 or 2, which replaces the other samplers; 0: off."),
    _Setting("mirostat_tau", ("--mirostat-tau", "--mirostat-ent"),
             "Mirostat: target entropy (tau), in bits."),
    _Setting("mirostat_eta", ("--mirostat-eta", "--mirostat-lr"),
             "Mirostat: learning rate (eta)."),
    _Setting("adaptive_target", ("--adaptive-target",),
             "Adaptive-p: target probability of the selected tokens; below 0: off."),
    _Setting("adaptive_decay", ("--adaptive-decay",),
             "Adaptive-p: decay of the moving average, over about 1 / (1 - X) tokens."),
)  # fmt: skip

FIELDS = {flag.removeprefix("--").replace("-", "_"): setting.field for setting in _SETTINGS for flag in setting.flags}
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


_OTHERS = (
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
)  # fmt: skip

_CONSTRAINTS = (
    option(
        "--grammar", metavar="TEXT",
        help="Constrain generation to a grammar in GBNF. Needs the extra `grammar`, like the next three options.",
    ),
    option("--grammar-file", type=PATH, help="Read the grammar from a file."),
    option("-j", "--json-schema", metavar="JSON", help="Constrain generation to JSON valid under a JSON Schema."),
    option("-jf", "--json-schema-file", type=PATH, help="Read the JSON Schema from a file."),
)  # fmt: skip


def sampling_options(command: Decorated) -> Decorated:
    """Add the sampling options to a command.

    The values of those not given are None.
    """
    command = in_group("Grammar", *_CONSTRAINTS)(command)
    return in_group("Sampling", *map(_option, _SETTINGS), *_OTHERS)(command)


def _option(setting: _Setting) -> Callable[[Any], Any]:
    metavar = "N" if isinstance(setting.type, Integer) else "X"
    source = "the model's, else " if setting.default.key else ""
    text = f"{setting.help} Default: {source}{setting.default.value:g}."
    return option(*setting.flags, type=setting.type, metavar=metavar, help=text)


def sampling_params(
    given: Mapping[str, Any], metadata: Metadata, n_ctx: int, find: FindSampler | None = None
) -> SamplingParams:
    """Sampling parameters of options, else metadata, else llama.cpp's defaults.

    `find` looks up samplers of plugins. Raises ModelFormatError for metadata outside of an option's range, UsageError
    for an unknown sampler.
    """
    from llamacli.sampling.defaults import params_with_defaults

    values = {setting.field: given.get(setting.field) for setting in _SETTINGS}
    process = unescaped if given.get("escape") else str
    breakers = [process(argument(text)) for text in given.get("dry_sequence_breaker") or ()]
    if breakers:
        values["dry_sequence_breakers"] = () if "none" in breakers else breakers
    return params_with_defaults(
        {
            **values,
            **_constraint(given),
            "samplers": _samplers(given.get("samplers"), find),
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
    """Names of the options that give a grammar, at most 1.

    Raises UsageError for more.
    """
    names = ("grammar", "grammar_file", "json_schema", "json_schema_file")
    named = [name for name in names if given.get(name) is not None]
    if len(named) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in named)
        raise click.UsageError(f"{flags} exclude each other.")
    return named


def _constraint(given: Mapping[str, Any]) -> dict[str, str]:
    """The grammar or schema, given as text or in a file."""
    named = check_constraint(given)
    return {
        name.removesuffix("_file"): read_file(Path(given[name])) if name.endswith("_file") else argument(given[name])
        for name in named
    }


def _samplers(given: str | None, find: FindSampler | None) -> tuple[str, ...] | None:
    """Samplers of the option in order, None without it."""
    if given is None:
        return None
    from llamacli.sampling import BUILT_IN, sampler_type
    from llamacli.sampling.defaults import sampler_names

    names = sampler_names(given)
    missing = [name for name in names if sampler_type(name, find) is None]
    if missing:
        known = "; ".join(sorted(kind.name for kind in BUILT_IN))
        raise click.UsageError(f"Invalid value for '--samplers': unknown sampler {missing[0]!r}; known are {known}.")
    return names
