"""Tokenizers from GGUF metadata, equal to llama.cpp's token for token."""

from llamacli.tokenizer.loading import tokenizer_from_metadata
from llamacli.tokenizer.tokenizer import StreamDecoder, Tokenizer
from llamacli.tokenizer.vocabulary import TokenKind

__all__ = ["StreamDecoder", "TokenKind", "Tokenizer", "tokenizer_from_metadata"]
