"""Byte pair encoding (BPE) by merges or by scores of tokens, compiled.

Text is cut where no merge can join its neighbours, and each part is merged with a heap of pairs: O(n log n) for a part
of n characters, as long as the lengths of mergeable pairs are bounded.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import TokenizerError
from llamacli.gguf import StringArray
from llamacli.tokenizer import kernels
from llamacli.tokenizer.vocabulary import MERGES, SPACE, TOKENS, Vocabulary, VocabularyScheme
from llamacli.util.memory import anonymous

_NEWLINE_RUNS = re.compile(r"\n+|[^\n]+")
_WORDS = re.compile(r"(?:\S|[\x1c-\x1f])+")  # llama.cpp does not count U+001C to U+001F as white space

_Int64s = npt.NDArray[np.int64]
Table = tuple[npt.NDArray[np.uint8], _Int64s, _Int64s, npt.NDArray[np.int32], _Int64s]
"""Hash table of strings, as the kernels take it."""


def string_table(strings: Sequence[str]) -> Table:
    """Return a table whose slots are not filled yet."""
    if isinstance(strings, StringArray):
        data, starts, stops = strings.spans()
    else:
        encoded = [text.encode(errors="surrogatepass") for text in strings]
        data, stops = b"".join(encoded), np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        starts, stops = stops[:-1].copy(), stops[1:].copy()
    n_slots = 1 << (3 * len(strings) // 2).bit_length()  # of which a third to two thirds are filled
    slots = anonymous(16 * n_slots).view(np.int64).reshape(-1, 2)
    return np.frombuffer(data, np.uint8).copy(), starts, stops, np.zeros(len(strings), np.int32), slots


@attrs.frozen(eq=False)
class Merger:
    """Arguments of `kernels.encode_words` that a vocabulary fixes."""

    by_byte: bool
    unmerged: int
    merges: Table
    costs: npt.NDArray[np.float64]
    paired: bool
    tokens: Table
    joints: npt.NDArray[np.uint8]
    byte_ids: npt.NDArray[np.int32]

    def encode(self, text: str, lengths: npt.ArrayLike) -> list[int]:
        """Return the ids of the words of text.

        `lengths`: of the words, in characters. TokenizerError for a byte that the vocabulary cannot express.
        """
        data = np.frombuffer(bytearray(text, "utf-8"), np.uint8)
        ids = np.empty(len(data), np.int32)
        words = np.asarray(lengths, np.int64)
        fixed: tuple[Any, ...] = attrs.astuple(self, recurse=False)
        count = kernels.encode_words(data, words, *fixed, ids)
        if count < 0:
            byte = data[-1 - count]
            raise TokenizerError(f"{TOKENS} has neither the byte token <0x{byte:02X}> nor an unknown token")
        return ids[:count].tolist()


def merger_by_scores(tokens: Sequence[str], scores: npt.NDArray[np.float32], byte_ids: Sequence[int]) -> Merger:
    """Return a merger of any two pieces whose union is a token.

    The token with the highest score comes first. `scores`: [n_vocab]. `byte_ids`: [256], -2 for a byte that cannot be
    expressed.
    """
    table = string_table(tokens)
    kernels.fill_slots(table, True)
    costs = -scores.astype(np.float64)
    return Merger(False, kernels.NO_WORD, table, costs, False, table, _joints(table), np.array(byte_ids, np.int32))


def merger_by_rank(
    tokens: Sequence[str],
    merges: Sequence[str],
    byte_ids: Sequence[int],
    unmerged: int,
    byte_of_char: npt.NDArray[np.int16] | None = None,
) -> Merger:
    """Return a merger by "left right" merges of raw UTF-8, best first.

    `unmerged`: one of the kernels' constants. `byte_ids` as in `merger_by_scores`.
    With `byte_of_char`, the byte of each of GPT-2's printable characters, or -1, it merges bytes, and raises
    TokenizerError when a merge is not of two parts that make a token.
    """
    table, ranked = string_table(tokens), string_table(merges)
    malformed = kernels.join_merges(*ranked[:4])
    if byte_of_char is not None:
        kernels.decode_bytes(*table[:4], byte_of_char)
        kernels.decode_bytes(*ranked[:4], byte_of_char)
    kernels.fill_slots(table, True)
    if byte_of_char is not None:
        if malformed < 0:
            malformed = kernels.foreign_merge(ranked, table)
        if malformed >= 0:
            found = f"entry {malformed} of {len(merges)}, {merges[malformed]!r}"
            raise TokenizerError(f"{MERGES}: {found}, is not two parts that make a token")
    kernels.fill_slots(ranked, False)
    costs, by_byte = np.arange(len(merges), dtype=np.float64), byte_of_char is not None
    joints = np.empty(0, np.uint8) if by_byte else _joints(ranked)
    return Merger(by_byte, unmerged, ranked, costs, True, table, joints, np.array(byte_ids, np.int32))


def _joints(table: Table) -> npt.NDArray[np.uint8]:
    joints = np.zeros(kernels.N_JOINTS, np.uint8)
    kernels.mark_joints(table, joints)
    return joints


class ScoreMerging(VocabularyScheme):
    """SentencePiece's BPE: the merge with the highest token score comes first.

    A character that is not a token becomes its bytes, <0xXX> each.
    `scores`: float32 [n_vocab]. `add_space_prefix`: put a space before a run of text.
    """

    def __init__(self, vocabulary: Vocabulary, scores: npt.NDArray[np.float32], add_space_prefix: bool):
        super().__init__(vocabulary)
        self._scores, self.add_space_prefix = scores, add_space_prefix

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text without special tokens."""
        text = text if continues or not self.add_space_prefix else " " + text
        return self._merger.encode(text.replace(" ", SPACE), [len(text)])

    @cached_property
    def _merger(self) -> Merger:
        byte_ids = self._byte_ids(self._vocabulary.special.get("unknown", -2))
        return merger_by_scores(self._vocabulary.tokens, self._scores, byte_ids)


class RankMerging(VocabularyScheme):
    """BPE with ranked merges, on lines of the text.

    A character that is not a token becomes its bytes, <0xXX> each. `merges`: "left right" each, best first; parsed at
    the first encode. `whole_newlines`: a run of newlines that is a token of its own is not merged.
    """

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], whole_newlines: bool = True):
        super().__init__(vocabulary)
        self._merges, self._whole_newlines = merges, whole_newlines

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text without special tokens."""
        lengths = list(map(len, _NEWLINE_RUNS.findall(text)))
        return self._merger.encode(text.replace(" ", SPACE), lengths)

    @cached_property
    def _merger(self) -> Merger:
        unmerged = kernels.NEWLINES if self._whole_newlines else kernels.NO_WORD
        byte_ids = self._byte_ids(self._vocabulary.special.get("unknown", -2))
        return merger_by_rank(self._vocabulary.tokens, self._merges, byte_ids, unmerged)


class WhitespaceMerging(VocabularyScheme):
    """BPE with ranked merges of words between white space, which is dropped.

    A character that is not a token becomes its bytes, <0xXX> each; those that are not tokens are dropped too.
    """

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], lowercase: bool):
        super().__init__(vocabulary)
        self._merges, self._lowercase = merges, lowercase

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text without special tokens."""
        words = _WORDS.findall("".join(char.lower()[0] for char in text) if self._lowercase else text)
        return self._merger.encode("".join(words), list(map(len, words)))

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text encodes."""
        return text.encode()

    @cached_property
    def _merger(self) -> Merger:
        return merger_by_rank(self._vocabulary.tokens, self._merges, self._byte_ids(-1), kernels.NO_WORD)
