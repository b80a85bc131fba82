import contextlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from character_map import character_map
from llamacli.errors import LlamaCliError, ModelFormatError, TokenizerError
from llamacli.testing.vocabularies import UNUSED, USER_DEFINED, unigram
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

UNK = 2


def t5(scores: dict[str, float], kinds: dict[str, int] | None = None, **keys: Any) -> Tokenizer:
    return tokenizer_from_metadata(unigram(scores, kinds, **keys))


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, add_special=False)]


def mapped(replacements: dict[str, str]) -> np.ndarray[Any, Any]:
    return np.frombuffer(character_map(replacements), np.uint8)


def test_best_sum_of_scores() -> None:
    assert texts(t5({"a": -1, "b": -1, "c": -1, "ab": -1.5, "bc": -1.25}), "abc") == ["a", "bc"]
    assert texts(t5({"a": -1, "b": -1, "c": -1, "ab": -1, "bc": -1.25}), "abc") == ["ab", "c"]
    assert texts(t5({"a": -1, "aa": -2}), "aa") == ["aa"]  # found first; an equal sum does not replace it


def test_unknown_characters_cost_more_than_any_token() -> None:
    assert texts(t5({"ab": -25, "b": -1}), "ab") == ["ab"]
    assert texts(t5({"ab": -37, "b": -27}), "ab") == ["ab"]
    assert texts(t5({"ab": -38, "b": -1}, {"<x>": USER_DEFINED}), "ab") == ["ab"]
    assert texts(t5({"ab": -25, "b": 20}), "ab") == ["<unk>", "b"]


LETTERS = "abé▁"


@given(
    text=st.text(LETTERS, min_size=1, max_size=12),
    scores=st.dictionaries(st.text(LETTERS, min_size=1, max_size=4), st.integers(-50, -1), min_size=1),
)
def test_sum_of_scores_is_the_best_of_all(text: str, scores: dict[str, float]) -> None:
    tokenizer = t5(scores)
    unknown = min(scores.values()) - 10
    best = [0.0] + [-np.inf] * len(text)
    for stop in range(1, len(text) + 1):
        for start in range(stop):
            alone = unknown if stop - start == 1 else -np.inf
            best[stop] = max(best[stop], best[start] + scores.get(text[start:stop], alone))
    ids = tokenizer.encode(text.replace("▁", " "), add_special=False)
    assert not any(a == b == UNK for a, b in pairwise(ids))
    if UNK not in ids:
        assert "".join(map(tokenizer.token_text, ids)) == text
        assert sum(scores[tokenizer.token_text(token)] for token in ids) == best[-1]
    else:
        assert best[-1] <= unknown


def test_unknown_characters_become_one_token() -> None:
    tokenizer = t5({"a": -1, "b": -1})
    assert tokenizer.encode("a東京b") == [3, UNK, 4, 1]
    assert tokenizer.encode("") == [1]
    metadata = unigram({"a": -1}, unknown_token_id=-1)
    metadata["tokenizer.ggml.tokens"] = ["a", "b"]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"][-1:].repeat(2)
    with pytest.raises(TokenizerError, match=r"neither tokens for 'ac' nor an unknown token"):
        tokenizer_from_metadata(metadata).encode("ac")


def test_spaces() -> None:
    pieces = {"▁": -1.0, "a": -1.0, "▁a": -1.0}
    assert texts(t5(pieces), " a  a") == ["▁a", "▁", "▁a"]
    assert texts(t5(pieces, add_space_prefix=True), "a a") == ["▁a", "▁a"]
    merged = t5(pieces, remove_extra_whitespaces=True)
    assert texts(merged, "  a   a ") == ["▁a", "▁a"]
    assert t5(pieces, add_space_prefix=True).decode([5, 5]) == "a a"
    assert merged.decode([5, 5]) == " a a"


def test_user_defined_and_unused_tokens() -> None:
    tokenizer = t5({"a": -1, "b": -1, "c": -1}, {"<x>": USER_DEFINED, "ab": UNUSED, "bc": USER_DEFINED})
    assert texts(tokenizer, "a<x>bc") == ["a", "<x>", "bc"]
    assert texts(tokenizer, "ab") == ["ab"]  # score 0
    assert tokenizer.decode(tokenizer.encode("ab")) == ""


def test_characters_are_mapped_before() -> None:
    pieces = {"a": -1.0, "f": -1.0, "i": -1.0, "▁": -1.0, "x": -1.0}
    replacements = {"ﬁ": "fi", "\n": " ", "z": "", "aa": "x", "aaaa": "f", "ß": "x" * 50}
    tokenizer = t5(pieces, precompiled_charsmap=mapped(replacements))
    assert texts(tokenizer, "ﬁz\na") == ["f", "i", "▁", "a"]
    assert texts(tokenizer, "aaaaaaa") == ["f", "x", "a"]
    assert texts(tokenizer, "z") == []
    assert texts(tokenizer, "ß") == ["x"] * 50


def test_signed_map_is_the_same() -> None:
    signed = t5({"x": -1.0}, precompiled_charsmap=mapped({"é": "x"}).view(np.int8))
    assert texts(signed, "é") == ["x"]


@given(
    replacements=st.dictionaries(
        st.text(LETTERS + "東😀", min_size=1, max_size=4), st.text("xy", max_size=3), min_size=1, max_size=20
    ),
    text=st.text(LETTERS + "東😀", max_size=20),
)
def test_longest_key_is_replaced(replacements: dict[str, str], text: str) -> None:
    tokenizer = t5(dict.fromkeys([*LETTERS, "東", "😀", "x", "y"], -1.0), precompiled_charsmap=mapped(replacements))
    expected, position = "", 0
    while position < len(text):
        keys = [key for key in replacements if text.startswith(key, position)]
        key = max(keys, key=len, default=text[position])
        expected += replacements.get(key, key)
        position += len(key)
    assert "".join(texts(tokenizer, text)) == expected


@pytest.mark.parametrize("value", [np.zeros(3, np.uint8), np.full(9, 200, np.uint8), np.zeros(9), "text", 7])
def test_damaged_map_is_named_at_load(value: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.precompiled_charsmap"):
        t5({"a": -1.0}, precompiled_charsmap=value)


def test_damaged_index_is_named_when_used() -> None:
    data = np.concatenate([np.array([8, 0, 0, 0], np.uint8), np.full(9, 255, np.uint8)])
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.precompiled_charsmap"):
        t5({"a": -1.0}, precompiled_charsmap=data).encode("a")


@given(data=st.binary(min_size=6, max_size=200), index=st.integers(0, 60), text=st.text(max_size=20))
def test_random_maps_give_ids_or_a_typed_error(data: bytes, index: int, text: str) -> None:
    value = np.frombuffer((4 * index).to_bytes(4, "little") + data, np.uint8)
    with contextlib.suppress(LlamaCliError):
        ids = t5({"a": -1.0}, {"é<x>": USER_DEFINED}, precompiled_charsmap=value).encode(text)
        assert all(0 <= token < 5 for token in ids)


@given(st.text("ab東 é", max_size=40))
def test_round_trip(text: str) -> None:
    pieces = dict.fromkeys(["▁", "a", "b", "ab", "é", "東", "b▁a"], -1.0)
    plain, prefixed = t5(pieces), t5(pieces, add_space_prefix=True)
    assert plain.decode(plain.encode(text)) == text
    if text.strip():  # llama.cpp puts no space before white space alone
        assert prefixed.decode(prefixed.encode(text)) == text
