"""Tokenizers made from GGUF metadata: text to token ids and back, token for token as llama.cpp does it."""

from llamacli.tokenizer.loading import tokenizer_from_metadata
from llamacli.tokenizer.tokenizer import StreamDecoder, Tokenizer
from llamacli.tokenizer.vocabulary import TokenKind

__all__ = ["StreamDecoder", "TokenKind", "Tokenizer", "tokenizer_from_metadata"]
