"""Tokenizers: text for every scheme, and vocabularies with mutated metadata."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from character_map import character_map
from fuzz.mutations import FLOATS, NUMBERS
from fuzz.target import Target
from llamacli.testing import vocabularies as v
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

_SPECIAL = {"<|im_start|>": v.CONTROL, "<|x|>": v.USER_DEFINED, "</s>": v.CONTROL}


def schemes() -> dict[str, dict[str, Any]]:
    """Metadata of a small vocabulary of each scheme."""
    tokens, scores, types = v.spm_vocabulary()
    keys = {"tokens": tokens, "scores": np.array(scores, "f4"), "token_type": np.array(types, "i4")}
    scored = v.english_scores()
    return {
        "spm": v.tokenizer_keys({"model": "llama", **keys}),
        "scored": v.scored(scored, _SPECIAL),
        "ranked": v.ranked(v.english(v.SPACE), _SPECIAL),
        "byte_level": v.byte_level(v.english("Ġ"), _SPECIAL),
        "word_piece": v.word_piece([f"{v.SPACE}the", "cat", f"{v.SPACE}c", "a", "t", "##x"], _SPECIAL),
        "unigram": v.unigram(
            scored, _SPECIAL, precompiled_charsmap=np.frombuffer(character_map({"ﬁ": "fi", "Ａ": "A"}), np.uint8)
        ),
    }


@functools.cache
def _tokenizer(scheme: str) -> Tokenizer:
    return tokenizer_from_metadata(schemes()[scheme])


PIECES = st.sampled_from(
    ["the", " cat", "hello", "\n", "\t", "  ", "<|im_start|>", "</s>", "<0x41>", "▁", "Ġ", "é", "ﬁ", "Ａ", "\0",
     "\ufeff",
     "\u0301", "👩\u200d👩", "\u2028", "١٢", "123", "'s", "a" * 100, "!" * 100, "\ud800", "<", "|", "\x7f",
     "\U0010ffff"]
)  # fmt: skip
_SHORT = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=30).map("".join)
TEXT = st.one_of(*[_SHORT] * 30, st.builds(lambda piece, n: piece * n, PIECES, st.integers(0, 1000)))
"""Texts, a few of them long, some with lone surrogates."""


_STREAMED = 500
"""Tokens that are decoded one by one: it took most of the time, and those that come later are alike."""


def _encode(case: tuple[str, str, bool, bool, Sequence[int]]) -> None:
    """Encode a text and decode its tokens; decode any ids."""
    scheme, text, add_special, parse_special, ids = case
    tokenizer = _tokenizer(scheme)
    tokens = tokenizer.encode(text, add_special, parse_special)
    assert all(0 <= token < tokenizer.n_vocab for token in tokens)
    stream = tokenizer.stream()
    "".join([*map(stream.feed, tokens[:_STREAMED]), stream.flush()]).encode()
    tokenizer.decode(tokens).encode()
    tokenizer.decode([token % tokenizer.n_vocab for token in ids], parse_special)
    tokenizer.decode(ids)


TEXTS = Target(
    cases=st.tuples(
        st.sampled_from(sorted(schemes())),
        TEXT,
        st.booleans(),
        st.booleans(),
        st.lists(st.integers(-2, 1000), max_size=20),
    ),
    start=lambda folder: _encode,
    per_process=10_000,
)
"""Texts and token ids for tokenizers."""

_VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(
        ["llama", "gpt2", "bert", "t5", "gemma4", "rwkv", "none", "no_vocab", "test", "default", "llama-bpe"]
    ),
    st.lists(st.one_of(st.text(max_size=6), st.sampled_from(["a b", "<0x41>", "<0x-1>", ""])), max_size=5),
    st.binary(max_size=40),
    st.tuples(st.sampled_from(["i4", "u1", "f4"]), st.lists(st.integers(0, 100), max_size=5)),
)
"""Values of keys as files can have them; bytes and pairs with a type become arrays of numbers."""
_KEYS = [
    "model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id", "unknown_token_id",
    "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix", "precompiled_charsmap",
    "remove_extra_whitespaces", "eot_token_id", "seperator_token_id", "suppress_tokens", "fim_pre_token_id",
]  # fmt: skip
_CHANGES = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(_KEYS), _VALUES),
    st.tuples(st.just("remove"), st.sampled_from(_KEYS), st.none()),
    st.tuples(st.just("element"), st.sampled_from(_KEYS), st.tuples(st.integers(0, 999), _VALUES)),
    st.tuples(st.just("cut"), st.sampled_from(_KEYS), st.integers(0, 999)),
)


def _changed(keys: dict[str, Any], change: tuple[str, str, Any]) -> None:
    """Apply a change to metadata, in place."""
    kind, name, value = change
    key = f"tokenizer.ggml.{name}"
    old = keys.get(key)
    if kind == "set":
        keys[key] = _stored(value)
    elif kind == "remove":
        keys.pop(key, None)
    elif isinstance(old, list | np.ndarray) and len(old):
        if kind == "cut":
            keys[key] = old[: value % len(old)]
        elif isinstance(old, np.ndarray):
            if isinstance(value[1], int | float):
                keys[key] = old.copy()
                with np.errstate(all="ignore"):
                    keys[key][value[0] % len(old)] = np.float64(value[1]).astype(old.dtype)
        elif isinstance(value[1], str):
            keys[key] = [*old]
            keys[key][value[0] % len(old)] = value[1]


def _stored(value: Any) -> Any:
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    return np.array(value[1], value[0]) if isinstance(value, tuple) else value


def _load(case: tuple[str, Sequence[tuple[str, str, Any]], str]) -> None:
    """Load a vocabulary with mutated metadata, and use it."""
    keys = dict(schemes()[case[0]])
    for change in case[1]:
        _changed(keys, change)
    tokenizer = tokenizer_from_metadata(keys)
    tokens = tokenizer.encode(case[2], parse_special=True)
    tokenizer.decode(tokens, unparse_special=True).encode()


VOCABULARIES = Target(
    cases=st.tuples(st.sampled_from(sorted(schemes())), st.lists(_CHANGES, min_size=1, max_size=3), TEXT),
    start=lambda folder: _load,
    per_process=2000,
)
"""Vocabularies with mutated metadata."""
