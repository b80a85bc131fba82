r"""Greedy longest match over bytes (RWKV's world tokenizer).

Tokens are byte strings, stored with Python's escapes (`\n`, `\x80`). Text is cut from the left into the longest
tokens that fit.
"""

import re
from collections import defaultdict
from functools import cached_property

from llamacli.tokenizer.vocabulary import VocabularyScheme

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_CHARACTERS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def unescape(text: str) -> bytes:
    """Return the bytes of a token's text; unknown escapes stand for themselves."""

    def byte(found: re.Match[bytes]) -> bytes:
        return bytes.fromhex(found[1].decode()) if found[1] else _CHARACTERS.get(found[2], found[2])

    return _ESCAPE.sub(byte, text.encode())


class LongestMatch(VocabularyScheme):
    """Greedy longest match with a vocabulary of escaped byte strings.

    Control tokens are matched too, as in llama.cpp. Of tokens of the same bytes, the last one counts.
    """

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Return the ids of text; TokenizerError for a byte without any token."""
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            for length in self._lengths.get(data[at : at + 2], (1,)):
                if (token := self._ids.get(data[at : at + length])) is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                ids.append(self._unknown(text))
                at += 1
        return ids

    def decode(self, text: str) -> bytes:
        """Return the bytes that a token's text encodes."""
        return unescape(text)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {data: token for token, text in enumerate(self._vocabulary.tokens) if (data := unescape(text))}

    @cached_property
    def _lengths(self) -> dict[bytes, list[int]]:
        """Lengths of tokens by their first two bytes, longest first, and 1."""
        found: dict[bytes, set[int]] = defaultdict(lambda: {1})
        for data in self._ids:
            found[data[:2]].add(len(data))
        return {start: sorted(lengths, reverse=True) for start, lengths in found.items()}
