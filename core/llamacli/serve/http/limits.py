"""Refusal of texts that cannot fit into a context."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from llamacli.model import Model
from llamacli.serve.errors import PromptTooLongError
from llamacli.serve.requests import ModelInfo

_longest: weakref.WeakKeyDictionary[Model, int] = weakref.WeakKeyDictionary()


def expect_room(texts: Iterable[str], model: Model, info: ModelInfo) -> None:
    """Refuse a prompt with more bytes than the context's tokens can have.

    Tokenizing many megabytes takes seconds of a thread. Raises PromptTooLongError, with the fewest tokens that the
    texts may have.
    """
    n_ctx = info.n_ctx or model.config.n_ctx
    n_tokens = sum(len(text.encode("utf-8", "replace")) for text in texts) // longest_piece(model)
    if n_tokens >= n_ctx:
        raise PromptTooLongError(n_tokens, n_ctx)


def longest_piece(model: Model) -> int:
    """Bytes of the longest token."""
    if model not in _longest:
        tokenizer = model.tokenizer
        _longest[model] = max(1, *(len(tokenizer.piece_bytes(token)) for token in range(tokenizer.n_vocab)))
    return _longest[model]
