"""Hugging Face checkpoints of Qwen 1, with the ranks of its tokens."""

from base64 import b64decode
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from llamacli.plugin import BYTE_OF_CHAR, Checkpoint, ModelFormatError, Settings, TokenKind, field

_FILE = "qwen.tiktoken"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
"""Special tokens, which folders do not have."""


def _ranked(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Tokens, and merges, which their ranks say."""
    path, ranks = settings["folder"] / _FILE, dict[bytes, int]()
    if not path.is_file():
        raise ModelFormatError(f"{path.parent}: {_FILE} is missing")
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            text, rank = line.split()
            ranks[b64decode(text, validate=True)] = int(rank)
        except ValueError as error:
            raise ModelFormatError(f"{path}: line {number}: {error}") from error
    char_of_byte = {byte: char for char, byte in BYTE_OF_CHAR.items()}

    def written(token: bytes) -> str:
        return "".join(map(char_of_byte.__getitem__, token))

    merges = []
    for token, of_token in ranks.items():
        if len(token) == 1:
            continue
        parts = _merged(token, ranks, of_token)
        if len(parts) != 2:
            raise ModelFormatError(f"{path}: token {of_token} is not made of two before it")
        merges.append(" ".join(map(written, parts)))
    texts = {rank: written(token) for token, rank in ranks.items()}
    special = {len(ranks) + i: text for i, text in enumerate(_SPECIAL)}
    size = settings["vocab_size"]
    if (last := max(*texts, *special)) >= size:
        raise ModelFormatError(f"{path}: token {last} is beyond vocab_size = {size} of config.json")
    kinds = dict.fromkeys(texts, TokenKind.NORMAL) | dict.fromkeys(special, TokenKind.CONTROL)
    texts |= special
    found = settings["vocabulary"]
    names = ("unknown",) if any(key.endswith("_token_id") for key in found) else ("bos", "eos", "unknown")
    ids = {f"tokenizer.ggml.{name}_token_id": len(ranks) for name in names}
    return {key: number for key, number in ids.items() if key not in found} | {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [int(kinds.get(i, TokenKind.UNUSED)) for i in range(size)],
        "tokenizer.ggml.merges": merges,
    }  # fmt: skip


def _merged(token: bytes, ranks: Mapping[bytes, int], rank: int) -> list[bytes]:
    """Parts of a token by the merges that come before it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        pairs = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
        if (best := min(pairs, default=rank)) >= rank:
            return parts
        i = pairs.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


QWEN = Checkpoint(
    "qwen", ("QWenLMHeadModel",),
    {"attention.layer_norm_rms_epsilon": field("layer_norm_epsilon", kind=float)},
    vocabulary=("own",), tokenizer=_ranked,
)  # fmt: skip
