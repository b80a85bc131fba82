"""Grammars that requests ask for, and compiled chains."""

import json

import numpy as np
import pytest

import tiny_chat
from llamacli import Model, load_model
from llamacli.chat.openai import FieldError
from llamacli.engine import ReferenceEngine
from llamacli.sampling import SamplerState, SamplingParams
from llamacli.sampling.grammar import memory_limit
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.constraints import chain, schema_of
from llamacli.serve.http.schemas.common import Generation, ResponseFormat, SchemaFormat, StructuredOutputs

pytest.importorskip("llguidance")

COLOUR = {"enum": ["red", "blue"]}
PARAMETERS = {"type": "object", "properties": {"c": COLOUR}, "required": ["c"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '{"name": "paint", "arguments": {"c": "red"}}'


def request(response_format, json_schema, grammar) -> Generation:
    return Generation(response_format=response_format, json_schema=json_schema, grammar=grammar)


@pytest.fixture(scope="module")
def chat_model(tiny_gguf, plugins) -> Model:
    """A tiny model whose special tokens are those of `tiny_chat`."""
    keys = tiny_chat.chat_keys("{{ messages }}{{ tools }}")
    path = tiny_gguf("gqa", tokenizer="spm", metadata=keys)
    return load_model(path, plugins=plugins, engine=ReferenceEngine())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, None), (None, None)),
        ((ResponseFormat(type="text"), None, None), (None, None)),
        ((ResponseFormat(type="json_object"), None, None), ({"type": "object"}, None)),
        ((ResponseFormat(type="json_object", schema=COLOUR), None, None), (COLOUR, None)),
        ((ResponseFormat(type="json_schema", json_schema=SchemaFormat(schema=COLOUR)), None, None), (COLOUR, None)),
        ((None, COLOUR, None), (COLOUR, None)),
        ((ResponseFormat(type="json_schema", schema=COLOUR), None, None), (COLOUR, None)),
        ((None, None, "root ::= [a]"), (None, "root ::= [a]")),
        ((None, COLOUR, ""), (COLOUR, None)),
    ],
)
def test_schemas_of_requests(given, expected) -> None:
    assert schema_of(request(*given)) == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_regex": "a/b[0-9]{2}\n?"}, "a/b07"),
        ({"guided_regex": r"\\/x"}, "\\/x"),
        ({"guided_choice": ['say "hi"', "caf\u00e9\n"]}, "caf\u00e9\n"),
        ({"structured_outputs": StructuredOutputs(choice=["x", "y"])}, "y"),
    ],
)
def test_regular_expressions_and_choices(fields, text, chat_model) -> None:
    _, grammar = schema_of(Generation(**fields))
    tokens, state = chat_model.tokenizer, SamplerState(0, chat_model.tokenizer)
    made = chain(chat_model, SamplingParams(grammar=grammar))
    for token in tokens.encode_run(text, continues=True):
        assert token in state.legal(np.zeros(tokens.n_vocab, np.float32), made).ids
        state.accept(token)
    assert tokens.encode_run("z", continues=True)[0] not in state.legal(np.zeros(tokens.n_vocab, np.float32), made).ids


@pytest.mark.parametrize(
    "given",
    [
        (ResponseFormat(type="yaml"), None, None),
        (ResponseFormat(type="json_schema"), None, None),
        (ResponseFormat(type="json_object"), COLOUR, None),
        (None, COLOUR, "root ::= [a]"),
        (None, "{}", None),
        (None, {"description": "x" * (1 << 20)}, None),
        (None, None, "x" * ((1 << 20) + 1)),
    ],
)
def test_schemas_that_are_refused(given) -> None:
    with pytest.raises((BadRequestError, FieldError)):
        schema_of(request(*given))


def test_broken_grammars_are_client_errors(chat_model) -> None:
    endless = '{"$ref": "#"}'
    for params in (
        SamplingParams(json_schema='{"type": "text"}'),
        SamplingParams(json_schema=endless),
        SamplingParams(json_schema="false"),
        SamplingParams(grammar="root ::= ("),
        SamplingParams(grammar="root ::= root"),
    ):
        with pytest.raises(BadRequestError) as error:
            chain(chat_model, params)
        assert error.value.code == "invalid_schema"


def test_chains_are_kept(chat_model) -> None:
    params = SamplingParams(json_schema=json.dumps(COLOUR))
    assert chain(chat_model, params) is chain(chat_model, SamplingParams(json_schema=json.dumps(COLOUR)))


def test_kept_chains_have_a_limit_of_memory(chat_model, monkeypatch: pytest.MonkeyPatch) -> None:
    def schema(n: int) -> SamplingParams:
        return SamplingParams(json_schema=json.dumps({"const": n}))

    monkeypatch.setattr("llamacli.serve.http.constraints.MAX_KEPT_BYTES", 3 * memory_limit('{"const": 1}'))
    chains = [chain(chat_model, schema(n)) for n in range(3)]
    assert chain(chat_model, schema(0)) is chains[0]
    chain(chat_model, schema(3))
    assert chain(chat_model, schema(0)) is chains[0]
    assert chain(chat_model, schema(1)) is not chains[1], "the one that was not used for the longest time"
    large = SamplingParams(json_schema=json.dumps({"enum": ["word" * 10 + str(n) for n in range(12000)]}))
    assert memory_limit(large.json_schema) > 3 * memory_limit("")
    assert chain(chat_model, large) is chain(chat_model, large), "the latest is kept in any case"
    assert chain(chat_model, schema(0)) is not chains[0]
