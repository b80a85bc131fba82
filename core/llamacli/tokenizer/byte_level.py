"""Byte-level BPE, GPT-2's scheme: words of a pre-tokenizer, merged as bytes."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from llamacli.gguf.tokens import BYTE_OF_CHAR
from llamacli.tokenizer import kernels
from llamacli.tokenizer.merging import Merger, merger_by_rank
from llamacli.tokenizer.pretokenizers import PreTokenizer
from llamacli.tokenizer.vocabulary import Vocabulary, VocabularyScheme


class ByteLevelBPE(VocabularyScheme):
    """Byte-level BPE with a list of ranked merges.

    `merges`: "left right" each, best first; parsed at the first encode.
    """

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer):
        super().__init__(vocabulary)
        self._merges, self._pre_tokenizer = merges, pre_tokenizer

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text without special tokens.

        Bytes that the vocabulary lacks are dropped. TokenizerError for merges that do not fit the vocabulary.
        """
        return self._merger.encode(text, self._pre_tokenizer.lengths(text))

    def decode(self, text: str) -> bytes:
        """Return a token's bytes; characters beyond GPT-2's table become UTF-8."""
        try:
            return bytes(map(BYTE_OF_CHAR.__getitem__, text))
        except KeyError:
            return b"".join(bytes([BYTE_OF_CHAR[c]]) if c in BYTE_OF_CHAR else c.encode() for c in text)

    @cached_property
    def _merger(self) -> Merger:
        table = np.full(ord(max(BYTE_OF_CHAR)) + 1, -1, np.int16)
        table[[ord(char) for char in BYTE_OF_CHAR]] = list(BYTE_OF_CHAR.values())
        unmerged = kernels.EVERY_WORD if self._pre_tokenizer.ignore_merges else kernels.NO_WORD
        dropped = [-1] * 256  # a byte that is not a token
        return merger_by_rank(self._vocabulary.tokens, self._merges, dropped, unmerged, table)
