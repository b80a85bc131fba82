"""Ends of the strings in a GGUF array.

Each string lies behind its length. Lengths have 8 bytes, of which six or seven are zeros, and texts have no zeros. So
NumPy searches for the lengths, in a tenth of the time of a loop. A length counts if it begins where the string before
it ends. At the first other one a loop reads the next lengths, whatever the texts are.
"""

import contextlib
import struct
from array import array
from mmap import mmap

import numpy as np
import numpy.typing as npt

_U64 = struct.Struct("<Q")
_WINDOW = 1 << 20
"""Bytes that are searched at once."""
_STEP = 4096
"""Lengths that are read between searches, so that the time of these is small for any file."""


def string_ends(data: bytes | mmap, start: int, n: int) -> npt.NDArray[np.int64]:
    """Ends of n strings, in bytes from `start`, int64 [n].

    Fewer, if the last of them ends behind the data.
    """
    ends, end = array("q"), 0
    with contextlib.suppress(struct.error, OverflowError):  # a length behind the end of the file, or no index
        while True:
            for _ in range(min(_STEP, n - len(ends))):
                end += 8 + _U64.unpack_from(data, start + end)[0]
                ends.append(end)
            if len(ends) == n:
                break
            more = end + _found_ends(data[start + end : start + end + _WINDOW])[: n - len(ends)]
            ends.frombytes(more.tobytes())
            end = ends[-1]
    return np.array(ends, np.int64)


def _found_ends(window: bytes) -> npt.NDArray[np.int64]:
    """Ends of strings from the first byte on, as far as found."""
    window += bytes(16)
    n_words = len(window) // 8 - 1
    is_length = np.empty((n_words, 8), bool)
    for first in range(8):
        is_length[:, first] = np.frombuffer(window, "<u8", n_words, first) < 1 << 16
    text = np.frombuffer(window, np.uint8)
    starts = np.flatnonzero(is_length.reshape(-1) & (text[8 : 8 + 8 * n_words] != 0))
    ends = starts + 8 + text[starts] + (text[starts + 1].astype(np.int64) << 8)
    is_next = np.append(0, ends[:-1]) == starts
    return ends[: len(ends) if is_next.all() else is_next.argmin()]
