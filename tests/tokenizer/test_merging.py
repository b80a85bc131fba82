import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.errors import TokenizerError
from llamacli.kernels.switch import jit_disabled
from llamacli.testing.vocabularies import english, english_scores, ranked, scored
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata


def merge_plainly(text: str, ranks: dict[tuple[str, str], float]) -> list[str]:
    """Definition of merging by rank, in quadratic time."""
    pieces = list(text)
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def splits(piece: str) -> list[tuple[str, str]]:
    return [(piece[:i], piece[i:]) for i in range(1, len(piece))]


LETTERS = "abé東▁"


@given(
    text=st.text(LETTERS, max_size=40),
    scores=st.dictionaries(st.text(LETTERS, min_size=2, max_size=9), st.integers(0, 4)),
)
def test_merges_by_score_match_the_definition(text: str, scores: dict[str, float]) -> None:
    tokenizer = spm(dict.fromkeys(LETTERS, 0.0) | scores, add_space_prefix=False)
    ranks = {pair: -score for piece, score in scores.items() for pair in splits(piece)}
    assert texts(tokenizer, text.replace("▁", " ")) == merge_plainly(text, ranks)


@given(
    text=st.text(LETTERS, max_size=40),
    merges=st.lists(st.tuples(*[st.text(LETTERS, min_size=1, max_size=4)] * 2), unique=True, max_size=30),
)
def test_ranked_merges_match_the_definition(text: str, merges: list[tuple[str, str]]) -> None:
    kinds = dict.fromkeys(LETTERS, 1)
    tokenizer = tokenizer_from_metadata(ranked([" ".join(pair) for pair in merges], kinds))
    expected = merge_plainly(text, {pair: rank for rank, pair in enumerate(merges)})
    assert texts(tokenizer, text.replace("▁", " ")) == expected


def test_equal_scores_merge_leftmost_first() -> None:
    assert texts(spm({"a": 0, "aa": 1}, add_space_prefix=False), "aaaaa") == ["aa", "aa", "a"]
    assert texts(spm({"a": 0, "b": 0, "ab": 1, "ba": 1}, add_space_prefix=False), "abab") == ["ab", "ab"]


@pytest.mark.skipif(jit_disabled(), reason="plain Python is slow")
@pytest.mark.slow
@pytest.mark.parametrize("unit", ["A", "AB", " ", "ABCDEFGH", "東京"])
def test_long_text_that_merges_everywhere_takes_linear_time(unit: str) -> None:
    pieces = {unit[:1] * n: 1.0 / n for n in range(1, 65)} | {unit * n: 1.0 / n for n in range(1, 9)}
    tokenizer = spm({piece.replace(" ", "▁"): score for piece, score in pieces.items()}, add_space_prefix=False)
    tokenizer.encode("")
    text = unit * (200_000 // len(unit))
    start = time.thread_time()
    ids = tokenizer.encode(text)
    assert time.thread_time() - start < 4  # a quadratic loop needs minutes
    assert tokenizer.decode(ids) == text


@given(st.lists(st.text("the cat's\n12!é東 ", max_size=30), max_size=5))
def test_words_seen_before_are_encoded_alike(parts: list[str]) -> None:
    for tokenizer in WORDS:
        once = [tokenizer.encode_run(part + "\n", continues=True) for part in parts]
        whole = tokenizer.encode_run("".join(part + "\n" for part in parts * 3), continues=True)
        if all(part[-1:] != "\n" and part[:1] != "\n" for part in parts):
            assert whole == [token for ids in once for token in ids] * 3


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, add_special=False)]


def spm(scores: dict[str, float], **keys: Any) -> Tokenizer:
    return tokenizer_from_metadata(scored(scores, **keys))


def test_best_score_merges_first() -> None:
    tokenizer = spm({"a": 0, "b": 0, "ab": -2, "bb": -1}, add_space_prefix=False)
    assert texts(tokenizer, "abbb") == ["a", "bb", "b"]
    tokenizer = spm({"a": 0, "b": 0, "ab": -1, "bb": -2}, add_space_prefix=False)
    assert texts(tokenizer, "abbb") == ["ab", "bb"]


def test_any_two_pieces_merge_whose_union_is_a_token() -> None:
    tokenizer = spm({"ab": -3, "bc": -2, "abc": -4}, add_space_prefix=False)
    assert texts(tokenizer, "abc") == ["abc"]  # a, which is no token, and bc


def test_unknown_characters_become_byte_tokens() -> None:
    tokenizer = spm({"a": -1, "▁": -2}, add_space_prefix=False)
    assert tokenizer.encode("aé ", add_special=False) == [259, 3 + 0xC3, 3 + 0xA9, 260]


def test_byte_tokens_are_found_by_text() -> None:
    metadata = scored({"a": 0}, {"<0x-1>": 6, "<0xC3": 1}, add_space_prefix=False)
    metadata["tokenizer.ggml.tokens"][3:259] = metadata["tokenizer.ggml.tokens"][3:259][::-1]
    tokenizer = tokenizer_from_metadata(metadata)
    ids = tokenizer.encode("aé", add_special=False)
    assert ids == [259, 258 - 0xC3, 258 - 0xA9]
    assert tokenizer.decode(ids) == "aé"
    assert tokenizer.piece(260) == "<0x-1>"


def test_unknown_character_without_byte_tokens() -> None:
    metadata = scored({"a": 0}, add_space_prefix=False)
    metadata["tokenizer.ggml.tokens"][3:259] = [f"filler{i}" for i in range(256)]
    assert tokenizer_from_metadata(metadata).encode("aé", add_special=False) == [259, 0, 0]
    metadata["tokenizer.ggml.unknown_token_id"] = 0
    metadata["tokenizer.ggml.model"] = "gemma4"
    metadata["tokenizer.ggml.merges"] = []
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(TokenizerError, match="<0xC3>"):
        tokenizer_from_metadata(metadata).encode("aé")


def test_prefix_space_is_added_and_removed() -> None:
    tokenizer = spm({"▁": -1, "a": -1, "▁a": -1})
    assert tokenizer.encode("a", add_special=False) == [261]
    assert tokenizer.encode(" a", add_special=False) == [259, 261]
    assert tokenizer.encode("", add_special=False) == []
    assert tokenizer.decode([1, 261, 261]) == "a a"
    assert tokenizer.piece(261) == " a"


def test_missing_scores_are_equal() -> None:
    metadata = scored({"a": 0, "aa": 0}, add_space_prefix=False)
    del metadata["tokenizer.ggml.scores"]
    assert tokenizer_from_metadata(metadata).encode("aaa", add_special=False) == [260, 259]


def test_ranked_merges_apply_in_order() -> None:
    tokenizer = tokenizer_from_metadata(ranked(["b c", "a b", "ab c"]))
    assert texts(tokenizer, "abc") == ["a", "bc"]
    tokenizer = tokenizer_from_metadata(ranked(["a b", "b c", "ab c", "b c"]))
    assert texts(tokenizer, "abc") == ["abc"]


def test_ranked_merges_need_their_exact_parts() -> None:
    tokenizer = tokenizer_from_metadata(ranked(["a b", "c d", "a bcd"]))
    assert texts(tokenizer, "abcd") == ["ab", "cd"]


def test_newline_runs_that_are_tokens_are_not_merged() -> None:
    tokenizer = tokenizer_from_metadata(ranked(["a b", "▁ a"], {"\n": 1, "\n\n\n": 1}))
    runs = {"\n\n\n": ["\n\n\n"], "\n\n": ["\n", "\n"], "ab\n\n\n a": ["ab", "\n\n\n", "▁a"]}
    for text, pieces in runs.items():
        assert texts(tokenizer, text) == pieces


@given(st.text() | st.text("thecatsomwld ▁12!\n", max_size=60))
def test_round_trip(text: str) -> None:
    for tokenizer in WORDS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace("▁", " ")


WORDS = [
    tokenizer_from_metadata(scored(english_scores())),
    tokenizer_from_metadata(scored(english_scores(), add_space_prefix=False)),
    tokenizer_from_metadata(ranked(english("▁"))),
]


def test_words_are_found() -> None:
    assert texts(WORDS[0], "the cat sat on") == ["▁the", "▁cat", "▁", "sat", "▁on"]
    assert texts(WORDS[1], "the cat sat on") == ["the", "▁cat", "▁", "sat", "▁on"]
    assert texts(WORDS[2], "the cat sat on") == ["the", "▁", "cat", "▁", "sat", "▁", "on"]
