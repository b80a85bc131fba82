"""Tokens with the best sum of scores, else bytes (PLaMo 2).

Each token's score is rounded to 1e-4. A character that no token begins with is spelled in bytes and costs 1,000. Of
equal sums, the longest token first.
"""

from collections import defaultdict
from functools import cached_property

import numpy as np
import numpy.typing as npt

from llamacli.errors import TokenizerError
from llamacli.gguf.tokens import TokenKind
from llamacli.tokenizer.vocabulary import TOKENS, Vocabulary, VocabularyScheme

_UNIT = 1e4
_UNKNOWN = 10_000_000
"""Cost of a character in bytes, in units of rounded scores."""

_INVALID = -20_000_000
"""Rounded score of a token that is never taken."""


class BestScores(VocabularyScheme):
    """Vocabulary whose tokens have scores.

    `types` as in the file, `scores`: float32, both [n_vocab].
    """

    def __init__(self, vocabulary: Vocabulary, types: npt.NDArray[np.integer], scores: npt.NDArray[np.float32]):
        super().__init__(vocabulary)
        self._types, self._scores = types, scores
        bytes_ = self._byte_ids(-1)
        if -1 in bytes_:
            raise TokenizerError(f"{TOKENS} has no token <0x{bytes_.index(-1):02X}>")
        self._bytes = bytes_

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text, without a byte order mark."""
        text = text.removeprefix("\ufeff")
        n = len(text)
        costs, tokens, lengths = [0] * (n + 1), [-1] * n, [1] * n
        for i in range(n - 1, -1, -1):
            best = costs[i + 1] + _UNKNOWN
            for length in self._lengths.get(text[i], ()):
                known = self._tokens.get(text[i : i + length]) if i + length <= n else None
                if known and costs[i + length] - known[1] < best + (tokens[i] < 0):
                    best = costs[i + length] - known[1]
                    tokens[i], lengths[i] = known[0], length
            costs[i] = best
        return self._ids(text, tokens, lengths)

    def _ids(self, text: str, tokens: list[int], lengths: list[int]) -> list[int]:
        ids, at = list[int](), 0
        while at < len(text):
            ids += [tokens[at]] if tokens[at] >= 0 else (self._bytes[byte] for byte in text[at].encode())
            at += lengths[at]
        return ids

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text encodes."""
        return text.encode()

    @cached_property
    def _tokens(self) -> dict[str, tuple[int, int]]:
        """Tokens and rounded scores by text, the last of equal texts."""
        found = {}
        for token, text in enumerate(self._vocabulary.tokens):
            if self._types[token] != TokenKind.BYTE and text:
                score = float(self._scores[token]) * _UNIT
                rounded = int(np.copysign(np.floor(abs(score) + 0.5), score)) if np.isfinite(score) else _INVALID
                found[text] = (token, rounded)
        return {text: known for text, known in found.items() if known[1] > _INVALID}

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """Lengths of tokens by their first character, longest first."""
        found: dict[str, set[int]] = defaultdict(set)
        for text in self._tokens:
            found[text[0]].add(len(text))
        return {first: sorted(lengths, reverse=True) for first, lengths in found.items()}
