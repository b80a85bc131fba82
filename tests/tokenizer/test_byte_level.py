import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.errors import TokenizerError
from llamacli.gguf.tokens import BYTE_OF_CHAR
from llamacli.kernels.switch import jit_disabled
from llamacli.testing.vocabularies import byte_level, english
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from llamacli.tokenizer.pretokenizers import PRE_TOKENIZERS

CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def bpe(merges: list[str], **keys: Any) -> Tokenizer:
    return tokenizer_from_metadata(byte_level(merges, **keys))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


def words(pre: str, text: str) -> list[str]:
    """Words of a pre-tokenizer, by a vocabulary that merges whole words."""
    raw = "".join(CHAR_OF_BYTE[byte] for byte in text.encode())
    pieces = {raw[i:j] for i in range(len(raw)) for j in range(i + 2, len(raw) + 1)}
    merges = [f"{piece[:i]} {piece[i:]}" for piece in sorted(pieces, key=len) for i in range(1, len(piece))]
    tokenizer = bpe(merges, pre=pre)
    return [tokenizer.piece(token) for token in encode(tokenizer, text)]


def test_byte_table_is_gpt2s() -> None:
    assert [CHAR_OF_BYTE[byte] for byte in (0x00, 0x0A, 0x20, 0x21, 0x7F, 0xA0, 0xA1, 0xAD, 0xFF)] == list("ĀĊĠ!ġł¡Ńÿ")
    assert len(CHAR_OF_BYTE) == 256


def test_text_is_encoded_as_utf8_bytes() -> None:
    tokenizer = bpe([])
    assert encode(tokenizer, "aé\n 😀") == list("aé\n 😀".encode())


def test_merges_apply_by_rank_then_left_to_right() -> None:
    tokenizer = bpe(["b c", "a b", "ab c"])
    assert [tokenizer.piece(token) for token in encode(tokenizer, "abc")] == ["a", "bc"]
    tokenizer = bpe(["a b", "b c", "ab c", "b c"])
    assert [tokenizer.piece(token) for token in encode(tokenizer, "abc")] == ["abc"]
    tokenizer = bpe(["a a"])
    assert [tokenizer.piece(token) for token in encode(tokenizer, "aaa")] == ["aa", "a"]


def test_ignore_merges() -> None:
    assert encode(bpe(["a b"], kinds={"cab": 1}, pre="llama-bpe"), "cab") == [257]
    assert encode(bpe(["a b"], kinds={"cab": 1}, pre="qwen2"), "cab") == [ord("c"), 256]


def test_missing_bytes_are_dropped_without_joining_neighbours() -> None:
    metadata = byte_level(["a b"])
    metadata["tokenizer.ggml.tokens"][ord("x")] = "unlike"
    tokenizer = tokenizer_from_metadata(metadata)
    assert encode(tokenizer, "axbxab") == [ord("a"), ord("b"), 256]
    assert encode(tokenizer, "x") == []


@pytest.mark.parametrize("merges", [["a bcd"], ["a"], ["a b c"], [""], [" a"], ["a "]])
def test_invalid_merges_are_refused(merges: list[str]) -> None:
    metadata = byte_level([])
    metadata["tokenizer.ggml.merges"] = merges
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.merges: entry 0 of 1"):
        tokenizer_from_metadata(metadata).encode("a")


def test_characters_outside_the_byte_table_are_kept() -> None:
    tokenizer = bpe([], kinds={"東Ġ": 1})
    assert tokenizer.piece(256) == "東 "


TEXT = "I'LL don't\tXMLHttp 12345 a/b//\n\n \r\n  x!?\n  "
GPT2 = ["I", "'", "LL", " don", "'t", "\t", "XMLHttp", " 12345", " a", "/", "b", "//", "\n\n \r\n ", " x", "!?", "\n  "]
LLAMA3 = [
    "I",
    "'LL",
    " don",
    "'t",
    "\tXMLHttp",
    " ",
    "123",
    "45",
    " a",
    "/b",
    "//\n\n",
    " \r\n",
    " ",
    " x",
    "!?\n",
    "  ",
]
QWEN2 = [*LLAMA3[:6], *"12345", *LLAMA3[8:]]
CASED = ["\tXMLHttp", " ", "123", "45", " a", "/b", "//\n\n", " \r\n", " ", " x", "!?\n", "  "]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", GPT2),
        ("smollm", [*GPT2[:7], " ", *"12345", *GPT2[8:]]),
        ("llama-bpe", LLAMA3),
        ("dbrx", LLAMA3),
        ("qwen2", QWEN2),
        ("qwen35", QWEN2),
        ("tekken", ["I", "'LL", " don", "'t", *CASED[:2], *"12345", *CASED[4:]]),
        ("gpt-4o", ["I'LL", " don't", *CASED]),
        ("default", [*GPT2[:4], "'", "t", *GPT2[5:7], " ", "123", "45", *GPT2[8:]]),
    ],
)
def test_pre_tokenizer_words(pre: str, expected: list[str]) -> None:
    assert words(pre, TEXT) == expected


def test_cased_words() -> None:
    assert words("gpt-4o", "camelCaseXMLHttp fooBAR") == ["camel", "Case", "XMLHttp", " foo", "BAR"]


@pytest.fixture(scope="module")
def every_pre() -> list[Tokenizer]:
    return [bpe(english("Ġ"), pre=pre) for pre in PRE_TOKENIZERS]


@given(st.text() | st.text("thecatsomwld 12!'\r\n\t", max_size=60))
def test_round_trip(every_pre: list[Tokenizer], text: str) -> None:
    for tokenizer in every_pre:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.skipif(jit_disabled(), reason="plain Python is slow")
@pytest.mark.slow
@pytest.mark.parametrize("pre", ["default", "llama-bpe", "qwen2", "gpt-4o", "deepseek-llm"])
def test_long_runs_take_linear_time(pre: str) -> None:
    tokenizer = bpe(["A A", "AA AA"], pre=pre)
    tokenizer.encode("")
    for unit in ("A", "é", " ", "\n", " \n", "1", "!", "éA", "'"):
        text = unit * (65536 // len(unit.encode()))
        start = time.perf_counter()
        tokenizer.encode(text)
        assert time.perf_counter() - start < 4, unit  # a quadratic pattern needs 14 s and more
