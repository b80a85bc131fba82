import contextlib
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.errors import LlamaCliError, ModelFormatError, TokenizerError
from llamacli.gguf import Metadata
from llamacli.testing.vocabularies import byte_level, english, english_scores, ranked, scored, unigram, word_piece
from llamacli.tokenizer import tokenizer_from_metadata

SCHEMES = [
    scored(english_scores()),
    byte_level(english("Ġ")),
    ranked(english("▁")),
    word_piece(["▁a", "b"]),
    unigram({"a": -1}),
]


@pytest.mark.parametrize("model", ["unheard-of", ""])
def test_unknown_model_error_lists_supported_ones(model: str) -> None:
    with pytest.raises(TokenizerError, match=rf"file: tokenizer.ggml.model = '{model}' .* bert, gemma4, .* t5"):
        tokenizer_from_metadata(Metadata({"tokenizer.ggml.model": model}, "file"))


def test_unknown_pre_tokenizer_error_lists_supported_ones() -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.ggml.pre = 'unheard-of' .*llama-bpe.*qwen2"):
        tokenizer_from_metadata(byte_level([], pre="unheard-of"))


def test_missing_pre_tokenizer_warns(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level(["1 2", "12 3", "123 4"])
    tokenizer_from_metadata(metadata)
    assert not caplog.records
    del metadata["tokenizer.ggml.pre"]
    tokenizer = tokenizer_from_metadata(metadata)
    assert [(record.levelno, "tokenizer.ggml.pre" in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]
    assert tokenizer.encode("1234") == [257, ord("4")]


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_missing_string_arrays(key: str) -> None:
    for wrong in (None, "text", np.zeros(300), 7):
        metadata = byte_level([]) | {f"tokenizer.ggml.{key}": wrong}
        with pytest.raises(ModelFormatError, match=f"tokenizer.ggml.{key}"):
            tokenizer_from_metadata(metadata)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", np.zeros(3, np.float32)),
        ("scores", np.zeros((1, 300), np.float32)),
        ("scores", ["a"] * 300),
        ("token_type", np.ones(3, np.int32)),
        ("token_type", np.ones(300, np.float32)),
        ("token_type", ["a"] * 300),
        ("token_type", 1),
        ("bos_token_id", 300),
        ("eos_token_id", 1 << 31),
        ("eot_token_id", -2),
        ("fim_pad_token_id", 300),
        ("unknown_token_id", "0"),
        ("add_bos_token", 1),
        ("add_space_prefix", "yes"),
    ],
)
def test_values_of_the_wrong_length_type_or_range(key: str, value: Any) -> None:
    metadata = scored({"a": 0}) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelFormatError, match=f"tokenizer.ggml.{key}"):
        tokenizer_from_metadata(metadata)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int8])
def test_scores_of_other_number_types(dtype: type) -> None:
    metadata = scored({"a": 1, "b": 1, "bb": 3, "ab": 2}, add_space_prefix=False)
    metadata["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"].astype(dtype)
    assert tokenizer_from_metadata(metadata).encode("abb", add_special=False) == [259, 261]


def test_unused_scores_are_ignored() -> None:
    tokenizer_from_metadata(byte_level([], scores=["a"]))


def test_duplicate_tokens_map_to_the_last_id() -> None:
    metadata = scored({"a": 0, "b": 0, "c": 0}, add_space_prefix=False)
    metadata["tokenizer.ggml.tokens"][260] = "a"
    tokenizer = tokenizer_from_metadata(metadata)
    assert tokenizer.encode("ac", add_special=False) == [260, 261]
    assert tokenizer.decode([259, 260]) == "aa"


def test_empty_tokens_and_unknown_kinds_load() -> None:
    metadata = byte_level([], {"": 3, "x1": 99, "x2": -1})
    tokenizer = tokenizer_from_metadata(metadata)
    assert tokenizer.encode("ax1", parse_special=True) == list(b"ax1")
    assert [tokenizer.piece(token) for token in (256, 257, 258)] == ["", "", ""]


@pytest.mark.parametrize("model", ["none", "no_vocab", "test", None])
def test_files_without_a_vocabulary_take_ids_only(model: str | None) -> None:
    metadata = {"general.architecture": "arch", "arch.vocab_size": 300, "tokenizer.ggml.eos_token_id": 2}
    tokenizer = tokenizer_from_metadata(metadata | ({"tokenizer.ggml.model": model} if model else {}))
    assert (tokenizer.n_vocab, tokenizer.bos_id, tokenizer.eos_id) == (300, None, 2)
    assert tokenizer.eog_ids == {2}
    with pytest.raises(TokenizerError, match=r"no vocabulary.*'hello'"):
        tokenizer.encode("hello")
    assert tokenizer.encode("") == []
    assert tokenizer.piece(255) == "ff"
    assert tokenizer.decode([1, 255]) == "1ff"


def test_token_list_gives_the_vocabulary_size() -> None:
    keys = {"tokenizer.ggml.model": "test", "tokenizer.ggml.tokens": ["tok_0", "tok_1"]}
    assert tokenizer_from_metadata(keys).n_vocab == 2
    with pytest.raises(ModelFormatError, match=r"arch\.vocab_size"):
        tokenizer_from_metadata({"general.architecture": "arch"})


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 33)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.text(max_size=3), max_size=300)
    | st.lists(st.integers(-2, 9), max_size=300).map(np.array)
)
KEYS = [
    *("model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"),
    *("add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap", "normalizer.lowercase"),
]


@pytest.mark.medium
@given(
    metadata=st.sampled_from(SCHEMES),
    changes=st.dictionaries(st.sampled_from(KEYS).map("tokenizer.ggml.{}".format), VALUES, min_size=1, max_size=3),
    text=st.text(max_size=10),
)
def test_damaged_metadata_gives_a_tokenizer_or_a_typed_error(
    metadata: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    with contextlib.suppress(LlamaCliError):
        tokenizer = tokenizer_from_metadata(metadata | changes)
        tokenizer.decode(tokenizer.encode(text, parse_special=True))


SCORES = st.lists(st.floats(width=32) | st.sampled_from([0.0, -1.0]), min_size=8, max_size=8)


@given(scores=SCORES, text=st.text("abc ", max_size=30))
def test_any_scores_give_all_of_the_text(scores: list[float], text: str) -> None:
    pieces = dict(zip(["a", "b", "c", "ab", "bc", "abc", "▁a", "▁"], scores, strict=True))
    tokenizer = tokenizer_from_metadata(scored(pieces, add_space_prefix=False))
    ids = tokenizer.encode(text, add_special=False)
    assert b"".join(map(tokenizer.piece_bytes, ids)).decode() == text
    ids = tokenizer_from_metadata(unigram(pieces)).encode(text)
    assert all(0 <= token < 11 for token in ids)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
@given(text=st.text() | st.text("thecatsomwld 12!\n", max_size=60))
def test_pieces_make_up_the_whole(scheme: dict[str, Any], text: str) -> None:
    tokenizer = tokenizer_from_metadata(scheme)
    ids = tokenizer.encode(text, add_special=False)
    pieces = b"".join(map(tokenizer.piece_bytes, ids)).decode()
    expected = text if scheme is SCHEMES[1] else text.replace("▁", " ")  # others write a space as U+2581
    assert pieces.removeprefix(" " if scheme is SCHEMES[0] else "") == expected
    assert tokenizer.decode(ids) == expected
