"""WordPiece, BERT's scheme: the longest tokens that make up each word.

GGUF files write a token that begins a word with U+2581 before it, and one that continues a word without "##".
"""

import unicodedata
from functools import cached_property

import regex

from llamacli.tokenizer.vocabulary import SPACE, Vocabulary, VocabularyScheme

# Ideographs, each of which is a word, as in llama.cpp and Hugging Face's tokenizers.
_CHINESE = (
    range(0x4E00, 0xA000), range(0x3400, 0x4DC0), range(0x20000, 0x2A6E0), range(0x2A700, 0x2B820),
    range(0x2B920, 0x2CEB0), range(0xF900, 0xFB00), range(0x2F800, 0x2FA20),
)  # fmt: skip
_CATEGORY = regex.compile(
    r"(?P<removed>[\p{Cc}\p{Cf}\p{Co}\p{Cs}])|(?P<mark>\p{M})|(?P<punctuation>\p{P})|(?P<symbol>\p{S})"
)
"""General categories by the Unicode tables of `regex`, as for pre-tokenizers: Python's differ by its version."""


class BertNormalizer(dict[int, str]):
    """Table for `str.translate`: replacements of characters before words are split at spaces.

    White space becomes a space, control characters vanish, punctuation and ideographs stand apart. With `strip_accents`
    a character becomes the first of its canonical decomposition (NFD), and marks vanish. Entries are made when needed.
    """

    def __init__(self, lowercase: bool, strip_accents: bool):
        super().__init__()
        self._lowercase, self._strip_accents = lowercase, strip_accents

    def __missing__(self, code: int) -> str:
        self[code] = replacement = self._replacement(chr(code))
        return replacement

    def _replacement(self, char: str) -> str:
        if self._strip_accents:
            char = unicodedata.normalize("NFD", char)[0]
        code, found = ord(char), _CATEGORY.match(char)
        kind = found.lastgroup if found else None
        if char.isspace() and not 0x1C <= code < 0x20:
            return " "
        if kind == "removed" or char == "\ufffd" or (self._strip_accents and kind == "mark"):
            return ""
        written = char.lower()[0] if self._lowercase else char
        apart = kind == "punctuation" or (code < 0x7F and kind == "symbol") or any(code in block for block in _CHINESE)
        return f" {written} " if apart else written


class WordPiece(VocabularyScheme):
    """WordPiece with a vocabulary in GGUF's form.

    A word that tokens cannot make up becomes the unknown token. `add_space_prefix`: decoding removes the first space.
    """

    def __init__(self, vocabulary: Vocabulary, normalizer: BertNormalizer, add_space_prefix: bool):
        super().__init__(vocabulary)
        self._normalizer, self.add_space_prefix = normalizer, add_space_prefix

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text without special tokens."""
        words = text.translate(self._normalizer).split()
        ids = {word: self._word_ids(SPACE + word) for word in dict.fromkeys(words)}
        return [token for word in words for token in ids[word]]

    def _word_ids(self, word: str) -> list[int]:
        ids, start = [], 0
        while start < len(word):
            for stop in range(min(len(word), start + self._longest), start, -1):
                if (token := self._vocabulary.ids.get(word[start:stop])) is not None:
                    ids.append(token)
                    start = stop
                    break
            else:
                return [self._unknown(word[1:])]
        return ids

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._vocabulary.tokens), default=0)
