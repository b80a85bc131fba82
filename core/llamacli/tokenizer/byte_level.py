"""Byte-level BPE, GPT-2's scheme, through the `tokenizers` library."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llamacli.errors import TokenizerError
from llamacli.tokenizer.pretokenizers import PreTokenizer
from llamacli.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers

# GPT-2 encodes each byte as a printable character: Latin-1's own if printable, else one from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(0x100)) - set(_PRINTABLE))
BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


class ByteLevelBPE:
    """Byte-level BPE with a list of ranked merges.

    `merges`: "left right" each, best first; parsed at the first encode.
    """

    add_space_prefix = False

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer):
        self._vocabulary, self._merges, self._pre_tokenizer = vocabulary, merges, pre_tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of text without special tokens.

        Bytes that the vocabulary lacks are dropped.
        """
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return [token for token in ids if token < len(self._vocabulary.tokens)] if self._missing else ids

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text encodes.

        A character outside of GPT-2's byte table is encoded as UTF-8.
        """
        return b"".join(bytes([BYTE_OF_CHAR[c]]) if c in BYTE_OF_CHAR else c.encode() for c in text)

    @cached_property
    def _missing(self) -> list[str]:
        return sorted(BYTE_OF_CHAR.keys() - self._vocabulary.ids.keys())

    @cached_property
    def _encoder(self) -> "tokenizers.Tokenizer":
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        ids = self._vocabulary.ids
        # The library drops a character without an id and joins its neighbours; ids beyond the vocabulary prevent that.
        beyond = {char: len(self._vocabulary.tokens) + i for i, char in enumerate(self._missing)}
        merges: list[Any] = list(map(tuple, map(str.split, dict.fromkeys(self._merges))))  # without duplicates
        try:
            model = models.BPE(ids | beyond, merges, ignore_merges=self._pre_tokenizer.ignore_merges)
        except Exception as error:  # the library raises no narrower type
            raise TokenizerError(f"the merges do not fit the vocabulary: {error}") from error
        encoder = Tokenizer(model)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self._pre_tokenizer.splits]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        return encoder
