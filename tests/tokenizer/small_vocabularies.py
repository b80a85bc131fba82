"""Metadata of small vocabularies, one per tokenizer scheme."""

from typing import Any

import numpy as np

from llamacli.tokenizer.byte_level import BYTE_OF_CHAR

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
HEAD = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(BYTE_TOKENS, BYTE)}


def scored(scores: dict[str, float], kinds: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """SentencePiece metadata: HEAD, tokens merged by score, special tokens.

    HEAD has ids 0 to 258, `tokens` start at id 259, those of `kinds` follow.
    """
    types = {**HEAD, **dict.fromkeys(scores, NORMAL), **(kinds or {})}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.scores": np.array([scores.get(text, 0.0) for text in types], np.float32),
        "tokenizer.ggml.token_type": np.array(list(types.values()), np.int32),
        **with_dots(keys),
    }


def ranked(merges: list[str], kinds: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Metadata of ranked merges in raw UTF-8.

    HEAD, a space (id 259), all pieces of the merges, then the tokens of `kinds`.
    """
    types = {**HEAD, **dict.fromkeys(["▁", *_pieces(merges)], NORMAL), **(kinds or {})}
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": np.array(list(types.values()), np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        **with_dots(keys),
    }


def byte_level(merges: list[str], kinds: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Byte-level BPE metadata: bytes (ids 0 to 255), merged pieces, special tokens."""
    bytes_in_order = sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__)
    types = {**dict.fromkeys([*bytes_in_order, *_pieces(merges)], NORMAL), **(kinds or {})}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": np.array(list(types.values()), np.int32),
        "tokenizer.ggml.merges": merges,
        **with_dots(keys),
    }


def english(space: str) -> list[str]:
    """Merges for some English words, with spaces written as `space`."""
    words = ["the", "cat", "sat", "mat", "on", "hello", "world", f"{space}the", f"{space}cat", f"{space}on", "12", "!!"]
    return list(dict.fromkeys(f"{word[:i]} {word[i]}" for word in words for i in range(1, len(word))))


def english_scores() -> dict[str, float]:
    """The same words as tokens with distinct scores, higher for longer ones."""
    return {piece: len(piece) - i / 1000 for i, piece in enumerate(["▁", *_pieces(english("▁"))])}


def with_dots(keys: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments as metadata keys: `pre="qwen2"` is tokenizer.ggml.pre."""
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def _pieces(merges: list[str]) -> list[str]:
    return [piece for merge in merges for piece in (*merge.split(" "), merge.replace(" ", ""))]
