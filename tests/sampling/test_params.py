import math

import attrs
import numpy as np
import pytest

from llamacli import InvalidRequestError, SamplingParams

FLOATS = [field.name for field in attrs.fields(SamplingParams) if field.type == "float"]
COUNTS = [field.name for field in attrs.fields(SamplingParams) if field.type == "int"]


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, True])
def test_numbers_are_finite(value: object) -> None:
    for name in FLOATS:
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [1.0, "1", None, False])
def test_counts_are_integers(value: object) -> None:
    for name in COUNTS:
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: value})


def test_all_kinds_of_fields_are_checked() -> None:
    assert {"temperature", "top_p", "dry_base", "adaptive_decay"} <= set(FLOATS)
    assert {"top_k", "repeat_last_n", "mirostat", "n_probs"} <= set(COUNTS)


@pytest.mark.parametrize("name", ["samplers", "dry_sequence_breakers", "grammar_triggers"])
@pytest.mark.parametrize("value", [None, 5, (5,), ["a", None], b"a"])
def test_sequences_of_strings(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be strings"):
        SamplingParams(**{name: value})
    assert getattr(SamplingParams(**{name: "a"}), name) == ("a",)


@pytest.mark.parametrize("value", [5, (5,), ["a", ""], "", b"a"])
def test_stop_strings_are_not_empty(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="stop must be a string or several, none of them empty"):
        SamplingParams(stop=value)


@pytest.mark.parametrize(("value", "stop"), [("a", ("a",)), (["a", "b"], ("a", "b")), (None, ()), ((), ())])
def test_stop_is_a_string_or_several(value: object, stop: tuple[str, ...]) -> None:
    assert SamplingParams(stop=value).stop == stop


def test_numpy_numbers_are_converted() -> None:
    numpys = SamplingParams(
        temperature=np.float32(0.5), top_p=np.float64(0.9), top_k=np.int8(40), repeat_last_n=np.uint8(64)
    )
    assert numpys == SamplingParams(temperature=0.5, top_p=0.9, top_k=40, repeat_last_n=64)
    assert {type(getattr(numpys, name)) for name in FLOATS} == {float}
    assert {type(getattr(numpys, name)) for name in COUNTS} == {int}


@pytest.mark.parametrize(
    ("name", "value", "low", "high"),
    [
        ("top_p", -0.1, 0, 1),
        ("top_p", 1.1, 0, 1),
        ("min_p", 2, 0, 1),
        ("typical_p", -1, 0, 1),
        ("xtc_probability", 1.5, 0, 1),
        ("xtc_threshold", -0.5, 0, 1),
        ("dry_base", 0.5, 1, 1e6),
        ("adaptive_target", 1.5, -1, 1),
        ("adaptive_decay", 1, 0, 0.99),
        ("mirostat_tau", -1, 0, 1e6),
    ],
)
def test_ranges(name: str, value: float, low: float, high: float) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"{name} = .* is not a number from {low:g} to {high:g}".replace("+", r"\+")
    ):
        SamplingParams(**{name: value})


def test_ranges_of_counts() -> None:
    with pytest.raises(InvalidRequestError, match="mirostat = 3 is not an integer from 0 to 2"):
        SamplingParams(mirostat=3)
    with pytest.raises(InvalidRequestError, match="n_probs = -1 is not an integer of at least 0"):
        SamplingParams(n_probs=-1)


@pytest.mark.parametrize("bias", [{-1: 1.0}, {0: math.nan}, {"a": 1.0}, {1.5: 1.0}, {0: "1"}])
def test_logit_bias_maps_token_ids_to_numbers(bias: dict) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("tokens", [[-1], [1.5], ["a"]])
def test_suppress_tokens_are_token_ids(tokens: list) -> None:
    with pytest.raises(InvalidRequestError, match="suppress_tokens"):
        SamplingParams(suppress_tokens=tokens)


def test_equality_ignores_collection_types() -> None:
    assert SamplingParams(logit_bias={2: -math.inf, 1: 1}) == SamplingParams(logit_bias=[(1, 1.0), (2, -math.inf)])
    assert SamplingParams(suppress_tokens=[3, 1, 3]).suppress_tokens == (1, 3)
    assert SamplingParams(json_schema={"type": "object"}) == SamplingParams(json_schema='{"type": "object"}')
    assert SamplingParams(samplers="top_k").samplers == ("top_k",)


def test_grammar_is_a_string() -> None:
    with pytest.raises(InvalidRequestError, match="grammar must be a string, not b'root"):
        SamplingParams(grammar=b"root ::= []")


@pytest.mark.parametrize("schema", [b"{}", {1, 2}])
def test_json_schema_is_json_data(schema: object) -> None:
    with pytest.raises(InvalidRequestError, match="json_schema must be a string, JSON data or a Pydantic model"):
        SamplingParams(json_schema=schema)
