import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.testing.vocabularies import byte_level, ranked
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli.tokenizer.pretokenizers import PRE_TOKENIZERS

ALIASES = {
    "gpt-2": "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe modern-bert",
    "llama-bpe": "jina-v5-nano",
    "qwen2": "f2llmv2",
    "tiny_aya": "cohere2moe",
}


def words(pre: str, text: str) -> list[str]:
    found, start = [], 0
    for length in PRE_TOKENIZERS[pre].lengths(text):
        found.append(text[start : start + length])
        start += length
    assert start == len(text)
    return found


@pytest.mark.parametrize(("name", "alias"), [(name, alias) for name in ALIASES for alias in ALIASES[name].split()])
def test_aliases(name: str, alias: str) -> None:
    assert PRE_TOKENIZERS[alias] is PRE_TOKENIZERS[name]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("exaone-moe", "the quick e\u0301 12+\n\n x", ["the quick e\u0301", " ", "1", "2", "+\n", "\n", " x"]),
        ("tiny_aya", "ab1234 12345", ["ab", "1", "234", " ", "12", "345"]),
        ("afmoe", "ab1234\t\t123456", ["ab", "1", "234", "\t", "\t", "123", "456"]),
        ("superbpe", "ab1234 x", ["ab", "1", "234", " x"]),
        ("kimi-k2", "漢字kana漢 It's", ["漢字", "kana", "漢", " It's"]),
        ("chameleon", "xIMGIMGABZ    a1", ["x", "IMGIMGABZ", "    ", "a", "1"]),
        ("chameleon", "<sentinel:1>", ["<", "sentinel", ":", "1", ">"]),
        ("jais-2", "a" + " " * 13 + "b", ["a", " " * 8, " " * 4, " b"]),
        ("jais-2", "a" + " " * 1023 + "b", ["a", *(" " * (1 << n) for n in range(9, 0, -1)), " b"]),
        ("youtu", "한국어abc，12", ["한국어", "abc", "，", "1", "2"]),
        ("granite-embed-multi-97m", "camelCase e\u0301t\u0301A", ["camel", "Case", " e\u0301t\u0301", "A"]),
        ("spark2_5", "a+\n\n123", ["a", "+", "\n", "\n", "1", "2", "3"]),
    ],
)
def test_words_of_each_pre_tokenizer(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


@given(st.text() | st.text("aAé漢 12345'!\r\n\t", max_size=60))
def test_words_make_up_the_text(text: str) -> None:
    for pre in PRE_TOKENIZERS:
        assert "".join(words(pre, text)) == text


@given(st.text("0123456789 a", max_size=40))
def test_digit_groups_count_from_the_end(text: str) -> None:
    for pre in ("tiny_aya", "afmoe", "superbpe"):
        digits = [word for word in words(pre, text) if word[0].isdigit()]
        runs = re.findall("[0-9]+", text)
        assert digits == [group for run in runs for group in re.findall("[0-9]{1,3}(?=(?:[0-9]{3})*$)", run)]


@pytest.mark.slow
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_long_runs_take_linear_time(pre: str) -> None:
    for unit in ("1", "a", " ", "\n", "1a", "!", "漢", "a "):
        assert sum(PRE_TOKENIZERS[pre].lengths(unit * (20_000 // len(unit)))) == 20_000


@pytest.mark.parametrize("pre", ["granite-embed-multi-311m", "sarvam-moe", "gemma4"])
def test_merges_of_raw_utf8(pre: str) -> None:
    metadata = ranked(["▁ a", "\n \n"], {"\n": 1}) | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    tokenizer = tokenizer_from_metadata(metadata)
    ids = tokenizer.encode(" a\n\né", add_special=False)
    assert [tokenizer.piece_bytes(token) for token in ids] == [b" a", b"\n\n", b"\xc3", b"\xa9"]
    assert tokenizer.add_bos == (pre != "sarvam-moe")


def test_white_space_is_dropped() -> None:
    metadata = ranked(["a b"], {"\x1c": 1}) | {"tokenizer.ggml.model": "whitespace"}
    tokenizer = tokenizer_from_metadata(metadata)
    assert [tokenizer.piece(token) for token in tokenizer.encode(" ab\u3000a\n\x1cb ")] == ["ab", "a", "\x1c", "b"]
    assert tokenizer.encode("A") == [3 + 0x41]
    assert tokenizer_from_metadata(metadata | {"tokenizer.ggml.normalizer.lowercase": True}).encode("A") == [
        tokenizer.token_id("a")
    ]


def test_kimi_k2_needs_no_merges() -> None:
    metadata = byte_level([], pre="kimi-k2")
    del metadata["tokenizer.ggml.merges"]
    assert tokenizer_from_metadata(metadata).encode("ab") == list(b"ab")
