"""Map of characters as SentencePiece stores it, for tiny vocabularies."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping

import numpy as np


def character_map(replacements: Mapping[str, str]) -> bytes:
    """Precompiled map of characters, as SentencePiece stores it.

    A Darts double array of the keys, none of them empty or with NUL, then the replacements, each ending in a zero.
    """
    texts = bytearray()
    children: list[dict[int, int]] = [{}]  # trie of the keys: a node's children by byte; byte 0 leads to an offset
    for key, text in sorted(replacements.items()):
        node = 0
        for byte in key.encode():
            node = children[node].setdefault(byte, len(children))
            if node == len(children):
                children.append({})
        children[node][0] = len(texts)
        texts += text.encode() + b"\0"
    units, free = [0] * 256, 1
    taken = {0}
    places = {0: 0}
    bases = set[int]()  # two nodes of one base would share their children
    for node, bytes_of in enumerate(children):  # parents come before their children
        place = places[node]
        while free in taken:
            free += 1
        base = next(
            base
            for base in itertools.count(free ^ min(bytes_of, default=0))
            if base not in bases and _fits(base, place, bytes_of, taken)
        )
        bases.add(base)
        units += [0] * (max(base | 0xFF, place) + 1 - len(units))
        units[place] |= (base ^ place) << 10 | (0 in bytes_of) << 8
        for byte, child in bytes_of.items():
            taken.add(base ^ byte)
            units[base ^ byte] = child | 1 << 31 if byte == 0 else byte
            if byte:
                places[child] = base ^ byte
    index = np.array(units, "<u4").tobytes()
    return len(index).to_bytes(4, "little") + index + bytes(texts)


def _fits(base: int, place: int, bytes_of: Iterable[int], taken: Container[int]) -> bool:
    return (base ^ place) < 1 << 21 and not any(base ^ byte in taken for byte in bytes_of)
