"""Sampling parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from llamacli.errors import InvalidRequestError, expect_type
from llamacli.sampling.checks import integer, number
from llamacli.util.foreign_names import explain_names
from llamacli.util.numbers import is_integer, is_real
from llamacli.util.sampling_params import DEFAULT_ORDER, MAX_NUMBER, PARAMETERS, Parameter, SamplingNumbers


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
        return json.dumps(value.model_json_schema() if hasattr(value, "model_json_schema") else value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"json_schema must be a string, JSON data or a Pydantic model: {error}") from None


def _only_texts(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
        raise InvalidRequestError(f"{attribute.name} must be strings, not {value!r}")


def _no_empty_texts(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(each, str) and each for each in value):
        raise InvalidRequestError(f"{attribute.name} must be a string or several, none of them empty, not {value!r}")


def _of(kind: type, wanted: str) -> Callable[[object, attrs.Attribute[Any], Any], None]:
    return lambda _, attribute, value: expect_type(value, kind, attribute.name, wanted)


def _text(_: object, attribute: attrs.Attribute[str | None], value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"{attribute.name} must be a string, not {value!r}")


def biases(values: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Sorted pairs of token id and bias; NaN is not allowed."""
    try:
        pairs = sorted(dict(values).items())
    except (TypeError, ValueError):
        raise InvalidRequestError(f"logit_bias must be numbers by token id, not {values!r}") from None
    for token, bias in pairs:
        if not is_integer(token) or token < 0 or not is_real(bias) or math.isnan(bias):
            raise InvalidRequestError(f"logit_bias: {token!r}: {bias!r} must be a token id and a number")
    return tuple((int(token), float(bias)) for token, bias in pairs)


def token_ids(values: Iterable[int], name: str = "token ids") -> tuple[int, ...]:
    """Sorted token ids without duplicates; InvalidRequestError begins with the name."""
    expect_type(values, Iterable, name, "a sequence of integers")
    values = set(values)
    for token in values:
        if not is_integer(token) or token < 0:
            raise InvalidRequestError(f"{name}: {token!r} is not a token id")
    return tuple(sorted(map(int, values)))


def _ids_field(name: str, sampler: str) -> Any:
    return attrs.field(converter=partial(token_ids, name=name), default=(), metadata={"sampler": sampler})


def _number(one: Parameter) -> Any:
    metadata = {"sampler": one.sampler}
    if one.is_integer:
        low, high = None if one.lenient else int(one.low), None if one.high is None else int(one.high)
        return integer(one.off, low=low, high=high, metadata=metadata, type="int")
    assert one.high is not None
    return number(one.off, low=-MAX_NUMBER if one.lenient else one.low, high=one.high, metadata=metadata, type="float")


if TYPE_CHECKING:
    _Numbers = SamplingNumbers
else:
    _FIELDS = {name: _number(one) for name, one in PARAMETERS.items()}
    _Numbers = attrs.make_class("SamplingNumbers", _FIELDS, frozen=True, kw_only=True, slots=True)


@attrs.frozen(kw_only=True)
class SamplingParams(_Numbers):
    """Sampling parameters under llama.cpp's names. `SamplingParams()` is greedy: exactly argmax.

    `Model.sampling_params` has the defaults of the model's file and of llama.cpp, as the command line and the server.
    In greedy decoding only penalties, DRY, bias, grammars and suppressed tokens apply. Numbers below a range are off:
    here a `repeat_last_n` of -1 is none, in `Model.sampling_params` the whole context.

    - `dry_sequence_breakers`: texts that end a repetition, see `llamacli.sampling.Dry`.
    - `logit_bias`: numbers to add to logits, by token id.
    - `suppress_tokens`: ids that are never drawn, in addition to the ids of the model file.
    - `allowed_token_ids`: ids of the only tokens that may be drawn; () allows all.
    - `bad_words`: texts that do not come, as tokens at a text's beginning or after a space.
    - `end_token_ids`: ids that end the text, for `min_tokens`, besides those of the tokenizer.
    - `grammar`: a grammar in GBNF that constrains the text; `json_schema`: a JSON Schema, as a dict,
      JSON text or a Pydantic model.
    - `grammar_triggers`: the grammar or schema applies from the first of these texts on, which is part of it;
      without any it applies from the start.
    - `grammar_after`: the markers of reasoning before the grammar's text: one that opens it ("" if the prompt has), and
      those that close it, which come in this order, as `ChatCodec.reasoning_markers` returns; none by default.
      With `grammar_triggers`, triggers inside of reasoning are ignored.
    - `reasoning_budget_message`: text that is written before the forced end of reasoning.
    - `reasoning_markers`: the markers of reasoning in a chat's reply, as `ChatCodec.budgeted` sets them; without them
      `reasoning_budget` is off.
    - `stop`: a string or several; the text of `generate` ends before the first that comes, also within a token.
    - `samplers`: the order of samplers by name; others are off.
    - `options`: settings of plugins' samplers.
    - `n_probs`: report log-probabilities of the drawn token and the `n_probs` most probable ones; 0 reports none.
    - `post_sampling_probs`: report those by which the token was drawn, behind all samplers, instead of the model's own.
    """

    dry_sequence_breakers: tuple[str, ...] = attrs.field(
        converter=_texts, validator=_only_texts, default=("\n", ":", '"', "*"), metadata={"sampler": "DRY"}
    )
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(
        converter=biases, default=(), metadata={"sampler": "Logit bias"}
    )
    suppress_tokens: tuple[int, ...] = _ids_field("suppress_tokens", "Suppressed tokens")
    allowed_token_ids: tuple[int, ...] = _ids_field("allowed_token_ids", "Allowed tokens")
    bad_words: tuple[str, ...] = attrs.field(
        converter=_texts, validator=_no_empty_texts, default=(), metadata={"sampler": "Bad words"}
    )
    end_token_ids: tuple[int, ...] = _ids_field("end_token_ids", "Minimum length")
    grammar: str | None = attrs.field(default=None, validator=_text, metadata={"sampler": "Grammar"})
    json_schema: str | None = attrs.field(converter=_schema, default=None, metadata={"sampler": "Grammar"})
    grammar_triggers: tuple[str, ...] = attrs.field(
        converter=_texts, validator=_only_texts, default=(), metadata={"sampler": "Grammar"}
    )
    grammar_after: tuple[str, ...] = attrs.field(
        converter=_texts, validator=_only_texts, default=(), metadata={"sampler": "Grammar"}
    )
    reasoning_budget_message: str = attrs.field(
        default="", validator=_of(str, "a string"), metadata={"sampler": "Reasoning budget"}
    )
    reasoning_markers: tuple[str, ...] = attrs.field(
        converter=_texts, validator=_only_texts, default=(), metadata={"sampler": "Reasoning budget"}
    )
    stop: tuple[str, ...] = attrs.field(converter=_optional_texts, validator=_no_empty_texts, default=())
    samplers: tuple[str, ...] = attrs.field(converter=_texts, validator=_only_texts, default=DEFAULT_ORDER)
    options: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    n_probs: int = integer(0, low=0)
    post_sampling_probs: bool = attrs.field(default=False, validator=_of(bool, "true or false"))


SamplingParams.__init__ = explain_names(SamplingParams.__init__)  # type: ignore[method-assign]
SamplingParams.__doc__ = "\n    - ".join(
    [(SamplingParams.__doc__ or "").rstrip(), *(f"`{one.name}`: {one.help}" for one in PARAMETERS.values())]
)
