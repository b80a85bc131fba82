#!/usr/bin/env python3
"""Measure the time per token of grammars and JSON Schemas.

    pip install llguidance
    python benchmarks/grammar.py FILE.gguf [-r 20]

The file needs only a vocabulary. For a text that matches the grammar, prints microseconds per token (median, mean,
maximum) of computing the mask, filtering the candidates and accepting the token.
"""

import argparse
import json
import time

import numpy as np

from llamacli import load_tokenizer
from llamacli.sampling import Candidates, Grammar
from llamacli.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["reader", "writer", "singer"]}},
    },
    "required": ["name", "age", "born", "tags"],
}
JSON = r"""
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= [ \t\n]{0,20}
"""
TEXT = json.dumps(
    {"name": "Ada, who wrote the first program", "age": 36, "born": "1815-12-10", "tags": ["reader", "writer"]},
    ensure_ascii=False,
)


def microseconds(grammar: Grammar, tokens: list[int], tokenizer: Tokenizer, repetitions: int) -> np.ndarray:
    """Measure the microseconds of each token, [repetitions, len(tokens)]."""
    candidates = Candidates(np.random.default_rng(0))
    logits, times = np.zeros(tokenizer.n_vocab, np.float32), []
    for _ in range(repetitions):
        grammar.reset()
        for token in tokens:
            candidates.start(logits)
            started = time.perf_counter()
            grammar.apply(candidates)
            grammar.accept(token)
            times.append(time.perf_counter() - started)
    return 1e6 * np.array(times).reshape(repetitions, len(tokens))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("-r", "--repetitions", type=int, default=20)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.file)
    tokens = tokenizer.encode(TEXT, add_special=False)
    Grammar.from_gbnf("root ::= [a]", tokenizer)  # builds and caches tables of the vocabulary
    print(f"{tokenizer.n_vocab} tokens in the vocabulary, {len(tokens)} in the text")
    print(f"{'':14} {'make ms':>8} {'median us':>10} {'mean us':>8} {'max us':>8}")
    for name, make, source in (
        ("JSON Schema", Grammar.from_json_schema, json.dumps(PERSON)),
        ("JSON in GBNF", Grammar.from_gbnf, JSON),
    ):
        started = time.perf_counter()
        grammar = make(source, tokenizer)
        made = 1e3 * (time.perf_counter() - started)
        times = microseconds(grammar, tokens, tokenizer, arguments.repetitions)
        print(f"{name:14} {made:8.1f} {np.median(times):10.0f} {times.mean():8.0f} {times.max():8.0f}")


if __name__ == "__main__":
    main()
