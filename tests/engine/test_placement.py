"""Placement of packed weights on NUMA nodes that are simulated."""

import os
import sys

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli import load_model
from llamacli.engine import native, placement
from llamacli.engine.packed_copies import finish_copies, folder, reading, writing
from llamacli.engine.placement import page_threads, place
from llamacli.kernels import team
from llamacli.util.memory import anonymous
from llamacli.util.numa import Node

HUGE = placement._HUGE
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
NODES = [Node(0, (CPUS[0],), (CPUS[0],)), Node(1, (CPUS[-1],), (CPUS[-1],))]
linux = pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")


@given(
    st.integers(0, 3 * HUGE), st.integers(1, 3), st.integers(1, 400), st.integers(1, 2000), st.integers(1, 70)
)  # fmt: skip
def test_pages_belong_to_the_thread_that_reads_their_middle(
    address: int, n_group: int, n_tiles: int, tile_bytes: int, n_threads: int
) -> None:
    found = page_threads(address, (n_group, n_tiles, tile_bytes, 64), n_threads)
    stop = address + 64 * n_group * n_tiles * tile_bytes
    pages = range(address // HUGE, -(-stop // HUGE))
    assert len(found) == len(pages)
    for page, thread in zip(pages, found.tolist(), strict=True):
        middle = (max(address, page * HUGE) + min(stop, (page + 1) * HUGE)) // 2 - address
        tile = middle // (64 * tile_bytes) % n_tiles
        assert thread * n_tiles // n_threads <= tile < (thread + 1) * n_tiles // n_threads  # kernels.work.share


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Ranges that are touched, with the number of the node."""
    found = list[tuple[int, int, int]]()

    def touch(data, node, ranges) -> None:
        found.extend((node.number, start, min(stop, data.size)) for start, stop in ranges)

    monkeypatch.setattr(placement, "_touch", touch)
    return found


def test_rows_lie_on_the_nodes_of_their_threads(touched) -> None:
    packed = anonymous(32 * HUGE + 4096).reshape(1, 8, -1, 64)
    place(packed, [NODES[0], NODES[0], NODES[0], NODES[1]])
    ranges = sorted((start, stop, node) for node, start, stop in touched)
    assert [node for *_, node in ranges] == [0, 1]
    assert abs(ranges[0][1] - 0.75 * packed.nbytes) <= HUGE
    assert [start for start, *_ in ranges] == [0, ranges[0][1]]
    assert ranges[-1][1] == packed.nbytes


def test_small_experts_are_spread_over_the_nodes(touched) -> None:
    place(anonymous(64 * HUGE).reshape(256, 8, -1, 64), [NODES[0], NODES[1]])
    pages = sorted((start // HUGE, stop // HUGE, node) for node, start, stop in touched)
    assert sum(stop - start for start, stop, _ in pages) >= 63, "each page once"
    place(anonymous(60 * HUGE).reshape(80, 8, -1, 64), [NODES[0], NODES[1]])  # parts of 3/4 of a page
    n_bytes = [sum(stop - start for node, start, stop in touched if node == number) for number in (0, 1)]
    assert sum(n_bytes) == 124 * HUGE
    assert min(n_bytes) > 0


def test_nothing_is_placed_with_one_node_or_in_less_than_a_page(touched) -> None:
    place(anonymous(4 * HUGE).reshape(1, 8, -1, 64), ())
    place(anonymous(HUGE - 4096).reshape(1, 1, -1, 64), NODES)
    assert touched == []


@linux
@pytest.mark.parametrize("bound", [True, False])
def test_pages_are_committed_by_bound_threads_only(bound: bool, monkeypatch) -> None:
    masks = list[set[int]]()

    def bind(cpus) -> None:
        if not bound:
            raise PermissionError
        masks.append(set(cpus))

    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bind(cpus))
    packed = anonymous(32 * HUGE).reshape(1, 8, -1, 64)
    before = psutil.Process().memory_info().rss
    place(packed, NODES)
    grown = psutil.Process().memory_info().rss - before
    assert (grown > 28 * HUGE) if bound else (grown < 4 * HUGE)
    assert masks == ([set(node.cpus) for node in NODES] if bound else [])
    assert not packed.any()


@linux
def test_a_model_on_two_nodes_gives_the_same_bits(tiny_gguf, plugins, monkeypatch, tmp_path) -> None:
    """Packed by itself, and read from a packed copy."""
    monkeypatch.setattr(writing, "MIN_BYTES", 1)
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path)
    placed, copied = list[int](), list[int]()
    in_memory, touch = reading._in_memory, placement._touch

    def some_logits(n_threads: int) -> np.ndarray:
        with load_model(tiny_gguf("moe_8_2", type="Q8_0"), threads=n_threads, plugins=plugins) as model:
            finish_copies()
            with model.create_session(reuse=False) as session:
                session.eval([1, 2, 3, 4, 5])
                return session.logits.copy()

    expected = some_logits(1)  # and a copy
    monkeypatch.setattr(team, "numa_nodes", lambda: NODES)
    monkeypatch.setattr(native, "_teams", {})
    monkeypatch.setattr(placement, "_HUGE", 4096)
    monkeypatch.setattr(placement, "_touch", lambda *args: (placed.append(args[1].number), touch(*args)))
    monkeypatch.setattr(reading, "_in_memory", lambda *args: (copied.append(1), in_memory(*args))[1])
    for limit in ("0", ""):
        placed.clear()
        monkeypatch.setenv(folder.VARIABLE, limit)
        np.testing.assert_array_equal(some_logits(4), expected)
        assert (set(placed), bool(copied)) == ({0, 1}, not limit)
    native._teams[4].close()
