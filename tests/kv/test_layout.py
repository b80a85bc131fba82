import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_helpers import ONE, new_sequence
from llamacli.kernels.layout import RECURRENT_SLOTS
from llamacli.kv import KV_TYPES, N_BATCH, PAGE, KVLayout, KVSpec
from llamacli.kv.layout import Group, Held, Place, RecurrentSpec

BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8, "q4_0": 4, "q4_1": 4, "iq4_nl": 4, "q5_0": 5, "q5_1": 5}
SCALES = {"f32": 0, "f16": 0, "bf16": 0, "q4_1": 2, "q5_1": 2}
"""16-bit words beside each block; 1 for types that are not listed."""
types = st.sampled_from(list(KV_TYPES))
specs = st.lists(st.builds(KVSpec, st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3)


def part_bytes(kv_type: str, head_dim: int) -> int:
    """Size of a part by definition.

    GGML's bits a number in whole units of 16, and scales for each block of 32 or part of one.
    """
    if SCALES.get(kv_type) == 0:
        return PAGE * head_dim * BITS[kv_type] // 8
    return PAGE * (-(-head_dim // 16) * 16 * BITS[kv_type] // 8 + -(-head_dim // 32) * 2 * SCALES.get(kv_type, 1))


@given(specs, st.integers(1, 100), types, types)
def test_n_bytes_is_the_size_of_all_pages(layers: list[KVSpec], seq_len: int, k_type: str, v_type: str) -> None:
    sequence = new_sequence(layers, seq_len, (k_type, v_type))
    pages = -(-seq_len // PAGE)
    parts = [part_bytes(k_type, spec.head_dim) + part_bytes(v_type, spec.head_dim) for spec in layers]
    assert sequence.n_bytes == sum(pages * spec.n_head_kv * n for spec, n in zip(layers, parts, strict=True))
    sequence.reserve(0, seq_len)
    assert sequence.n_bytes == sum(pages.n_used * pages.page_bytes for pages in sequence.pool.groups)


@pytest.mark.parametrize(
    ("kv_type", "block"), [("q8_0", 34), ("q4_0", 18), ("q4_1", 20), ("iq4_nl", 18), ("q5_0", 22), ("q5_1", 24)]
)
def test_quantized_types_have_ggmls_block_sizes(kv_type: str, block: int) -> None:
    n_bytes = KVLayout.of([KVSpec(8, 128)] * 16, kv_type).n_bytes(4096)
    assert n_bytes == 2 * 16 * 4096 * 8 * 128 // 32 * block
    assert new_sequence([KVSpec(8, 128)], 64, (kv_type, "f16")).n_bytes == 64 * 8 * (4 * block + 256)


def test_n_bytes_bounds_the_pages_of_sliding_windows() -> None:
    sequence = new_sequence([ONE, KVSpec(2, 4, window=20), ONE], 10000)
    layer = 2 * 2 * 4 * 4 * PAGE
    assert sequence.n_bytes == 2 * layer * 625 + layer * (-(-(20 + N_BATCH) // PAGE) + 1)
    most = 0
    for start in range(0, 10000 - N_BATCH, N_BATCH):
        sequence.reserve(start, N_BATCH)
        most = max(most, sum(pages.n_used * pages.page_bytes for pages in sequence.pool.groups))
        sequence.evict(start + N_BATCH)
    assert most <= sequence.n_bytes


def test_layers_of_one_window_form_a_group() -> None:
    layout = KVLayout.of([ONE, KVSpec(2, 4, window=20), ONE, KVSpec(1, 4, window=20)], "f32")
    assert [group.window for group in layout.groups] == [None, 20]
    assert [place.group for place in layout.places] == [0, 1, 0, 1]
    assert layout.has_windows
    assert not KVLayout.of([ONE], "f32").has_windows


@pytest.mark.parametrize(
    ("window", "chunk", "first"), [(None, None, 0), (30, None, 0), (5, None, 16), (None, 8, 16), (2, 8, 19), (9, 8, 16)]
)
def test_first_position_that_is_seen(window: int | None, chunk: int | None, first: int) -> None:
    group = Group(window, chunk, 64)
    assert group.first_seen(20) == first
    assert group.has(20, first)
    assert group.has(20, first + 1) == (not group.evicts)


def test_places_of_heads_follow_one_another() -> None:
    layout = KVLayout.of([ONE, KVSpec(3, 5, value_dim=2), KVSpec(1, 8, values_in_keys=True), ONE], "f32")
    size = 4 * PAGE
    assert layout.places == (
        Place(0, 0, 2 * 4 * size, 4 * size, 4 * size),
        Place(0, 16 * size, (16 + 15) * size, 5 * size, 2 * size),
        Place(0, 37 * size, 45 * size, 8 * size, 0),
        Place(0, 45 * size, 53 * size, 4 * size, 4 * size),
    )
    assert layout.groups[0].page_bytes == 61 * size


def test_recurrent_states_are_aligned_and_come_last() -> None:
    states = [RecurrentSpec("a", (3,)), RecurrentSpec("b", (4, 5)), RecurrentSpec("c", (16,))]
    layout = KVLayout.of([ONE], "f32", states)
    assert (layout.offsets, layout.groups[-1]) == ((0, 64, 192), Group(None, None, 256, recurrent=True))
    assert layout.n_bytes(PAGE) == layout.groups[0].page_bytes + 256 * len(RECURRENT_SLOTS)
    held = KVLayout.of([ONE, ONE], "f32", states, Held(frozenset({1}), frozenset({1})))
    assert held.places == (Place(0, 0, 0, 0, 0), *KVLayout.of([ONE], "f32").places)
    assert (held.offsets, held.groups[-1].page_bytes) == ((0, 0, 128), 128)


@pytest.mark.parametrize(("window", "chunk", "n"), [(20, None, 35), (None, 20, 35), (17, 40, 35), (40, 16, 34)])
def test_most_pages_of_a_window(window: int | None, chunk: int | None, n: int) -> None:
    """Pages of the window, a batch, and one more."""
    group = Group(window, chunk, 64)
    assert [KVLayout.n_pages(group, n_tokens) for n_tokens in (1, 16, 17, 33 * PAGE, 10_000)] == [1, 1, 2, 33, n]
