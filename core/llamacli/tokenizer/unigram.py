"""Unigram, SentencePiece's other scheme: the tokens with the best sum of scores.

Text is first normalised by the map of characters that a SentencePiece model was trained with.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError, TokenizerError
from llamacli.gguf import Metadata
from llamacli.gguf.tokens import TokenKind
from llamacli.tokenizer import kernels
from llamacli.tokenizer.merging import string_table
from llamacli.tokenizer.vocabulary import SPACE, Vocabulary, VocabularyScheme

CHARACTER_MAP = "tokenizer.ggml.precompiled_charsmap"
_INVALID = "\ufffd"
_UNKNOWN_PENALTY = np.float32(10)

Trie = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Trie of bytes, as the kernels take it."""


@attrs.frozen(eq=False)
class CharacterMap:
    """Precompiled map of characters of SentencePiece's normalizer.

    `nodes`: uint32, double array of prefixes. `replacements`: uint8, texts that end in a zero, and U+FFFD at the end.
    """

    nodes: npt.NDArray[np.uint32]
    replacements: npt.NDArray[np.uint8]

    @classmethod
    def from_bytes(cls, metadata: Metadata) -> CharacterMap:
        """Read the map of a file; empty if the file has none.

        ModelFormatError when it is not an array of bytes, or shorter than it says.
        """
        invalid = np.frombuffer(_INVALID.encode(), np.uint8)
        if CHARACTER_MAP not in metadata:
            return cls(np.empty(0, np.uint32), invalid.copy())
        data = np.asarray(metadata[CHARACTER_MAP])
        if data.ndim != 1 or data.dtype not in (np.int8, np.uint8):
            raise ModelFormatError(f"{metadata.source}: metadata key {CHARACTER_MAP!r} is not an array of bytes")
        data = data.view(np.uint8)
        size = int.from_bytes(data[:4].tobytes(), "little")
        if size + 4 >= len(data):
            raise ModelFormatError(
                f"{metadata.source}: metadata key {CHARACTER_MAP!r} has {len(data)} bytes, its index alone {size + 4}"
            )
        nodes = np.frombuffer(data[4 : 4 + size // 4 * 4].tobytes(), "<u4").astype(np.uint32)
        return cls(nodes, np.concatenate([data[4 + size :], invalid]))


class Unigram(VocabularyScheme):
    """Unigram vocabulary.

    `types`: token types as in the file. `scores`: float32, both [n_vocab]. `merge_spaces`: runs of spaces become one,
    and one stands before the text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        types: npt.NDArray[np.integer],
        scores: npt.NDArray[np.float32],
        characters: CharacterMap,
        add_space_prefix: bool,
        merge_spaces: bool,
    ):
        super().__init__(vocabulary)
        self._types, self._characters = types, characters
        self.add_space_prefix, self._merge_spaces = add_space_prefix, merge_spaces
        normal = scores[types == TokenKind.NORMAL]
        least = normal.min() if len(normal) else np.finfo(np.float32).max
        self._unknown_score = float(least - _UNKNOWN_PENALTY)
        self._scores = np.where(types == TokenKind.USER_DEFINED, 0.0, scores.astype(np.float64))

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text without special tokens.

        TokenizerError when a character is not in the vocabulary and there is no unknown token, or when the map of
        characters is damaged.
        """
        data = self._normalize(text, self.add_space_prefix and not continues)
        if not len(data):
            return []
        unknown = self._vocabulary.special.get("unknown", -1)
        ids, places = np.empty(len(data), np.int32), np.empty((2, len(data) + 1), np.int32)
        count = kernels.encode_unigram(
            data, self._tokens, self._scores, self._unknown_score, unknown, np.empty(len(data) + 1), *places, ids
        )
        found: list[int] = ids[len(data) - count :].tolist()
        if unknown < 0 and -1 in found:
            self._unknown(text)
        return found

    def _normalize(self, text: str, prepend: bool) -> npt.NDArray[np.uint8]:
        data = np.frombuffer(bytearray(text, "utf-8"), np.uint8)
        space = np.frombuffer(bytearray(SPACE, "utf-8"), np.uint8)
        size = 3 * len(data) + 16
        while True:
            result = np.empty(size, np.uint8)
            nodes, replacements = self._characters.nodes, self._characters.replacements
            n = kernels.normalize(data, self._kept, nodes, replacements, space, prepend, self._merge_spaces, result)
            if n >= 0:
                return result[:n]
            if n == -1:
                raise TokenizerError(f"the map of characters under {CHARACTER_MAP} is damaged")
            size *= 4

    @cached_property
    def _tokens(self) -> Trie:
        return self._trie(TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED)

    @cached_property
    def _kept(self) -> Trie:
        """Trie of the user-defined tokens, prefixes of which are not normalised."""
        return self._trie(TokenKind.USER_DEFINED)

    def _trie(self, *kinds: TokenKind) -> Trie:
        included = np.isin(self._types, kinds)
        data, starts, stops, _, _ = string_table(self._vocabulary.tokens)
        n_bytes = int((stops - starts)[included].sum())
        slots = 1 << (2 * n_bytes + 1).bit_length()
        trie = np.empty(slots, np.int64), np.empty(slots, np.int32), np.empty(n_bytes + 1, np.int32)
        kernels.fill_trie(data, starts, stops, included, *trie)
        return trie
