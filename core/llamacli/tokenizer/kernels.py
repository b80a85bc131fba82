"""Compiled loops of the tokenizers: hash tables of strings and BPE merging.

Texts are UTF-8 in arrays of bytes. Without Numba's compiler the same code runs as plain Python: no integer exceeds 63
bits, and no byte is used in arithmetic before it is widened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.kernels.deferred import register_jitable
from llamacli.kernels.jit import ArrayFunction

TABLE = "Tuple((uint8[::1], int64[::1], int64[::1], int32[::1], int64[:, ::1]))"
"""Signature of a hash table of strings: bytes, starts, stops, middles, slots.

String i is bytes[starts[i]:stops[i]]; middles[i] is the length of a merge's left part, 0 for a token, and negative for
a string that is not in the table. A slot holds a key and the number of a string, or -1. The key of a short string is
the string itself, that of a longer one a hash.
"""

HEAP = "Tuple((float64[::1], int32[::1], int32[::1], int32[::1]))"
"""Signature of a heap of merges."""

TRIE = "Tuple((int64[::1], int32[::1], int32[::1]))"
"""Signature of a trie: keys, children, values."""

N_JOINTS = 1 << 20
"""Length of an array of joints."""

EVERY_WORD, NEWLINES, NO_WORD = 2, 1, 0
"""Words that are not merged if they are tokens."""

_FOREIGN = -2
_MALFORMED = -1
_SHORT = 6
_LONG = 1 << 60
_SPACE, _NEWLINE = 0x20, 0x0A


def _compiled(signature: str) -> Callable[[Callable[..., Any]], ArrayFunction]:
    def decorate(function: Callable[..., Any]) -> ArrayFunction:
        made = ArrayFunction(function, signature)
        made.name = f"tokenizer_{made.name}"
        return made

    return decorate


@register_jitable
def _hash(text: Any, start: Any, stop: Any, seed: Any) -> Any:
    code = np.int64(seed) + 0x811C9DC5
    for i in range(start, stop):
        code = ((code ^ np.int64(text[i])) * 0x01000193) & 0x3FFFFFFFFF
    return code ^ (code >> 17)


@register_jitable
def _equal(text: Any, start: Any, stop: Any, data: Any, first: Any) -> Any:
    i = start
    while i < stop and text[i] == data[first + i - start]:
        i += 1
    return i == stop


@register_jitable
def _key(text: Any, start: Any, stop: Any, middle: Any) -> Any:
    if stop - start > _SHORT:
        return _LONG | _hash(text, start, stop, middle)
    key = np.int64(middle) << 3 | np.int64(stop - start)
    for i in range(start, stop):
        key = key << 8 | np.int64(text[i])
    return key


@register_jitable
def _lookup(table: Any, text: Any, start: Any, stop: Any, middle: Any) -> Any:
    """Number of the string text[start:stop], or -1 - its slot if absent."""
    data, starts, stops, middles, slots = table
    size, key = stop - start, _key(text, start, stop, middle)
    mixed = (key & 0x7FFFFFFF) * 0x9E3779B1 ^ (key >> 31) * 0x85EBCA6B
    slot = (mixed ^ mixed >> 24) & (len(slots) - 1)
    while slots[slot, 1] >= 0:
        if slots[slot, 0] == key:
            found = slots[slot, 1]
            first = starts[found]
            if size <= _SHORT or (
                stops[found] - first == size and middles[found] == middle and _equal(text, start, stop, data, first)
            ):
                return np.int64(found)
        slot = (slot + 1) & (len(slots) - 1)
    return np.int64(-1 - slot)


@_compiled(f"void({TABLE}, boolean)")
def fill_slots(table: Any, last: Any) -> None:
    """Fill the table; of equal strings the first counts, or the last."""
    data, starts, stops, middles, slots = table
    slots[:] = -1
    for i in range(len(starts)):
        number = len(starts) - 1 - i if last else i
        if middles[number] >= 0:
            start, stop, middle = starts[number], stops[number], np.int64(middles[number])
            place = _lookup(table, data, start, stop, middle)
            if place < 0:
                slots[-1 - place, 0], slots[-1 - place, 1] = _key(data, start, stop, middle), number


@_compiled("int64(uint8[::1], int64[::1], int64[::1], int32[::1])")
def join_merges(data: Any, starts: Any, stops: Any, middles: Any) -> Any:
    """Remove the space between the parts of each merge.

    Sets the middles. Returns the number of the first merge that has not exactly two parts, or -1.
    """
    malformed = -1
    for i in range(len(starts)):
        space, n_spaces = 0, 0
        for j in range(starts[i] + 1, stops[i]):
            if data[j] == _SPACE:
                n_spaces += 1
                if n_spaces == 1:
                    space = j
        if n_spaces != 1 or space + 1 == stops[i] or data[starts[i]] == _SPACE:
            malformed = i if malformed < 0 else malformed
        if n_spaces == 0:
            middles[i] = _MALFORMED
            continue
        middles[i] = space - starts[i]
        for j in range(space, stops[i] - 1):
            data[j] = data[j + 1]
        stops[i] -= 1
    return malformed


@_compiled("void(uint8[::1], int64[::1], int64[::1], int32[::1], int16[::1])")
def decode_bytes(data: Any, starts: Any, stops: Any, middles: Any, byte_of_char: Any) -> None:
    """Decode GPT-2's printable characters to bytes, in place.

    `byte_of_char` has the byte of each character, or -1. Strings of other characters get a negative middle.
    """
    for i in range(len(starts)):
        middle = starts[i] + middles[i]
        position = written = starts[i]
        while position < stops[i] and middles[i] >= 0:
            if position == middle:
                middles[i] = written - starts[i]
            char = np.int64(data[position])
            position += 1
            if char >= 0xE0:
                char = np.int64(len(byte_of_char))
            elif char >= 0xC0 and position < stops[i]:
                char = ((char & 0x1F) << 6) | (np.int64(data[position]) & 0x3F)
                position += 1
            if char >= len(byte_of_char) or byte_of_char[char] < 0:
                middles[i] = _FOREIGN
            else:
                data[written] = byte_of_char[char]
                written += 1
        stops[i] = written


@_compiled(f"int64({TABLE}, {TABLE})")
def foreign_merge(merges: Any, tokens: Any) -> Any:
    """First merge whose result is not a token, or -1."""
    data, starts, stops, middles, _ = merges
    for i in range(len(starts)):
        if middles[i] >= 0 and _lookup(tokens, data, starts[i], stops[i], 0) < 0:
            return i
    return -1


@register_jitable
def _joint(text: Any, position: Any, stop: Any) -> Any:
    size = 1 if text[position] < 0xC0 else 2 if text[position] < 0xE0 else 3
    code = np.int64(text[position - 1])
    for i in range(position, min(position + size, stop)):
        code = (code * 0x5BD1E995 + np.int64(text[i]) + 1) & 0x3FFFFFFF
    return np.int64((code ^ (code >> 11)) & (N_JOINTS - 1))


@_compiled(f"void({TABLE}, uint8[::1])")
def mark_joints(table: Any, joints: Any) -> None:
    """Mark the pairs of characters that a merge can join.

    Those at the middle of merges; of tokens, all neighbours. Between others text can be cut before it is merged.
    """
    data, starts, stops, middles, _ = table
    for i in range(len(starts)):
        if middles[i] > 0:
            joints[_joint(data, starts[i] + middles[i], stops[i])] = 1
        elif middles[i] == 0:
            for position in range(starts[i] + 1, stops[i]):
                if data[position] & 0xC0 != 0x80:
                    joints[_joint(data, position, stops[i])] = 1


@register_jitable
def _push(heap: Any, n: Any, cost: Any, left: Any, middle: Any, stop: Any) -> None:
    costs, lefts, middles, stops = heap
    i = n
    while i > 0:
        parent = (i - 1) >> 1
        if costs[parent] < cost or (costs[parent] == cost and lefts[parent] <= left):
            break
        costs[i], lefts[i], middles[i], stops[i] = costs[parent], lefts[parent], middles[parent], stops[parent]
        i = parent
    costs[i], lefts[i], middles[i], stops[i] = cost, left, middle, stop


@register_jitable
def _pop(heap: Any, n: Any) -> None:
    costs, lefts, middles, stops = heap
    n -= 1
    cost, left, i = costs[n], lefts[n], 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        other = child + 1
        if other < n and (
            costs[other] < costs[child] or (costs[other] == costs[child] and lefts[other] < lefts[child])
        ):
            child = other
        if cost < costs[child] or (cost == costs[child] and left <= lefts[child]):
            break
        costs[i], lefts[i], middles[i], stops[i] = costs[child], lefts[child], middles[child], stops[child]
        i = child
    costs[i], lefts[i], middles[i], stops[i] = cost, left, middles[n], stops[n]


@register_jitable
def _merge(text: Any, start: Any, n: Any, by_byte: Any, merges: Any, costs: Any, paired: Any, work: Any) -> None:
    """Merge the pieces of text[start:start + n].

    The pair with the least cost comes first, of equal ones the leftmost. `work`: the end of the piece that begins at
    each position, 0 where none does; the start of the piece before; a heap.
    """
    end, before, heap = work
    size = 0
    position = 0
    previous = -1
    while position < n:
        stop = position + 1
        if not by_byte:
            while stop < n and text[start + stop] & 0xC0 == 0x80:
                stop += 1
        end[position], before[position] = stop, previous
        for i in range(position + 1, stop):
            end[i] = 0
        if previous >= 0:
            found = _lookup(merges, text, start + previous, start + stop, position - previous if paired else 0)
            if found >= 0:
                _push(heap, size, costs[found], previous, position, stop)
                size += 1
        previous, position = position, stop
    while size > 0:
        left, middle, stop = np.int64(heap[1][0]), np.int64(heap[2][0]), np.int64(heap[3][0])
        _pop(heap, size)
        size -= 1
        if end[left] != middle or end[middle] != stop:
            continue  # stale: one of the two has merged with another
        end[left], end[middle] = stop, 0
        if stop < n:
            before[stop] = left
            after = np.int64(end[stop])
            found = _lookup(merges, text, start + left, start + after, stop - left if paired else 0)
            if found >= 0:
                _push(heap, size, costs[found], left, stop, after)
                size += 1
        if left > 0:
            first = np.int64(before[left])
            found = _lookup(merges, text, start + first, start + stop, left - first if paired else 0)
            if found >= 0:
                _push(heap, size, costs[found], first, left, stop)
                size += 1


@register_jitable
def _emit(text: Any, start: Any, stop: Any, tokens: Any, byte_ids: Any, ids: Any, count: Any) -> Any:
    """Append the id of a piece, or those of its bytes.

    Returns the number of ids, or -1 - the position of a byte without one.
    """
    token = _lookup(tokens, text, start, stop, 0)
    if token >= 0:
        ids[count] = token
        return count + 1
    for i in range(start, stop):
        token = np.int64(byte_ids[text[i]])
        if token < -1:
            return -1 - i
        if token >= 0:
            ids[count] = token
            count += 1
    return count


def encode_words(text: Any, *arguments: Any) -> int:
    """Encode words of text by BPE; see `merge_words` for the arguments."""
    n, n_seen = len(text) + 1, 64
    while n_seen < min(n // 8, 1 << 16):
        n_seen *= 2
    heap = (np.empty(3 * n), *np.empty((3, 3 * n), np.int32))
    ends, before = np.empty((2, n), np.int32)
    return int(merge_words(text, *arguments, heap, ends, before, np.zeros((n_seen, 4), np.int32)))


@_compiled(
    f"int64(uint8[::1], int64[::1], boolean, int64, {TABLE}, float64[::1], boolean, {TABLE}, uint8[::1], int32[::1],"
    f" int32[::1], {HEAP}, int32[::1], int32[::1], int32[:, ::1])"
)
def merge_words(
    text: Any,
    lengths: Any,
    by_byte: Any,
    unmerged: Any,
    merges: Any,
    costs: Any,
    paired: Any,
    tokens: Any,
    joints: Any,
    byte_ids: Any,
    ids: Any,
    heap: Any,
    end: Any,
    before: Any,
    seen: Any,
) -> Any:
    """Encode words of text by BPE; returns the number of ids.

    `lengths`: characters of each word. `by_byte`: pieces begin as bytes, not as characters. `unmerged`: which words
    that are tokens are not merged. `merges`, `costs`: what is merged; `paired` if it depends on both parts, not on
    their union alone. `joints`: empty, or what `mark_joints` marked. `byte_ids`: ids for the bytes of a piece that is
    not a token; -1 drops a byte, at -2 the result is -1 - its position. `ids` is as long as the text. The others are
    memory: `heap`, `end` and `before` for merging, and `seen`, zeros [a power of two, 4], for the parts seen last.
    """
    work = end, before, heap
    # Parts by hash: start, length, first id, number of ids. Most words of a text come again.
    n_seen = len(seen)
    count = 0
    start = 0
    ascii_only = lengths.sum() == len(text)
    for length in lengths:
        stop = start + length
        if not ascii_only:
            stop = start
            for _ in range(length):
                stop += 1
                while stop < len(text) and text[stop] & 0xC0 == 0x80:
                    stop += 1
        if unmerged == NEWLINES and start < stop and text[start] == _NEWLINE:
            token = _lookup(tokens, text, start, stop, 0)
            if token >= 0:
                ids[count] = token
                count += 1
                start = stop
        while start < stop:
            cut = start + 1
            while cut < stop and (len(joints) == 0 or text[cut] & 0xC0 == 0x80 or joints[_joint(text, cut, stop)] != 0):
                cut += 1
            slot = _hash(text, start, cut, 0) & (n_seen - 1)
            size, first, n_ids = np.int64(seen[slot, 1]), np.int64(seen[slot, 2]), np.int64(seen[slot, 3])
            if size == cut - start and _equal(text, start, cut, text, np.int64(seen[slot, 0])):
                for i in range(n_ids):
                    ids[count + i] = ids[first + i]
                count += n_ids
                start = cut
                continue
            first = count
            if unmerged == EVERY_WORD and _lookup(tokens, text, start, cut, 0) >= 0:
                count = _emit(text, start, cut, tokens, byte_ids, ids, count)
            else:
                _merge(text, start, cut - start, by_byte, merges, costs, paired, work)
                position = 0
                while position < cut - start:
                    after = np.int64(end[position])
                    count = _emit(text, start + position, start + after, tokens, byte_ids, ids, count)
                    if count < 0:
                        return count
                    position = after
            seen[slot, 0], seen[slot, 1], seen[slot, 2], seen[slot, 3] = start, cut - start, first, count - first
            start = cut
    return count


@_compiled("int64(uint8[::1], int64[::1], int64[::1], boolean[::1], int64[::1], int32[::1], int32[::1])")
def fill_trie(data: Any, starts: Any, stops: Any, included: Any, keys: Any, children: Any, values: Any) -> Any:
    """Enter strings into a trie of bytes; returns the number of nodes.

    `keys`, `children`: hash table of a node's number * 256 + a byte, -1 where free, and of the node that the byte leads
    to. `values`: number of the string that ends at each node, or -1; one more than the strings have bytes. Node 0 is
    the root.
    """
    keys[:] = -1
    values[:] = -1
    n_nodes = 1
    for number in range(len(starts)):
        if not included[number] or starts[number] == stops[number]:
            continue
        node = 0
        for i in range(starts[number], stops[number]):
            key = np.int64(node) << 8 | np.int64(data[i])
            slot = _trie_slot(keys, key)
            if keys[slot] < 0:
                keys[slot], children[slot] = key, n_nodes
                n_nodes += 1
            node = np.int64(children[slot])
        values[node] = number
    return n_nodes


@register_jitable
def _trie_slot(keys: Any, key: Any) -> Any:
    mixed = (key & 0x7FFFFFFF) * 0x9E3779B1 ^ (key >> 31) * 0x85EBCA6B
    slot = (mixed ^ mixed >> 24) & (len(keys) - 1)
    while keys[slot] >= 0 and keys[slot] != key:
        slot = (slot + 1) & (len(keys) - 1)
    return slot


@register_jitable
def _child(trie: Any, node: Any, byte: Any) -> Any:
    """Node that a byte leads to, or -1."""
    keys, children, _ = trie
    slot = _trie_slot(keys, np.int64(node) << 8 | np.int64(byte))
    return np.int64(children[slot]) if keys[slot] >= 0 else np.int64(-1)


@register_jitable
def _utf8_length(text: Any, position: Any) -> Any:
    """Length of the character at a position, 0 if invalid."""
    lead = text[position]
    if lead < 0x80:
        return 1
    size = 0 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4 if lead < 0xF8 else 0
    if position + size > len(text):
        return 0
    for i in range(position + 1, position + size):
        if text[i] & 0xC0 != 0x80:
            return 0
    return size


@register_jitable
def _replacement(text: Any, position: Any, nodes: Any) -> Any:
    """Longest prefix with a replacement: its length, and the replacement's offset.

    `nodes`: XOR-compressed double array of SentencePiece's normalizer. -1 for an index beyond it.
    """
    size, offset = 0, 0
    node = np.int64(nodes[0]) >> 10 << ((np.int64(nodes[0]) & 0x200) >> 6)
    for i in range(position, len(text)):
        byte = np.int64(text[i])
        if byte == 0:
            break
        node ^= byte
        if node >= len(nodes):
            return -1, 0
        unit = np.int64(nodes[node])
        if unit & 0x800000FF != byte:
            break
        node ^= unit >> 10 << ((unit & 0x200) >> 6)
        if unit & 0x100:
            if node >= len(nodes):
                return -1, 0
            size, offset = i - position + 1, np.int64(nodes[node]) & 0x7FFFFFFF
    return size, offset


@_compiled(f"int64(uint8[::1], {TRIE}, uint32[::1], uint8[::1], uint8[::1], boolean, boolean, uint8[::1])")
def normalize(
    text: Any, kept: Any, nodes: Any, replacements: Any, space: Any, prepend: Any, merge_spaces: Any, result: Any
) -> Any:
    """Normalise text as SentencePiece does, as llama.cpp reads its rules.

    Prefixes of the strings in `kept` stay as they are. `nodes` and `replacements`: the two parts of the precompiled
    map of characters, the latter with U+FFFD at its end. `space`: what a space becomes. Returns the length; -1 where
    the map is damaged, or -2 if `result` is too short.
    """
    n_replacements = len(replacements) - 3
    n = position = 0
    prepended = in_word = False
    while position < len(text):
        size = 0
        node = _child(kept, 0, text[position])
        while node >= 0:
            size += 1
            node = _child(kept, node, text[position + size]) if position + size < len(text) else np.int64(-1)
        source, first, last = text, position, position + size
        if size == 0 and len(nodes) > 0:
            size, offset = _replacement(text, position, nodes)
            if size < 0:
                return -1
            if size > 0:
                last = offset
                while last < n_replacements and replacements[last] != 0:
                    last += 1
                if last >= n_replacements:
                    return -1
                source, first = replacements, offset
        if size == 0:
            size = _utf8_length(text, position)
            last = position + size
            if size == 0:
                source, first, last, size = replacements, n_replacements, len(replacements), 1
        for i in range(first, last):
            if n + 2 * len(space) + 1 > len(result):
                return -2
            byte = source[i]
            if byte != _SPACE:
                if not in_word:
                    in_word = True
                    if (prepend and not prepended) or merge_spaces:
                        for j in range(len(space)):
                            result[n + j] = space[j]
                        n += len(space)
                        prepended = True
                result[n] = byte
                n += 1
            else:
                in_word = False
                if not merge_spaces:
                    for j in range(len(space)):
                        result[n + j] = space[j]
                    n += len(space)
        position += size
    return n


@_compiled(f"int64(uint8[::1], {TRIE}, float64[::1], float64, int64, float64[::1], int32[::1], int32[::1], int32[::1])")
def encode_unigram(
    text: Any, tokens: Any, scores: Any, unknown_score: Any, unknown: Any, best: Any, token_of: Any, start_of: Any,
    ids: Any,
) -> Any:  # fmt: skip
    """Encode text as the tokens with the best sum of scores.

    Returns the number of ids. A character without a token of its own may also be `unknown`, with its score;
    neighbouring ones become one. The ids stand at the end of `ids`, which is as long as the text. `best`, `token_of`
    and `start_of` are memory for the best text up to each byte, one longer than the text.
    """
    n = len(text)
    for i in range(n + 1):
        best[i], token_of[i], start_of[i] = -np.finfo(np.float64).max, unknown, 0
    best[0] = 0.0
    values = tokens[2]
    position = 0
    while position < n:
        lead = text[position]
        size = min(1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4, n - position)
        single = False
        node, stop = np.int64(0), position
        while stop < n:
            node = _child(tokens, node, text[stop])
            if node < 0:
                break
            stop += 1
            token = np.int64(values[node])
            if token >= 0:
                single = single or stop - position == size
                score = best[position] + scores[token]
                if score > best[stop]:
                    best[stop], token_of[stop], start_of[stop] = score, token, position
        if not single:
            score = best[position] + unknown_score
            if score > best[position + size]:
                best[position + size], token_of[position + size] = score, unknown
                start_of[position + size] = position
        position += size
    count, position = 0, n
    was_unknown = False
    while True:
        token = np.int64(token_of[position])
        if not (was_unknown and token == unknown):
            count += 1
            ids[n - count] = token
        position = np.int64(start_of[position])
        if position == 0:
            return count
        was_unknown = token == unknown
