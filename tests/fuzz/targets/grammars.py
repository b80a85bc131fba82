"""Grammars (GBNF) and JSON Schemas."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fuzz.mutations import edited, edits
from fuzz.target import Target
from llamacli.sampling import Candidates, Grammar
from llamacli.testing.vocabularies import CONTROL, byte_level, english
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

_SEEDS = [
    'root ::= "a" (b | [^x-z\\n]{2,5})* "\\u00e9"? # comment\nb ::= "c" root | <|im_start|> | . ',
    "root ::= object\nvalue ::= object | array | string | number\n"
    'object ::= "{" (string ":" value ("," string ":" value)*)? "}"\narray ::= "[" (value ("," value)*)? "]"\n'
    'string ::= "\\"" ([^"\\\\] | "\\\\" ["\\\\nrt])* "\\""\nnumber ::= "-"? [0-9]+ ("." [0-9]+)?',
]
_PIECES = st.sampled_from(
    ["root ::= ", "\nb ::= ", "b", "root", '"a"', '"\\x41"', '"\\U0010ffff"', "[a-z]", "[^\\]\\-]", ".", "(", ")",
     "*", "+", "?",
     "{0,3}", "{2,}", "{,}", "{9999999}", "{1000}", "|", " ", "\n", "# c\n", "<|im_start|>", "!<[1]>", "<[300]>",
     "\\", '"', "[", "::=",
     "%llguidance {}\nstart: /a+/", "é", "(" * 50, ")" * 50]
)  # fmt: skip
_MUTATED = st.builds(
    lambda seed, changes: edited(seed.encode(), changes).decode("utf-8", "replace"),
    st.sampled_from(_SEEDS),
    edits(("bit", "byte", "cut", "drop", "repeat"), 4),
)
_LARK_PIECES = st.sampled_from(
    ["a", "A", "start", '"a"', '"b"i', "/a+/", "/[a-c]*/", "/(?s:.*)/", "/a{2,}b?/", "/(a|ab)+c/", "<|im_start|>",
     "<[257]>", "<[1-300]>", "<[^1]>", "(", ")", "*", "+", "?", "{3}", "{2,}", "{,4}", " | ", " ", "\nstart: ",
     "\na: ", "\nA: ", "\na[lazy]: ", '\na[stop="b"]: ', '\na[suffix="b"]: ', "\na[max_tokens=2]: ", "\na[capture]: ",
     "%json ", '{"type": "integer"}', '{"const": 1, "x-guidance": {"item_separator": "1+"}}', "\n%ignore / +/",
     "\n%import common.INT",
     '\n%llguidance {"no_forcing": false}', " // c", "~A & ", '%regex {"substring_words": "a b"}', "::0x0", "\na::_: ",
     "a::incr(_)", " %if lt(_, 3)"]
)  # fmt: skip
_LARK = st.lists(_LARK_PIECES, max_size=15).map(lambda pieces: "%llguidance {}\nstart: " + "".join(pieces))
_LARK_RULES = st.builds(
    lambda start, a, terminal: f"%llguidance {{}}\nstart: {start}\na: {a}\nA: {terminal}",
    *[st.lists(_LARK_PIECES, min_size=1, max_size=4).map("".join)] * 3,
)
GRAMMAR_TEXTS = st.one_of(
    st.lists(_PIECES, max_size=25).map(lambda pieces: "root ::= " + "".join(pieces)),
    st.lists(_PIECES, max_size=25).map("".join),
    _MUTATED,
    _LARK,
    _LARK_RULES,
)


def _tokenizer() -> Tokenizer:
    kinds = {"<|im_start|>": CONTROL, "</s>": CONTROL}
    return tokenizer_from_metadata(byte_level(merges := english("Ġ"), kinds, eos_token_id=257 + len(merges)))


def _follow(grammar: Grammar, tokenizer: Tokenizer, choices: list[int]) -> None:
    """Accept some of the tokens that a grammar allows."""
    candidates = Candidates(np.random.default_rng(0))
    for choice in choices:
        candidates.start(np.zeros(tokenizer.n_vocab, np.float32))
        grammar.apply(candidates)
        allowed = candidates.ids.tolist()
        token = allowed[choice % len(allowed)]
        if token in tokenizer.eog_ids:
            return
        grammar.accept(token)
    grammar.clone().reset()


_CHOICES = st.lists(st.integers(0, 999), max_size=6)


def _start_grammars(folder: Path) -> Callable[[tuple[str, list[int]]], None]:
    tokenizer = _tokenizer()
    return lambda case: _follow(Grammar.from_gbnf(case[0], tokenizer), tokenizer, case[1])


GRAMMARS = Target(cases=st.tuples(GRAMMAR_TEXTS, _CHOICES), start=_start_grammars, per_process=4000)
"""GBNF grammars, and those in llguidance's Lark."""

_NAMES = st.sampled_from(["a", "b", "a/b~c", "", "é", "$defs"])
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=4),
    st.sampled_from([0, 1, -1, 1000, 10**6, 2**63 - 1, 1 - 2**63, -(2**63),
                     "#", "#/$defs/a", "#/properties/a", "http://x/y", "object", "date-time",
                     "^a+$", "(a|b)*c", "[", "(?=a)", "a{1,99999}", "\\d{3}-\\w*", "(((((a)*)*)*)*)*"]),
)  # fmt: skip
_TYPES = st.sampled_from(
    ["object", "array", "string", "number", "integer", "boolean", "null", "any", ["string", "null"]]
)
_NUMERIC = st.sampled_from(
    ["minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
     "minProperties", "maxProperties", "uniqueItems"]
)  # fmt: skip


def _schema_parts(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    by_name, several = st.dictionaries(_NAMES, inner, max_size=3), st.lists(inner, max_size=3)
    keywords = [
        st.fixed_dictionaries({"type": _TYPES}),
        st.builds(lambda properties: {"type": "object", "properties": properties}, by_name),
        st.builds(
            lambda name, value: {name: value}, st.sampled_from(["$defs", "definitions", "patternProperties"]), by_name
        ),
        st.builds(
            lambda name, value: {name: value}, st.sampled_from(["anyOf", "oneOf", "allOf", "prefixItems"]), several
        ),
        st.builds(
            lambda name, value: {name: value}, st.sampled_from(["items", "additionalProperties", "not", "if"]), inner
        ),
        st.builds(lambda names: {"required": names}, st.lists(_NAMES, max_size=3)),
        st.builds(lambda values: {"enum": values}, st.lists(_SCALARS, max_size=4)),
        st.builds(
            lambda name, value: {name: value},
            st.sampled_from(["const", "pattern", "format", "$ref", "default"]),
            _SCALARS,
        ),
        st.builds(lambda name, value: {name: value}, _NUMERIC, st.one_of(st.integers(-2, 50), _SCALARS)),
    ]
    merged = st.lists(st.one_of(keywords), min_size=1, max_size=4).map(
        lambda parts: {key: value for part in parts for key, value in part.items()}
    )
    return st.one_of(merged, merged, _SCALARS)


SCHEMA_VALUES = _schema_parts(
    st.recursive(st.one_of(st.just({}), st.booleans(), _SCALARS), _schema_parts, max_leaves=5)
)


def _start_schemas(folder: Path) -> Callable[[tuple[str, list[int]]], None]:
    tokenizer = _tokenizer()
    return lambda case: _follow(Grammar.from_json_schema(case[0], tokenizer), tokenizer, case[1])


SCHEMAS = Target(
    cases=st.tuples(
        st.one_of(SCHEMA_VALUES.map(json.dumps), SCHEMA_VALUES.map(json.dumps), st.text(max_size=20)), _CHOICES
    ),
    start=_start_schemas,
    per_process=2000,
)
"""JSON Schemas, as text."""
