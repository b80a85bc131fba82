"""Grammar and JSON Schema samplers."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import LoadTiny
from llamacli import InvalidRequestError, SamplingParams, load_tokenizer
from llamacli.sampling import Candidates, Draw, Grammar, Greedy, SamplerChain, SamplerState, TopK, build_chain
from llamacli.sampling.grammar import _cut, _line_of
from llamacli.testing.vocabularies import CONTROL, byte_level, english, spm_vocabulary, tokenizer_keys
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from suite import examples

pytest.importorskip("llguidance")

END = "</s>"
BYTES = tokenizer_from_metadata(byte_level([], {END: CONTROL}, eos_token_id=256))
WORDS = tokenizer_from_metadata(byte_level(merges := english("Ġ"), {END: CONTROL}, eos_token_id=256 + len(merges)))


def spm() -> Tokenizer:
    tokens, scores, types = spm_vocabulary()
    keys = {"model": "llama", "tokens": tokens, "scores": np.array(scores, "f4"), "token_type": np.array(types, "i4")}
    return tokenizer_from_metadata(tokenizer_keys(keys))


SPM = spm()


LETTERS = tokenizer_from_metadata(
    tokenizer_keys(
        {
            "model": "gpt2",
            "tokens": [*"abcdefghijklmnopqrstuvwxyz01", END],
            "token_type": np.array([1] * 28 + [CONTROL], "i4"),
            "merges": [],
            "eos_token_id": 28,
        }
    )
)
"""Vocabulary without punctuation."""


def allowed(grammar: Grammar, n_vocab: int) -> set[int]:
    candidates = Candidates(np.random.default_rng(0))
    candidates.start(np.zeros(n_vocab, np.float32))
    grammar.apply(candidates)
    return {*candidates.ids.tolist()}


def write(tokenizer: Tokenizer, params: SamplingParams, seed: int, limit: int = 400) -> str | None:
    """Random text within the grammar; None if it did not end."""
    state, text = SamplerState(seed, tokenizer), b""
    for _ in range(limit):
        token = state.sample(np.zeros(tokenizer.n_vocab, np.float32), params)
        if token in tokenizer.eog_ids:
            return text.decode()
        state.accept(token)
        text += tokenizer.piece_bytes(token)
    return None


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS, SPM], ids=["bytes", "words", "spm"])
class TestGbnf:
    @pytest.mark.parametrize("seed", range(5))
    def test_generated_texts_match(self, tokenizer: Tokenizer, seed: int) -> None:
        grammar = (
            'root ::= who (" and " who){0,3} "."\nwho ::= "the " ("little " | "big "){0,2} ("girl" | "dog" | "Ö" )'
        )
        words = write(tokenizer, SamplingParams(temperature=1, grammar=grammar), seed).removesuffix(".").split(" and ")
        assert 1 <= len(words) <= 4
        for who in words:
            the, *adjectives, noun = who.split(" ")
            assert the == "the"
            assert len(adjectives) <= 2
            assert {*adjectives} <= {"little", "big"}
            assert noun in ("girl", "dog", "Ö")

    def test_complete_text_may_end(self, tokenizer: Tokenizer) -> None:
        grammar = Grammar.from_gbnf('root ::= "a" "a"?', tokenizer)
        (a,) = tokenizer.encode_run("a", continues=True)
        assert allowed(grammar, tokenizer.n_vocab).isdisjoint(tokenizer.eog_ids)
        grammar.accept(a)
        assert tokenizer.eog_ids < allowed(grammar, tokenizer.n_vocab)
        grammar.accept(a)
        assert allowed(grammar, tokenizer.n_vocab) == tokenizer.eog_ids

    def test_only_end_tokens_follow_the_end(self, tokenizer: Tokenizer) -> None:
        grammar = Grammar.from_gbnf('root ::= "a"', tokenizer)
        for token in (*tokenizer.encode_run("a", continues=True), *tokenizer.eog_ids, *tokenizer.eog_ids):
            grammar.accept(token)
            assert allowed(grammar, tokenizer.n_vocab) == tokenizer.eog_ids


SCHEMAS: list[tuple[Any, Callable[[Any], bool]]] = [
    ({"type": "boolean", "title": "t", "description": "d", "$schema": "https://json-schema.org/draft/2020-12/schema"},
     lambda x: x in (True, False)),
    ({"type": "integer", "minimum": -3, "maximum": 12}, lambda x: isinstance(x, int) and -3 <= x <= 12),
    ({"enum": ["yes", "no", 5, None]}, lambda x: x in ("yes", "no", 5, None)),
    ({"const": {"a": [1, True]}}, lambda x: x == {"a": [1, True]}),
    ({"type": "string", "minLength": 2, "maxLength": 4}, lambda x: isinstance(x, str) and 2 <= len(x) <= 4),
    ({"type": "string", "pattern": "^[ab]{3}$"}, lambda x: len(x) == 3 and {*x} <= {"a", "b"}),
    ({"type": "string", "format": "date"}, lambda x: len(x) == 10 and x[4] == x[7] == "-"),
    ({"type": ["boolean", "null"]}, lambda x: x in (True, False, None)),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}, lambda x: 1 <= len(x) <= 3),
    ({"prefixItems": [{"const": 1}, {"const": "b"}], "items": False, "type": "array", "minItems": 2},
     lambda x: x == [1, "b"]),
    ({"anyOf": [{"const": 1}, {"const": "b"}]}, lambda x: x in (1, "b")),
    ({"oneOf": [{"const": 1}, {"const": "b"}]}, lambda x: x in (1, "b")),
    ({"type": "object", "properties": {"n": {"type": "boolean"}, "m": {"$ref": "#/$defs/m"}}, "required": ["n", "m"],
      "additionalProperties": False, "$defs": {"m": {"enum": ["x", "y"]}}},
     lambda x: x["n"] in (True, False) and x["m"] in ("x", "y") and len(x) == 2),
]  # fmt: skip


class TestSchema:
    @pytest.mark.parametrize(("schema", "holds"), SCHEMAS, ids=[json.dumps(schema) for schema, _ in SCHEMAS])
    def test_texts_are_valid(self, schema: Any, holds: Callable[[Any], bool]) -> None:
        for tokenizer in (BYTES, WORDS, SPM):
            for seed in range(3):
                text = write(tokenizer, SamplingParams(temperature=1, json_schema=schema), seed)
                assert holds(json.loads(text)), text

    @pytest.mark.parametrize(
        ("schema", "line", "reason"),
        [
            ('{\n  "type" "object"\n}', "line 2, column 10", "Expecting ':' delimiter"),
            ("", "line 1, column 1", "Expecting value"),
            ('{\n  "type":\n  "objekt"\n}', "line 3", "Invalid type: objekt"),
            ('{"properties": {\n"a": {"not": {}}}}', "line 2", 'Unimplemented keys: ["not"]'),
            ('{\n"items": {\n"$ref": "#/$defs/none"}}', "line 3", "Pointer '/$defs/none' does not exist"),
            (
                '{"type": "integer",\n "minimum": 5,\n "maximum": 3}',
                "line 3",
                "minimum (5) is greater than maximum",
            ),
            ("[]", "line 1", "a schema must be an object or true"),
            ("false", "line 1", "a schema must be an object or true"),
            ('{"a":' * 100_000, "line 1", "nested too deeply"),
            ('{"items":' * 600 + "{}" + "}" * 600, "line 1", "nested too deeply"),
            ('{"enum": [NaN]}', "line 1", "finite numbers"),
            ('{"const": 1e999}', "line 1", "finite numbers"),
            ('{"const": "\\ud800"}', "line 1", "whole characters"),
        ],
    )
    def test_errors_name_line_and_reason(self, schema: str, line: str, reason: str) -> None:
        with pytest.raises(InvalidRequestError) as raised:
            Grammar.from_json_schema(schema, BYTES)
        assert str(raised.value).startswith(f"json_schema: {line}")
        assert reason in str(raised.value)

    @examples(50)
    @given(st.text('{}[]":,a1 \n', max_size=20))
    def test_random_text_compiles_or_fails_with_its_line(self, text: str) -> None:
        try:
            outcome = repr(Grammar.from_json_schema(text, BYTES))
        except InvalidRequestError as error:
            outcome = str(error)
        assert outcome.startswith(("json_schema: line ", "<llamacli.sampling.grammar.Grammar object"))


class TestSampler:
    def test_forbidden_token_leaves_the_state(self) -> None:
        grammar = Grammar.from_gbnf('root ::= "a"', BYTES)
        with pytest.raises(InvalidRequestError, match=r"grammar: .*doesn't satisfy the grammar"):
            grammar.accept(ord("b"))
        assert allowed(grammar, BYTES.n_vocab) == {ord("a")}, "it stays where it was"

    def test_accept_does_not_copy_the_matcher(self) -> None:
        grammar = Grammar.from_gbnf('root ::= "a" "b"', BYTES)
        matcher = grammar._matcher
        grammar.accept(ord("a"))
        assert grammar._matcher is matcher, "to copy it takes the longer, the longer the text is"

    @pytest.mark.parametrize("gbnf", ['root ::= "a"', 'root ::= "a"+'])
    def test_end_token_is_accepted_when_complete(self, gbnf: str) -> None:
        grammar = Grammar.from_gbnf(gbnf, BYTES)
        (end,) = BYTES.eog_ids
        with pytest.raises(InvalidRequestError, match="grammar: "):
            grammar.accept(end)
        grammar.accept(ord("a"))
        for _ in range(2):
            grammar.accept(end)
        with pytest.raises(InvalidRequestError, match="grammar: "):
            grammar.accept(ord("b"))

    def test_unsatisfiable_grammar(self) -> None:
        with pytest.raises(InvalidRequestError, match="grammar: "):
            allowed(Grammar.from_gbnf("root ::= root [a]", BYTES), BYTES.n_vocab)

    def test_applies_after_other_samplers(self) -> None:
        logits = np.arange(257, dtype=np.float32)
        chain = SamplerChain([TopK(200), Grammar.from_gbnf("root ::= [a-z]", BYTES), Greedy()])
        assert SamplerState(1).sample(logits, chain) == ord("z")

    def test_fails_if_no_candidate_is_left(self) -> None:
        chain = SamplerChain([TopK(2), Grammar.from_gbnf("root ::= [a-z]", BYTES), Greedy()])
        with pytest.raises(InvalidRequestError, match="no token is left"):
            SamplerState(1).sample(np.arange(257, dtype=np.float32), chain)

    def test_clones_are_independent(self) -> None:
        grammar = Grammar.from_gbnf('root ::= "a" [bc] "d"', BYTES)
        grammar.accept(ord("a"))
        other = grammar.clone()
        other.accept(ord("b"))
        assert allowed(grammar, 257) == {ord("b"), ord("c")}
        assert allowed(other, 257) == {ord("d")}
        other.reset()
        assert allowed(other, 257) == {ord("a")}

    def test_applies_first_and_in_greedy_decoding(self) -> None:
        chain = build_chain(SamplingParams(grammar='root ::= "a"', logit_bias={1: 1}), BYTES)
        assert [type(sampler).__name__ for sampler in chain.samplers] == ["Grammar", "LogitBias", "Greedy"]

    def test_a_schema_of_true_allows_any_json(self) -> None:
        fits = allowed(Grammar.from_json_schema("true", BYTES), 257)
        assert {*b'{["-0tfn'} <= fits
        assert fits.isdisjoint(b"}]ab")

    def test_grammar_and_schema_exclude_each_other(self) -> None:
        with pytest.raises(InvalidRequestError, match="grammar and json_schema exclude each other"):
            build_chain(SamplingParams(grammar="root ::= [a]", json_schema={}), BYTES)

    def test_needs_a_tokenizer(self) -> None:
        with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
            SamplerState(1).sample(np.zeros(4, np.float32), SamplingParams(grammar="root ::= [a]"))

    def test_needs_an_end_token(self) -> None:
        endless = tokenizer_from_metadata(byte_level([]))
        with pytest.raises(InvalidRequestError, match="no end-of-generation token"):
            Grammar.from_gbnf("root ::= [a]", endless)

    def test_missing_llguidance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(InvalidRequestError, match="need llguidance: pip install llguidance"):
            Grammar.from_gbnf("root ::= [a]", BYTES)


class TestSession:
    def test_each_text_starts_at_the_root(self, load_tiny: LoadTiny) -> None:
        params = SamplingParams(temperature=1.5, grammar='root ::= " " ("a dog" | "the girl") "."')
        with load_tiny("gqa", tokenizer="spm") as model, model.create_session() as session:
            for _ in range(4):
                pieces = [token.piece for token in session.generate(model.encode("she saw"), params, max_tokens=30)]
                assert "".join(pieces) in (" a dog.", " the girl.")

    def test_json_schema(self, load_tiny: LoadTiny) -> None:
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "big": {"type": "boolean"}},
            "required": ["name", "big"],
            "additionalProperties": False,
        }
        with load_tiny("gqa", tokenizer="spm") as model, model.create_session() as session:
            tokens = session.generate(
                model.encode("the"), SamplingParams(temperature=1, json_schema=schema), max_tokens=120
            )
            assert json.loads("".join(token.piece for token in tokens)).keys() == {"name", "big"}


def test_real_vocabulary(shared: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(shared("vocab/ggml-vocab-llama-bpe.gguf"))
    grammar = Grammar.from_json_schema('{"type": "array", "items": {"type": "string"}}', tokenizer)
    for token in tokenizer.encode('["once upon a time", "Ümläute, 日本 and 😀"', add_special=False):
        assert token in allowed(grammar, tokenizer.n_vocab)
        grammar.accept(token)
    pieces = {tokenizer.piece(token).strip() for token in allowed(grammar, tokenizer.n_vocab)}
    assert {piece[:1] for piece in pieces} == {"", ",", "]"}
    assert {",", "]"} < pieces
    state = SamplerState(1)
    assert len(allowed(Grammar.from_gbnf("root ::= .*", tokenizer), tokenizer.n_vocab)) > 100_000
    assert state.sample(np.zeros(tokenizer.n_vocab, np.float32), SamplerChain([grammar, Draw()])) is not None


def accepts(grammar: Grammar, text: str) -> bool:
    """True if a text of bytes matches the grammar and may end."""
    try:
        for byte in text.encode():
            grammar.accept(byte)
    except InvalidRequestError:
        return False
    return allowed(grammar, BYTES.n_vocab) >= BYTES.eog_ids


@pytest.mark.parametrize(
    ("schema", "written", "not_written"),
    [
        (
            {"type": "string"},
            [r'"\n\u001f\u007f"', '"ü/"'],
            [r'"\u00fc"', r'"\u0041"', r'"\/"', r'"\ud83d\ude00"', '"\x7f"'],
        ),
        ({"enum": ["ü"]}, ['"ü"'], [r'"\u00fc"']),
        ({"type": "number"}, ["-0", "-0.0", "1e0", "1E+5", "5.0"], ["05"]),
        ({"type": "number", "minimum": -5}, ["1.50", "5.0"], ["-0", "-0.0", "1e0"]),
        ({"type": "integer"}, ["5", "-0"], ["5.0", "5e0"]),
        ({"const": 1}, ["1"], ["1.0"]),
    ],
)
def test_spellings_of_json_values(schema: dict[str, Any], written: list[str], not_written: list[str]) -> None:
    """Spellings that docs/sampling.md lists."""
    grammar = Grammar.from_json_schema(json.dumps(schema), BYTES)
    assert [text for text in written if not accepts(grammar.clone(), text)] == []
    assert [text for text in not_written if accepts(grammar.clone(), text)] == []


NAMED = tokenizer_from_metadata(
    byte_level([], {END: CONTROL, "<a>": CONTROL, "<b>": CONTROL, "<end_of_turn>": CONTROL}, eos_token_id=256)
)


@pytest.mark.parametrize("text", ["root ::= <a> !<b>* <b>", "root ::= <a> (!<[258]>)* <b>"])
def test_any_other_token_is_no_end_token(text: str) -> None:
    grammar = Grammar.from_gbnf(text, NAMED)
    assert len(NAMED.eog_ids) == 2
    grammar.accept(257)
    for _ in range(3):
        assert allowed(grammar, NAMED.n_vocab) == {*range(NAMED.n_vocab)} - NAMED.eog_ids
        grammar.accept(97)
    grammar.accept(258)
    assert allowed(grammar, NAMED.n_vocab) == NAMED.eog_ids


@pytest.mark.parametrize(
    "schema",
    [
        '{"const": -9223372036854775808}', '{"enum": ["a", -9223372036854775808]}', '{"const": -1e300}',
        '{"type": "integer", "minimum": -1e19, "maximum": -1e19}',
        '{"type": "array", "enum": [[-9223372036854775807]]}',
        '{"properties": {"-1": {"allOf": [{"type": "integer"}, {"const": -9223372036854775300}]}}}',
    ],
)  # fmt: skip
def test_numbers_at_the_end_of_64_bits_are_refused(schema: str) -> None:
    """Check that they reach no code that would end the process."""
    with pytest.raises(InvalidRequestError, match=r"json_schema: line 1: the number -.* is below -9.2e\+18"):
        Grammar.from_json_schema(schema, BYTES)
    with pytest.raises(InvalidRequestError, match=r"grammar: the number -.* is below -9.2e\+18"):
        Grammar.from_gbnf(f"%llguidance {{}}\nstart: %json {schema}", BYTES)


def test_numbers_near_the_end_of_64_bits() -> None:
    for number in (-(2**62), 2**62):
        assert accepts(Grammar.from_json_schema(json.dumps({"type": "integer", "const": number}), BYTES), str(number))
    text = {"const": "-9223372036854775808"}
    assert accepts(Grammar.from_json_schema(json.dumps(text), BYTES), '"-9223372036854775808"')


def test_thousands_of_repetitions() -> None:
    grammar = Grammar.from_gbnf('root ::= "a"{3,5000} "b"', BYTES)
    for _ in range(5000):
        grammar.accept(97)
    assert allowed(grammar, BYTES.n_vocab) == {98}


def test_objects_take_listed_properties_only_unless_told() -> None:
    listed: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema, expected in ((listed, False), ({**listed, "additionalProperties": True}, True)):
        grammar = Grammar.from_json_schema(json.dumps(schema), BYTES)
        assert accepts(grammar.clone(), '{"a":1}')
        assert accepts(grammar, '{"a":1,"b":2}') is expected
    both = {"allOf": [listed, {"type": "object", "properties": {"b": {"type": "integer"}}}]}
    assert accepts(Grammar.from_json_schema(json.dumps(both), BYTES), '{"a":1,"b":2}')


@pytest.mark.parametrize(
    "make",
    [
        lambda pattern: Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern}), BYTES),
        lambda pattern: Grammar.from_json_schema(json.dumps({"anyOf": [{"patternProperties": {pattern: {}}}]}), BYTES),
        lambda pattern: Grammar.from_gbnf(f"%llguidance {{}}\nstart: /{pattern}/", BYTES),
        lambda pattern: Grammar.from_gbnf(f'%llguidance {{}}\nstart: %json {{"pattern": "{pattern}"}}', BYTES),
    ],
)
def test_patterns_without_short_texts_are_refused(make: Callable[[str], Grammar]) -> None:
    """Such a text would be written out, in many states."""
    make("((a{30}){30}){30}")
    with pytest.raises(InvalidRequestError, match="matches no text of at most 65536 characters"):
        make("((a{1000}){1000}){1000}")


def test_texts_that_a_grammar_forces_have_a_limit() -> None:
    with pytest.raises(InvalidRequestError, match="json_schema: it begins with a text of more than 65536 bytes"):
        Grammar.from_json_schema(json.dumps({"const": "a" * 65_536}), BYTES)
    grammar = Grammar.from_json_schema(json.dumps({"const": "a" * 60_000}), BYTES)
    assert allowed(grammar, BYTES.n_vocab) == {ord('"')}


@pytest.mark.parametrize(
    "lark",
    [
        '{}\nstart: /a+/ "a"',
        '{}\nstart: "x" b | /a+/{99}\nb: "b"',
        '{"no_forcing": false}\nstart: A "a"\nA: "a"+ // comment',
    ],
)
def test_texts_without_alternatives_and_without_end(lark: str) -> None:
    """Such a text would be written out until memory ends."""
    grammar = Grammar.from_gbnf(f"%llguidance {lark}", BYTES)
    grammar.accept(ord("a"))
    for _ in range(100):
        assert allowed(grammar, BYTES.n_vocab) == {ord("a")}
        grammar.accept(ord("a"))


@pytest.mark.parametrize("tokenizer", [WORDS, SPM], ids=["words", "spm"])
@pytest.mark.parametrize("unit", ["the little girl and ", "a\u20ac", "\U0001f600"])
def test_long_forced_texts_are_tokenized_in_part(tokenizer: Tokenizer, unit: str) -> None:
    """Each of their tokens is the one of the whole text."""
    text = unit * (6000 // len(unit.encode()))
    grammar = Grammar.from_gbnf(f'root ::= "{text}"', tokenizer)
    expected = tokenizer.encode_run(text, continues=True)
    for token in expected[:40]:
        assert allowed(grammar, tokenizer.n_vocab) == {token}
        grammar.accept(token)


def test_long_texts_get_a_lexer_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a kept grammar is limited, texts are not."""
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "string", "maxLength": 90}}})
    text = '{"a":"' + "the little girl " * 5
    whole = Grammar.from_json_schema(schema, BYTES)
    monkeypatch.setattr("llamacli.sampling.grammar._FEW_STATES", 200)
    small = Grammar.from_json_schema(schema, BYTES)
    kept, behind, forks = small.clone(), small.clone(), []
    behind.accept(text.encode()[0])
    for i, token in enumerate(text.encode()):
        if i % 2:  # a failure may come with a mask or with a token
            assert allowed(small, BYTES.n_vocab) == allowed(whole, BYTES.n_vocab)
        small.accept(token)
        whole.accept(token)
        if i:
            behind.accept(token)
        forks.append(small.clone())
    assert small._shared is behind._shared is None
    assert whole._shared is not None
    assert allowed(forks[-1], BYTES.n_vocab) == allowed(behind, BYTES.n_vocab) == allowed(whole, BYTES.n_vocab)
    assert accepts(kept, text + '"}')
    small.reset()
    assert accepts(small, text + '"}')
    assert not accepts(kept.clone(), "]")


@pytest.mark.slow
def test_long_chains_of_rules_do_not_overflow_the_stack() -> None:
    """A process would end; llguidance calls itself for each rule."""
    n = 20_000
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(n))
    text = f'%llguidance {{}}\nstart: r0\n{rules}\nr{n}: "a"'
    script = (
        "import sys; from llamacli import load_tokenizer; from llamacli.hub.demo import demo_path;"
        "from llamacli.sampling.grammar import Grammar;"
        "Grammar.from_gbnf(sys.stdin.read(), load_tokenizer(demo_path())); print('compiled')"
    )
    done = subprocess.run([sys.executable, "-c", script], input=text, capture_output=True, text=True, check=False)
    assert done.stdout == "compiled\n", (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(grammar='root ::= "{" [a-z]'), "line 1, column 1: every text of rule 'root' has a character"),
        (SamplingParams(grammar='root ::= [a-z]+ x\nx ::= "{" | "}" x'), "every text of rule 'root' has a character"),
        (SamplingParams(grammar="root ::= [a-z]+ [!-/]"), "every text of rule 'root' has a character without a token"),
        (SamplingParams(json_schema='{"const": {"a": 1}}'), "json_schema: it begins with '{', which no tokens spell"),
        (SamplingParams(json_schema='{"type": "object"}'), "json_schema: it begins with '{', which no tokens spell"),
    ],
)
def test_texts_that_the_vocabulary_cannot_spell_are_refused(params: SamplingParams, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)):
        build_chain(params, LETTERS)


@pytest.mark.parametrize("grammar", ['root ::= "a" | "{"', "root ::= [!-~]", "root ::= [^b]"])
def test_grammars_with_one_spelled_text_are_taken(grammar: str) -> None:
    assert LETTERS.token_id("a") in allowed(Grammar.from_gbnf(grammar, LETTERS), LETTERS.n_vocab)


def test_utf8_is_cut_between_characters() -> None:
    data = "aé€😀".encode()
    assert [_cut(data, n).decode() for n in range(1, 12)] == ["a", "a", "aé", "aé", "aé", *["aé€"] * 4, *["aé€😀"] * 2]
    assert _cut(b"\x80" * 9, 6) == b"\x80" * 6


def test_lines_of_errors() -> None:
    schema = '{\n"a": {"$ref":\n"#/b"},\n"": 1}'
    assert [_line_of(schema, reason) for reason in ("no /b", "no a", "other", "")] == [3, 2, 1, 1]
