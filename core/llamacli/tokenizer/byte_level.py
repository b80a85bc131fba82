"""Byte-level BPE, GPT-2's scheme, through the `tokenizers` library."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llamacli.errors import TokenizerError
from llamacli.tokenizer.pretokenizers import PreTokenizer
from llamacli.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers

# GPT-2 writes each byte as one printable character: Latin-1's own where it is printable, else one from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(0x100)) - set(_PRINTABLE))
BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


class ByteLevelBPE:
    """Byte-level BPE by a list of merges, "left right" each, best first; they are read at the first encode."""

    add_space_prefix = False

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer):
        self._vocabulary, self._merges, self._pre_tokenizer = vocabulary, merges, pre_tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a run of text that holds no special tokens; bytes that are no token are dropped."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return [token for token in ids if token < len(self._vocabulary.tokens)] if self._lacking else ids

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text stands for; a character that stands for no byte is itself."""
        return b"".join(bytes([BYTE_OF_CHAR[c]]) if c in BYTE_OF_CHAR else c.encode() for c in text)

    @cached_property
    def _lacking(self) -> list[str]:
        return sorted(BYTE_OF_CHAR.keys() - self._vocabulary.ids.keys())

    @cached_property
    def _encoder(self) -> "tokenizers.Tokenizer":
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        ids = self._vocabulary.ids
        # The library would join the neighbours of a character that is no token; an id beyond the others prevents that.
        beyond = {char: len(self._vocabulary.tokens) + i for i, char in enumerate(self._lacking)}
        merges: list[Any] = list(map(tuple, map(str.split, dict.fromkeys(self._merges))))  # the first of equals counts
        try:
            model = models.BPE(ids | beyond, merges, ignore_merges=self._pre_tokenizer.ignore_merges)
        except Exception as error:  # the library raises no narrower type
            raise TokenizerError(f"the merges do not fit the vocabulary: {error}") from error
        encoder = Tokenizer(model)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self._pre_tokenizer.splits]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        return encoder
