from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.errors import ModelFormatError, TokenizerError
from llamacli.testing.vocabularies import USER_DEFINED, word_piece
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from llamacli.tokenizer.word_piece import BertNormalizer

CLS, SEP, UNK = 2, 3, 1
PIECES = [
    "▁un",
    "aff",
    "able",
    "▁the",
    "▁t",
    "▁e",
    "e",
    "h",
    "▁,",
    "▁!",
    "▁$",
    "▁中",
    "▁文",
    "▁über",
    "▁uber",
    "▁É",
    "▁©",
]


def bert(pieces: list[str] = PIECES, **keys: Any) -> Tokenizer:
    return tokenizer_from_metadata(word_piece(pieces, **keys))


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, add_special=False)]


def test_longest_tokens_make_up_each_word() -> None:
    assert texts(bert(), "unaffable the te") == ["▁un", "aff", "able", "▁the", "▁t", "e"]


def test_word_without_tokens_is_unknown_as_a_whole() -> None:
    assert texts(bert(), "unaffix the") == ["[UNK]", "▁the"]


def test_punctuation_ascii_symbols_and_ideographs_are_words() -> None:
    assert texts(bert(), "the,the!the$ 中文the©") == [
        *("▁the", "▁,", "▁the", "▁!", "▁the", "▁$", "▁中", "▁文"),
        "[UNK]",  # "the©": a symbol beyond ASCII does not stand apart
    ]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B81F),
        (0x2B920, 0x2CEAF), (0x2F800, 0x2FA1F),
    ],
)  # fmt: skip
def test_blocks_of_ideographs(first: int, last: int) -> None:
    normalizer = BertNormalizer(lowercase=False, strip_accents=False)
    assert [normalizer[code] for code in (first, last)] == [f" {chr(first)} ", f" {chr(last)} "]
    assert not any(" " in normalizer[code] for code in (first - 1, last + 1))


def test_white_space_splits_and_control_characters_vanish() -> None:
    assert texts(bert(), "\u3000the\u2003\tt\x00h\u200d\x1c\x1fe\ufffd\x1c\n") == ["▁the", "▁the"]


def test_marks_that_python_does_not_know_vanish_with_accents() -> None:
    """U+0CF3 is a mark since Unicode 15, and Python 3.11 has 14."""
    assert texts(bert(), "th\u0cf3e") == ["▁the"]


def test_case_and_accents() -> None:
    assert texts(bert(), "ÜBER E\u0301") == ["▁uber", "▁e"]
    assert texts(bert(**{"normalizer.strip_accents": False}), "ÜBER") == ["▁über"]
    assert texts(bert(**{"normalizer.lowercase": False}), "É e") == ["▁É", "▁e"]
    assert texts(bert(**{"normalizer.lowercase": False, "normalizer.strip_accents": True}), "é") == ["▁e"]


def test_cls_and_sep_surround_the_text() -> None:
    tokenizer = bert()
    assert tokenizer.encode("the") == [CLS, 8, SEP]
    assert tokenizer.encode_prompt("the") == [CLS, 8, SEP]
    assert tokenizer.encode("[CLS]the[SEP]", parse_special=True) == [CLS, 8, SEP]
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.add_sep) == (True, False, True)
    assert (tokenizer.bos_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id) == (
        2,
        3,
        0,
        1,
        4,
    )


def test_special_ids_without_keys_are_bert_base_ones() -> None:
    metadata = word_piece([f"t{i}" for i in range(200)])
    for key in [key for key in metadata if key.endswith("_token_id")]:
        del metadata[key]
    tokenizer = tokenizer_from_metadata(metadata)
    assert (tokenizer.bos_id, tokenizer.sep_id, tokenizer.unk_id, tokenizer.mask_id) == (101, 102, 100, 103)
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, None)


def test_special_tokens_in_text() -> None:
    tokenizer = tokenizer_from_metadata(word_piece(PIECES, {"<tag>": USER_DEFINED}))
    assert tokenizer.encode("the [MASK]<tag>", add_special=False, parse_special=True) == [8, 4, 5 + len(PIECES)]
    assert texts(tokenizer, "[MASK]") == ["[UNK]"] * 3


def test_decoding_joins_words_with_spaces() -> None:
    tokenizer = bert()
    assert tokenizer.decode(tokenizer.encode("the unaffable, the")) == " the unaffable , the"
    assert bert(add_space_prefix=True).decode([8, 8]) == "the the"


def test_missing_unknown_token_is_named() -> None:
    metadata = word_piece(["▁a"])
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(TokenizerError, match=r"neither tokens for 'b' nor an unknown token"):
        tokenizer_from_metadata(metadata).encode("b")


@pytest.mark.parametrize("key", ["normalizer.lowercase", "normalizer.strip_accents", "seperator_token_id", "tokens"])
def test_damaged_values_are_named(key: str) -> None:
    with pytest.raises(ModelFormatError, match=f"tokenizer.ggml.{key}"):
        bert(**{key: "yes"})


ROUND_TRIP = bert([mark + char for char in "abcdefghij!?" for mark in ("▁", "")])


@given(st.lists(st.text("abcdefghij", min_size=1) | st.sampled_from("!?")))
def test_words_survive_a_round_trip(words: list[str]) -> None:
    ids = ROUND_TRIP.encode(" ".join(words))
    assert ROUND_TRIP.decode(ids).split() == words


@given(st.lists(st.text(max_size=20), max_size=4))
def test_words_are_encoded_one_by_one(parts: list[str]) -> None:
    tokenizer = bert()
    whole = tokenizer.encode(" ".join(parts), add_special=False)
    assert whole == [token for part in parts for token in tokenizer.encode(part, add_special=False)]


@given(st.text())
def test_any_text_is_encoded(text: str) -> None:
    ids = ROUND_TRIP.encode(text, parse_special=True)
    assert all(0 <= token < ROUND_TRIP.n_vocab for token in ids)
