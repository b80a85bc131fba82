"""NUMA placement of packed weights, by first touch.

A thread of a team reads the same rows of a matrix in every step (`llamacli.kernels.work.share`), so their pages belong
on its node. Linux gives a page to the node of the thread that first writes to it. So before a matrix is packed, a
thread on each node writes to the pages that the threads there will read. Nothing but an affinity mask is needed, which
containers allow, unlike mbind; and a memory policy that the user sets (`numactl --interleave`) stays in force.

The place of a page is decided by the row in its middle. Parts that are smaller than a huge page, such as those of small
experts, are thereby spread over the nodes.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from llamacli.util.numa import Node, bind_thread

_HUGE = 1 << 21
"""Bytes of a huge page, the unit of placement; pages of a part are of one node."""

Bytes = npt.NDArray[np.uint8]


def place(packed: Bytes, nodes: Sequence[Node]) -> None:
    """Place untouched memory of a packed matrix on its readers' nodes.

    `packed` is uint8 [n_group, n_tiles, n_blocks, block bytes], zeros of a new mapping; `nodes` are those of the team's
    threads (`Team.nodes`). Does nothing with one node, and where threads cannot be bound.
    """
    if not nodes or packed.nbytes < _HUGE:
        return
    address, data = packed.ctypes.data, packed.reshape(-1)
    numbers = np.array([node.number for node in nodes])[page_threads(address, packed.shape, len(nodes))]
    touchers = [
        threading.Thread(target=_touch, args=(data, node, list(_ranges(address, pages))))
        for node in dict.fromkeys(nodes)
        if (pages := np.flatnonzero(numbers == node.number)).size
    ]
    for toucher in touchers:
        toucher.start()
    for toucher in touchers:
        toucher.join()


def page_threads(address: int, shape: Sequence[int], n_threads: int) -> npt.NDArray[np.int64]:
    """Thread that reads the middle of each huge page of a matrix.

    `shape` is [n_group, n_tiles, n_blocks, block bytes], and `address` its first byte. Pages lie at multiples of their
    size; the first and the last one may be parts.
    """
    n_bytes, n_tiles = math.prod(shape), shape[1]
    edges = np.arange(address // _HUGE, -(-(address + n_bytes) // _HUGE) + 1, dtype=np.int64) * _HUGE - address
    starts, stops = np.maximum(edges[:-1], 0), np.minimum(edges[1:], n_bytes)
    tiles = (starts + stops) // 2 // math.prod(shape[2:]) % n_tiles
    return ((tiles + 1) * n_threads - 1) // n_tiles  # the inverse of `share`


def _ranges(address: int, pages: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of bytes, from `address` on, of runs of pages."""
    offset = address % _HUGE
    for run in np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1):
        yield max(0, int(run[0]) * _HUGE - offset), (int(run[-1]) + 1) * _HUGE - offset


def _touch(data: Bytes, node: Node, ranges: Sequence[tuple[int, int]]) -> None:
    if bind_thread(node):
        for start, stop in ranges:
            data[start : stop : mmap.PAGESIZE] = 0
