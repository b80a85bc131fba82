"""Sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.sampling.checks import integer, number
from llamacli.sampling.penalties import biases, token_ids
from llamacli.util.foreign_names import explain_fields

DEFAULT_ORDER = (
    "penalties",
    "dry",
    "temperature",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
)


def _texts(values: Any) -> Any:
    if isinstance(values, str):
        return (values,)
    return tuple(values) if isinstance(values, Iterable) else values


def _optional_texts(values: Any) -> Any:
    return () if values is None else _texts(values)


def _schema(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"json_schema must be a string or JSON data: {error}") from None


def _only_texts(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
        raise InvalidRequestError(f"{attribute.name} must be strings, not {value!r}")


def _no_empty_texts(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(each, str) and each for each in value):
        raise InvalidRequestError(f"{attribute.name} must be a string or several, none of them empty, not {value!r}")


def _text(_: object, attribute: attrs.Attribute[str | None], value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"{attribute.name} must be a string, not {value!r}")


@explain_fields
@attrs.frozen(kw_only=True)
class SamplingParams:
    """Sampling parameters under llama.cpp's names. `SamplingParams()` is greedy: exactly argmax.

    `Model.sampling_params` has the defaults of the model's file and of llama.cpp, as the command line and the server.

    - `temperature`: logits are divided by it; 0 or less is greedy: only penalties, DRY, bias, grammars and suppressed
      tokens still apply.
    - `dynatemp_range`, `dynatemp_exponent`: the temperature varies by up to this range with the entropy; 0 is off.
    - `top_k`: keep the k most probable tokens, and any that tie with the k-th; 0 or less, or n_vocab and more, is off.
    - `top_p`: keep the fewest most probable tokens whose probabilities sum to at least p; 1 is off.
    - `min_p`: drop tokens less probable than this share of the most probable one's; 0 is off.
    - `typical_p`: keep the tokens of most typical surprisal whose probabilities sum to more than p; 1 is off.
    - `top_n_sigma`: drop logits more than n standard deviations below the largest; 0 or less is off.
    - `xtc_probability`, `xtc_threshold`: the probability of dropping all but the least probable of the tokens that
      reach the threshold; a probability of 0 or a threshold above 0.5 is off.
    - `repeat_penalty`: logits of recently generated tokens are divided by it if positive, multiplied if not, once per
      token (Keskar et al. 2019); 1 is off, and so is 0 or less.
    - `frequency_penalty`, `presence_penalty`: subtracted from such logits per occurrence, and once; 0 is off.
    - `repeat_last_n`: number of generated tokens that count as recent; 0 or less is off.
    - `dry_multiplier`, `dry_base`, `dry_allowed_length`, `dry_penalty_last_n`, `dry_sequence_breakers`: see
      `llamacli.sampling.Dry`; a multiplier of 0 is off.
    - `mirostat`: 1 or 2: keep the surprisal near `mirostat_tau` bits with the learning rate `mirostat_eta`; of the
      other samplers only the temperature applies; 0 is off.
    - `adaptive_target`, `adaptive_decay`: draw tokens near this probability; below 0 is off.
    - `logit_bias`: numbers to add to logits, by token id.
    - `suppress_tokens`: ids that are never drawn, in addition to those of the model file.
    - `grammar`: a grammar in GBNF that constrains the text; `json_schema`: a JSON Schema, as a dict or JSON text.
    - `grammar_triggers`: the grammar or schema applies from the first of these texts on, which is part of it;
      without any it applies from the start.
    - `grammar_after`: the markers of reasoning before the grammar's text: one that opens it ("" if the prompt has), and
      those that close it, which come in this order, as `ChatCodec.reasoning_markers` returns; none by default.
    - `stop`: a string or several; the text of `generate` ends before the first that comes, also within a token.
    - `samplers`: the order of samplers by name; others are off.
    - `options`: settings of plugins' samplers.
    - `n_probs`: report log-probabilities of the drawn token and the `n_probs` most probable ones; 0 reports none.
    """

    temperature: float = number(0.0)
    dynatemp_range: float = number(0.0, low=0)
    dynatemp_exponent: float = number(1.0, low=0)
    top_k: int = integer(0)
    top_p: float = number(1.0, low=0, high=1)
    min_p: float = number(0.0, low=0, high=1)
    typical_p: float = number(1.0, low=0, high=1)
    top_n_sigma: float = number(-1.0)
    xtc_probability: float = number(0.0, low=0, high=1)
    xtc_threshold: float = number(0.1, low=0, high=1)
    repeat_penalty: float = number(1.0)
    frequency_penalty: float = number(0.0)
    presence_penalty: float = number(0.0)
    repeat_last_n: int = integer(64)
    dry_multiplier: float = number(0.0, low=0)
    dry_base: float = number(1.75, low=1)
    dry_allowed_length: int = integer(2, low=0)
    dry_penalty_last_n: int = integer(64)
    dry_sequence_breakers: tuple[str, ...] = attrs.field(
        converter=_texts, validator=_only_texts, default=("\n", ":", '"', "*")
    )
    mirostat: int = integer(0, low=0, high=2)
    mirostat_tau: float = number(5.0, low=0)
    mirostat_eta: float = number(0.1, low=0)
    adaptive_target: float = number(-1.0, low=-1, high=1)
    adaptive_decay: float = number(0.9, low=0, high=0.99)
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(converter=biases, default=())
    suppress_tokens: tuple[int, ...] = attrs.field(converter=token_ids, default=())
    grammar: str | None = attrs.field(default=None, validator=_text)
    json_schema: str | None = attrs.field(converter=_schema, default=None)
    grammar_triggers: tuple[str, ...] = attrs.field(converter=_texts, validator=_only_texts, default=())
    grammar_after: tuple[str, ...] = attrs.field(converter=_texts, validator=_only_texts, default=())
    stop: tuple[str, ...] = attrs.field(converter=_optional_texts, validator=_no_empty_texts, default=())
    samplers: tuple[str, ...] = attrs.field(converter=_texts, validator=_only_texts, default=DEFAULT_ORDER)
    options: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    n_probs: int = integer(0, low=0)
