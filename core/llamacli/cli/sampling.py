"""Sampling options, with defaults of the model's file and of llama.cpp."""

from __future__ import annotations

import logging
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

if TYPE_CHECKING:
    from llamacli import SamplingParams
    from llamacli.gguf import Metadata
    from llamacli.sampling import FindSampler

Decorated = TypeVar("Decorated")

_log = logging.getLogger(__name__)

_KEYS = "general.sampling."
_SEQUENCE = _KEYS + "sequence"
_ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_NUMBER, _COUNT = Number(-1_000_000, 1_000_000), Integer(0)
_AT_LEAST_0, _SHARE = Number(0, 1_000_000), Number(0, 1)


class _Setting(NamedTuple):
    """A sampling option.

    `default` is llama.cpp's, `key` the metadata key below `general.sampling.`, if there is one.
    """

    field: str
    default: float
    flags: tuple[str, ...]
    type: Integer | Number
    help: str
    key: str | None = None


_SETTINGS = (
    _Setting("temp", 0.8, ("--temp", "--temperature"), _AT_LEAST_0,
             "Temperature; 0: greedy decoding.", "temp"),
    _Setting("dynatemp_range", 0.0, ("--dynatemp-range",), _AT_LEAST_0,
             "Range of the dynamic temperature; 0: off."),
    _Setting("dynatemp_exponent", 1.0, ("--dynatemp-exp",), _AT_LEAST_0,
             "Exponent of the entropy in the dynamic temperature."),
    _Setting("top_k", 40, ("--top-k",), _COUNT,
             "Keep the k most likely tokens; 0: off.", "top_k"),
    _Setting("top_p", 0.95, ("--top-p",), _SHARE,
             "Nucleus sampling: keep the most likely tokens with a total probability of p; 1: off.", "top_p"),
    _Setting("min_p", 0.05, ("--min-p",), _SHARE,
             "Drop tokens with less than p times the probability of the most likely one; 0: off.", "min_p"),
    _Setting("typ_p", 1.0, ("--typical", "--typical-p"), _SHARE,
             "Locally typical sampling with a total probability of p; 1: off."),
    _Setting("top_n_sigma", -1.0, ("--top-n-sigma", "--top-nsigma"), _NUMBER,
             "Drop tokens with logits more than n standard deviations below the maximum; 0 or less: off."),
    _Setting("xtc_probability", 0.0, ("--xtc-probability",), _SHARE,
             "XTC: chance to drop all tokens above --xtc-threshold but the least likely; 0: off.", "xtc_probability"),
    _Setting("xtc_threshold", 0.1, ("--xtc-threshold",), _SHARE,
             "XTC: probability from which tokens are dropped; above 0.5: off.", "xtc_threshold"),
    _Setting("penalty", 1.0, ("--repeat-penalty",), _AT_LEAST_0,
             "Penalty for repeated tokens; 1: off.", "penalty_repeat"),
    _Setting("penalty_freq", 0.0, ("--frequency-penalty",), _NUMBER,
             "Penalty subtracted from a token's logit for each repetition; 0: off."),
    _Setting("penalty_present", 0.0, ("--presence-penalty",), _NUMBER,
             "Penalty subtracted once from the logits of repeated tokens; 0: off."),
    _Setting("penalty_last_n", 64, ("--repeat-last-n",), Integer(-1),
             "Number of last tokens to consider for penalties; 0: none, -1: all.", "penalty_last_n"),
    _Setting("dry_multiplier", 0.0, ("--dry-multiplier",), _AT_LEAST_0,
             "DRY: multiplier of the penalty for tokens that extend a repeated sequence; 0: off."),
    _Setting("dry_base", 1.75, ("--dry-base",), Number(1, 1_000_000),
             "DRY: base of the penalty, which grows exponentially with the repetition."),
    _Setting("dry_allowed_length", 2, ("--dry-allowed-length",), _COUNT,
             "DRY: length of repetitions without penalty."),
    _Setting("dry_penalty_last_n", 64, ("--dry-penalty-last-n",), Integer(-1),
             "DRY: number of last tokens to search for repetitions; 0: none, -1: all."),
    _Setting("mirostat", 0, ("--mirostat",), Integer(0, 2),
             "Mirostat version 1 or 2, which replaces the other samplers; 0: off.", "mirostat"),
    _Setting("mirostat_tau", 5.0, ("--mirostat-ent",), _AT_LEAST_0,
             "Mirostat: target entropy (tau), in bits.", "mirostat_tau"),
    _Setting("mirostat_eta", 0.1, ("--mirostat-lr",), _AT_LEAST_0,
             "Mirostat: learning rate (eta).", "mirostat_eta"),
    _Setting("adaptive_target", -1.0, ("--adaptive-target",), Number(-1, 1),
             "Adaptive-p: target probability of the selected tokens; below 0: off."),
    _Setting("adaptive_decay", 0.9, ("--adaptive-decay",), Number(0, 0.99),
             "Adaptive-p: decay of the moving average, over about 1 / (1 - X) tokens."),
)  # fmt: skip

FIELDS = {flag.removeprefix("--").replace("-", "_"): setting.field for setting in _SETTINGS for flag in setting.flags}
FIELDS |= {setting.field: setting.field for setting in _SETTINGS}
"""Fields of SamplingParams by field name and by option name."""

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
        help=f"Samplers in order; others are off. Default: the model's, else {'; '.join(_ORDER)}.",
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
    source = "the model's, else " if setting.key else ""
    text = f"{setting.help} Default: {source}{setting.default:g}."
    return option(*setting.flags, type=setting.type, metavar=metavar, help=text)


def sampling_params(
    given: Mapping[str, Any], metadata: Metadata, seq_len: int, find: FindSampler | None = None
) -> SamplingParams:
    """Sampling parameters of options, else metadata, else llama.cpp's defaults.

    `find` looks up samplers of plugins. Raises ModelFormatError for metadata outside of an option's range, UsageError
    for an unknown sampler.
    """
    from llamacli import SamplingParams

    values = {setting.field: _value(setting, given, metadata) for setting in _SETTINGS}
    values |= _constraint(given)
    for name in ("penalty_last_n", "dry_penalty_last_n"):
        if values[name] < 0:
            values[name] = seq_len
    process = unescaped if given.get("escape") else str
    breakers = [process(argument(text)) for text in given.get("dry_sequence_breaker") or ()]
    if breakers:
        values["dry_sequence_breakers"] = () if "none" in breakers else breakers
    known = {_SEQUENCE, *(_KEYS + setting.key for setting in _SETTINGS if setting.key)}
    ignored = sorted(key for key in metadata if key.startswith(_KEYS) and key not in known)
    if ignored:
        _log.warning("the model's file has sampling settings without an option: %s", ", ".join(ignored))
    return SamplingParams(
        samplers=_samplers(given.get("samplers"), metadata, find),
        logit_bias=given.get("logit_bias") or {},
        n_probs=given.get("logprobs") or 0,
        stop=stop_strings(given),
        **values,
    )


def _value(setting: _Setting, given: Mapping[str, Any], metadata: Metadata) -> Any:
    value = given.get(setting.flags[0].removeprefix("--").replace("-", "_"))
    if value is not None:
        return value
    if setting.key is None:
        return setting.default
    get: Any = metadata.get_int if isinstance(setting.type, Integer) else metadata.get_float
    return get(_KEYS + setting.key, setting.default, minimum=setting.type.min, maximum=setting.type.max)


def stop_strings(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Stop strings of the options; raises UsageError for an empty one."""
    texts = tuple(map(argument, given.get("stop") or ()))
    if "" in texts:
        raise click.UsageError("Invalid value for '--stop': it is empty. Give the text to stop at, as in --stop '\\n'.")
    return tuple(map(unescaped, texts)) if given.get("escape") else texts


def _constraint(given: Mapping[str, Any]) -> dict[str, str]:
    """The grammar or schema, given as text or in a file."""
    names = ("grammar", "grammar_file", "json_schema", "json_schema_file")
    named = [name for name in names if given.get(name) is not None]
    if len(named) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in named)
        raise click.UsageError(f"{flags} exclude each other.")
    return {
        name.removesuffix("_file"): read_file(Path(given[name])) if name.endswith("_file") else argument(given[name])
        for name in named
    }


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(";"))))


def _samplers(given: str | None, metadata: Metadata, find: FindSampler | None) -> tuple[str, ...]:
    """Samplers in order.

    Unknown ones in the file are skipped, as in llama.cpp.
    """
    from llamacli.sampling import BUILT_IN, sampler_type

    names = _names(metadata.get_str(_SEQUENCE, "") if given is None else given)
    missing = [name for name in names if sampler_type(name, find) is None]
    if missing and given is not None:
        known = "; ".join(sorted(kind.name for kind in BUILT_IN))
        raise click.UsageError(f"Invalid value for '--samplers': unknown sampler {missing[0]!r}; known are {known}.")
    if missing:
        _log.warning("%s has unknown samplers: %s", _SEQUENCE, ", ".join(missing))
    return tuple(name for name in names if name not in missing) or (_ORDER if given is None else ())
