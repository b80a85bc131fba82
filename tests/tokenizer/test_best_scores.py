"""Tokens with the best sum of scores (PLaMo 2).

`tests/oracle/compare_tokenizers.py --best-scores 8` compares random vocabularies with llama.cpp.
"""

from typing import Any

import numpy as np
import pytest

from llamacli.errors import ModelFormatError, TokenizerError
from llamacli.testing.vocabularies import BYTE, BYTE_TOKENS, CONTROL, NORMAL, UNKNOWN, tokenizer_keys
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata

SPECIAL = {"<unk>": UNKNOWN, "<bos>": CONTROL, "<eos>": CONTROL, "<pad>": CONTROL}
SCORES = {"a": -1.0, "b": -1.0, "ab": -3.0, "abc": -1.0, "bc": -0.5, "cd": -2.0, "\n": -1.0, "é": -9.0, "never": np.nan}


def tokenizer(scores: dict[str, float] = SCORES, **keys: Any) -> Tokenizer:
    """Tokenizer of special tokens, bytes and these."""
    kinds = SPECIAL | dict.fromkeys(BYTE_TOKENS, BYTE) | dict.fromkeys(scores, NORMAL)
    values = [*[0.0] * (len(kinds) - len(scores)), *scores.values()]
    given = {"model": "plamo2", "tokens": [*kinds], "scores": values, "token_type": [*kinds.values()]}
    return tokenizer_from_metadata(tokenizer_keys(given | keys))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", ["a", "b"]),
        ("abc", ["abc"]),
        ("abcd", ["a", "b", "cd"]),
        ("é", ["é"]),
        ("aü", ["a", "<0xC3>", "<0xBC>"]),
        ("\ufeffa", ["a"]),
        ("<0x0A>", [f"<0x{byte:02X}>" for byte in b"<0x0A>"]),
        ("never", ["<0x6E>", "<0x65>", "<0x76>", "<0x65>", "<0x72>"]),
        ("", []),
    ],
)
def test_the_best_sum_of_scores_is_taken(text: str, pieces: list[str]) -> None:
    made = tokenizer()
    ids = made.encode(text)
    assert [made.token_text(token) for token in ids] == pieces
    assert made.decode(ids) == text.removeprefix("\ufeff")


def test_of_equal_sums_the_longest_token_is_first() -> None:
    made = tokenizer({"a": -1.0, "b": -1.0, "ab": -2.0, "x": -1000.0})
    assert [made.token_text(token) for token in made.encode("abx")] == ["ab", "x"]


def test_no_special_tokens_are_added() -> None:
    made = tokenizer(add_bos_token=True, add_eos_token=True)
    assert made.encode("a", add_special=True) == made.encode("a", add_special=False)


def test_missing_bytes_and_types_are_named() -> None:
    with pytest.raises(TokenizerError, match="<0x00>"):
        tokenizer_from_metadata(tokenizer_keys({"model": "plamo2", "tokens": ["a"] * 4, "token_type": [NORMAL] * 4}))
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.token_type"):
        tokenizer(token_type=None)
