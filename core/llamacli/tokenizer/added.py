"""Tokenizers and pre-tokenizers that plugins register."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from llamacli.gguf import Metadata
from llamacli.tokenizer.loading import TokenizerParts
from llamacli.tokenizer.pretokenizers import PreTokenizer


@attrs.frozen
class NamedPreTokenizer:
    """Pre-tokenizer of byte-level BPE, with its name in `tokenizer.ggml.pre`."""

    name: str
    scheme: PreTokenizer


@attrs.frozen
class TokenizerModel:
    """Tokenizer with its name in `tokenizer.ggml.model`.

    `make(metadata)` returns the vocabulary, the scheme that encodes and decodes with it, and which special tokens are
    added to texts. It raises ModelFormatError for keys that are missing or wrong.
    """

    name: str
    make: Callable[[Metadata], TokenizerParts]
