from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.errors import TokenizerError
from llamacli.testing.vocabularies import CONTROL, NORMAL, tokenizer_keys
from llamacli.tokenizer import Tokenizer, tokenizer_from_metadata
from llamacli.tokenizer.longest_match import unescape

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [b"th", b"the", b"there", b" a", b"\n\n", b"\xc3\xbc", b"\xbcb", b"ab'", b"a\\", b"\t\r"]


def tokenizer(tokens: list[bytes] = BYTES + WORDS, **keys: Any) -> Tokenizer:
    """Tokenizer of a control token and these, escaped as by `repr`."""
    texts = ["<s>", *(repr(token)[2:-1] for token in tokens)]
    types = [CONTROL] + [NORMAL] * len(tokens)
    return tokenizer_from_metadata(tokenizer_keys({"model": "rwkv", "tokens": texts, "token_type": types} | keys))


@pytest.mark.parametrize(
    ("text", "data"),
    [("a", b"a"), (r"\x80", b"\x80"), (r"\n\t\r", b"\n\t\r"), (r"\\n", rb"\n"), (r"\'\"", b"'\""), ("ü", "ü".encode())],
)
def test_escapes(text: str, data: bytes) -> None:
    assert unescape(text) == data


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("there", [b"there"]),
        ("ther", [b"the", b"r"]),
        ("thth a", [b"th", b"th", b" a"]),
        ("übb", [b"\xc3\xbc", b"b", b"b"]),
        ("\n\n\n", [b"\n\n", b"\n"]),
        ("ab'a\\", [b"ab'", b"a\\"]),
        ("", []),
    ],
)
def test_the_longest_token_is_taken(text: str, pieces: list[bytes]) -> None:
    ids = tokenizer().encode(text)
    assert [tokenizer().piece_bytes(token) for token in ids] == pieces
    assert tokenizer().decode(ids) == text


def test_control_tokens() -> None:
    """llama.cpp matches them as text too."""
    made = tokenizer()
    assert made.encode("a<s>", add_special=False) == [made.token_id("a"), 0]
    assert made.decode([made.encode("a")[0], 0]) == "a"


def test_no_special_tokens_are_added() -> None:
    made = tokenizer(bos_token_id=0, eos_token_id=0, add_bos_token=True, add_eos_token=True)
    assert made.encode("a", add_special=True) == made.encode("a", add_special=False)


def test_last_of_equal_tokens_counts() -> None:
    assert tokenizer([b"a", b"b", b"a"]).encode("ab") == [3, 2]


def test_bytes_without_a_token() -> None:
    with pytest.raises(TokenizerError, match="nor an unknown token"):
        tokenizer([b"a", b"bc"]).encode("ab")
    assert tokenizer([b"a", b"bc"], unknown_token_id=0).encode("aba") == [1, 0, 1]


@given(
    st.lists(st.text("abü<s>", max_size=5).map(lambda text: text.encode()).filter(bool), max_size=20),
    st.text("abü<s>", max_size=30),
)
def test_equal_to_a_search_of_all_tokens(words: list[bytes], text: str) -> None:
    made, data, expected = tokenizer(BYTES + words), text.encode(), []
    ids = {b"<s>": 0} | {token: i for i, token in enumerate(BYTES + words, 1)}
    while data:
        best = max((token for token in ids if data.startswith(token)), key=len)
        expected.append(ids[best])
        data = data[len(best) :]
    assert made.encode(text, add_special=False) == expected
