"""Metadata of small vocabularies, one for each tokenizer scheme of GGUF files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llamacli.gguf.tokens import BYTE_OF_CHAR

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""GGUF's token types."""

SPACE = "\u2581"
"""SentencePiece's mark for a space."""

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
HEAD = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(BYTE_TOKENS, BYTE)}
"""Types of the first 259 tokens of a SentencePiece vocabulary: unknown, BOS, EOS, and one for each byte."""

WORDS = (
    "once", "upon", "a", "time", "there", "was", "little", "girl", "dog", "the", "and", "she", "saw", "big", "ball",
)  # fmt: skip


def spm_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a small SentencePiece vocabulary.

    Ids 0, 1 and 2 are unknown, BOS and EOS; the bytes follow, then words with all their beginnings, then letters.
    Better scores are merged first.
    """
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'\"-"]
    merged = dict.fromkeys(f"{SPACE}{word}"[:n] for word in WORDS for n in range(2, len(word) + 2))
    pieces = [*merged, *letters]
    scores = [0.0] * len(HEAD) + [-float(rank) for rank in range(len(pieces))]
    return [*HEAD, *pieces], scores, [*HEAD.values(), *[NORMAL] * len(pieces)]


def vocabulary(tokenizer: str) -> dict[str, Any]:
    """Metadata of the vocabulary that a tiny model has.

    "test" is 128 tokens without text, "test:65536" has another number of them, "spm" is `spm_vocabulary`.
    """
    if tokenizer == "spm":
        tokens, scores, types = spm_vocabulary()
        return tokenizer_keys({"model": "llama", "tokens": tokens, "scores": scores, "token_type": types})
    model, _, n_vocab = tokenizer.partition(":")
    tokens = [f"tok_{i}" for i in range(int(n_vocab or 128))]
    return tokenizer_keys({"model": model, "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": None})


def vocabulary_size(tokenizer: str) -> int:
    """Number of tokens of `vocabulary(tokenizer)`."""
    return len(vocabulary(tokenizer)["tokenizer.ggml.tokens"])


def scored(scores: Mapping[str, float], kinds: Mapping[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece BPE vocabulary, merged by scores.

    Ids 0 to 258 are `HEAD`; the scored tokens follow in order, then those of `kinds`, by token type.
    """
    return _metadata("llama", {**HEAD, **dict.fromkeys(scores, NORMAL)}, kinds, keys, scores)


def ranked(merges: Sequence[str], kinds: Mapping[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Metadata of a BPE vocabulary in raw UTF-8, merged by rank.

    Ids 0 to 258 are `HEAD`, 259 is a space; all pieces of the merges follow, then those of `kinds`, by token type.
    """
    types = {**HEAD, **dict.fromkeys([SPACE, *_pieces(merges)], NORMAL)}
    return _metadata("gemma4", types, kinds, {"merges": list(merges), "bos_token_id": 1} | keys)


def byte_level(merges: Sequence[str], kinds: Mapping[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Metadata of a byte-level BPE vocabulary.

    Ids 0 to 255 are the bytes; what the merges make follows, then those of `kinds`, by token type.
    """
    types = dict.fromkeys([*sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__), *_pieces(merges)], NORMAL)
    return _metadata("gpt2", types, kinds, {"pre": "gpt-2", "merges": list(merges)} | keys)


BERT_HEAD = {"[PAD]": CONTROL, "[UNK]": UNKNOWN, "[CLS]": CONTROL, "[SEP]": CONTROL, "[MASK]": CONTROL}
"""Types of the first tokens of a WordPiece vocabulary of this module."""


def word_piece(pieces: Sequence[str], kinds: Mapping[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Metadata of a WordPiece vocabulary.

    Ids 0 to 4 are `BERT_HEAD`; the pieces follow, those that begin a word with U+2581 before them, then those of
    `kinds`, by token type.
    """
    ids = {f"{name}_token_id": i for i, name in enumerate(("padding", "unknown", "bos", "seperator", "mask"))}
    return _metadata("bert", {**BERT_HEAD, **dict.fromkeys(pieces, NORMAL)}, kinds, ids | keys)


def unigram(scores: Mapping[str, float], kinds: Mapping[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Metadata of a Unigram vocabulary.

    Ids 0 to 2 are padding, EOS and unknown; the scored tokens follow in order, then those of `kinds`, by token type.
    """
    head = {"<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN}
    return _metadata("t5", {**head, **dict.fromkeys(scores, NORMAL)}, kinds, keys, scores)


def english(space: str) -> list[str]:
    """Merges of some English words, their spaces written as `space`."""
    words = ["the", "cat", "sat", "mat", "on", "hello", "world", f"{space}the", f"{space}cat", f"{space}on", "12", "!!"]
    return list(dict.fromkeys(f"{word[:i]} {word[i]}" for word in words for i in range(1, len(word))))


def english_scores() -> dict[str, float]:
    """Scores of the words of `english`, all different, better for longer ones."""
    return {piece: len(piece) - i / 1000 for i, piece in enumerate([SPACE, *_pieces(english(SPACE))])}


def _metadata(
    model: str,
    types: Mapping[str, int],
    kinds: Mapping[str, int] | None,
    keys: Mapping[str, Any],
    scores: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    types = {**types, **(kinds or {})}
    found: dict[str, Any] = {"model": model, "tokens": list(types)}
    if scores is not None:
        found["scores"] = np.array([scores.get(text, 0.0) for text in types], np.float32)
    return tokenizer_keys({**found, "token_type": np.array(list(types.values()), np.int32), **keys})


def tokenizer_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata keys with their full names: `pre` becomes tokenizer.ggml.pre."""
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def _pieces(merges: Sequence[str]) -> list[str]:
    return [piece for merge in merges for piece in (*merge.split(" "), merge.replace(" ", ""))]
