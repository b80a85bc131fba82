"""Tokenizers from GGUF metadata, equal to llama.cpp's token for token."""

from llamacli.gguf.tokens import TokenKind
from llamacli.tokenizer.loading import tokenizer_from_metadata
from llamacli.tokenizer.tokenizer import StreamDecoder, Tokenizer

__all__ = ["StreamDecoder", "TokenKind", "Tokenizer", "tokenizer_from_metadata"]
