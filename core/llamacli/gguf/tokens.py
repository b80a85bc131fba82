"""Tokens in metadata: their types, and bytes as characters."""

from enum import IntEnum

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(0x100)) - set(_PRINTABLE))
BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
"""Bytes by the characters that stand for them in byte-level BPE (GPT-2).

Those of Latin-1 that are printable stand for themselves, characters from U+0100 on for the others."""


class TokenKind(IntEnum):
    """Values of tokenizer.ggml.token_type; any other value counts as UNDEFINED."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
