"""Refusal of prompts that cannot fit into a context."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from llamacli.model import Model
from llamacli.serve.errors import BadRequestError, PromptTooLongError
from llamacli.serve.requests import ModelInfo

BEGINNING = 8
"""Characters for each token of the context in the beginning of a text that is tokenized first."""

MAX_TEXT = 2 << 20
"""Characters of a text to tokenize, more than contexts have; they take seconds."""

_longest: weakref.WeakKeyDictionary[Model, int] = weakref.WeakKeyDictionary()


def expect_room(parts: Iterable[str | Sequence[int]], model: Model, info: ModelInfo) -> None:
    """Refuse a prompt that is certainly longer than the context.

    The parts are texts or token ids; a text has at least as many tokens as its bytes need, and about as many as its
    beginning. Tokenizing many megabytes takes seconds of a thread, and so does a look at each of millions of ids.
    Raises PromptTooLongError, with the fewest tokens that the prompt may have.
    """
    n_ctx = info.n_ctx or model.config.n_ctx
    n_tokens = n_bytes = 0
    parts = list(parts)
    for part in parts:
        if isinstance(part, str):
            n_bytes += len(part.encode("utf-8", "replace"))
        else:
            n_tokens += len(part)
    n_tokens += n_bytes // longest_piece(model)
    if n_tokens > n_ctx:
        raise PromptTooLongError(n_tokens, n_ctx, at_least=n_bytes > 0)
    for part in parts:
        if isinstance(part, str) and len(part) > 2 * BEGINNING * n_ctx:
            ids = model.tokenizer.encode(part[: BEGINNING * n_ctx], add_special=False, parse_special=True)
            n_tokens = len(ids) * 7 // 8  # another end may have some tokens less
            if n_tokens > n_ctx:
                raise PromptTooLongError(n_tokens, n_ctx, at_least=True)


def expect_length(n: int, name: str) -> None:
    """Refuse a text of more than MAX_TEXT characters. Raises BadRequestError."""
    if n > MAX_TEXT:
        raise BadRequestError(f"{name}: it has {n} characters; {MAX_TEXT} are allowed", name, "invalid_value")


def longest_piece(model: Model) -> int:
    """Bytes of the longest token."""
    if model not in _longest:
        tokenizer = model.tokenizer
        _longest[model] = max(1, *(len(tokenizer.piece_bytes(token)) for token in range(tokenizer.n_vocab)))
    return _longest[model]
