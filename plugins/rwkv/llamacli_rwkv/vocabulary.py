"""Vocabulary of RWKV World folders: a text file of tokens."""

import ast
from typing import Any

from llamacli.plugin import ModelFormatError, Settings, TokenKind

_FILE = "rwkv_vocab_v20230424.txt"
_BLANK_LINE = 261
"""Token that ends turns."""


def world(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Tokens, as Python writes bytes: number, text and length a line."""
    path, texts = settings["folder"] / _FILE, ["<s>"]
    if not path.is_file():
        raise ModelFormatError(f"{path.parent}: {_FILE} is missing")
    for number, line in enumerate(path.read_text("utf-8").rstrip("\n").split("\n"), 1):
        try:
            literal, length = line.partition(" ")[2].rsplit(" ", 1)
            token = ast.literal_eval(literal)
            token = token if isinstance(token, bytes) else token.encode()
            if len(token) != int(length):
                raise ValueError(f"{len(token)} bytes, expected {length}")
        except (AttributeError, SyntaxError, ValueError) as error:
            raise ModelFormatError(f"{path}: line {number}: {error}") from error
        texts.append(repr(token)[2:-1])
    n_texts, n = len(texts), settings["vocab_size"]
    if n < n_texts:
        raise ModelFormatError(f"{path}: {n_texts} tokens, and vocab_size of config.json is {n}")
    kinds = [TokenKind.CONTROL, *[TokenKind.NORMAL] * (n_texts - 1), *[TokenKind.UNUSED] * (n - n_texts)]
    return {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": [*texts, *(f"[PAD{i}]" for i in range(n_texts, n))],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": _BLANK_LINE,
    }
