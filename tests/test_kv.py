import dis
import gc
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import naive
from llamacli import InvalidRequestError
from llamacli.kv import KV_TYPES, N_BATCH, PAGE, KVLayout, KVPool, KVSequence
from llamacli.kv import pool as pool_module
from llamacli.kv import sequence as sequence_module
from llamacli.kv.layout import KVSpec
from llamacli.util.memory import view

states = st.lists(st.builds(KVSpec, st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3)
ONE = KVSpec(2, 4)


def new_sequence(layers: list[KVSpec], seq_len: int, kv_type: str | tuple[str, str] = "f32") -> KVSequence:
    return KVSequence(KVPool(KVLayout.of(layers, kv_type)), seq_len)


def random_cells(n: int, state: KVSpec = ONE, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=(n, state.n_head_kv, state.head_dim)).astype(np.float32) for _ in range(2))


def fill(sequence: KVSequence, start: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    k, v = random_cells(n, seed=seed)
    sequence.reserve(start, n)
    for layer in range(len(sequence.pool.layout.states)):
        sequence.write(layer, start, k, v)
    return k, v


BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8, "q4_0": 4, "q4_1": 4, "iq4_nl": 4, "q5_0": 5, "q5_1": 5}
SCALES = {"f32": 0, "f16": 0, "bf16": 0, "q4_1": 2, "q5_1": 2}
"""Numbers of 16 bits beside each block; 1 where none is named."""
types = st.sampled_from(list(KV_TYPES))


def part_bytes(kv_type: str, head_dim: int) -> int:
    """By the definition: GGML's bits a number, in heads of whole units, and the scales of each begun block of 32."""
    if SCALES.get(kv_type) == 0:
        return PAGE * head_dim * BITS[kv_type] // 8
    return PAGE * (-(-head_dim // 16) * 16 * BITS[kv_type] // 8 + -(-head_dim // 32) * 2 * SCALES.get(kv_type, 1))


@given(states, st.integers(1, 100), types, types)
def test_size_law(layers: list[KVSpec], seq_len: int, k_type: str, v_type: str) -> None:
    sequence = new_sequence(layers, seq_len, (k_type, v_type))
    pages = -(-seq_len // PAGE)
    parts = [part_bytes(k_type, state.head_dim) + part_bytes(v_type, state.head_dim) for state in layers]
    assert sequence.n_bytes == sum(pages * state.n_head_kv * n for state, n in zip(layers, parts, strict=True))
    sequence.reserve(0, seq_len)
    assert sequence.n_bytes == sum(pages.n_used * pages.page_bytes for pages in sequence.pool.groups)


@pytest.mark.parametrize(
    ("kv_type", "block"), [("q8_0", 34), ("q4_0", 18), ("q4_1", 20), ("iq4_nl", 18), ("q5_0", 22), ("q5_1", 24)]
)
def test_blocks_take_as_many_bytes_as_ggmls(kv_type: str, block: int) -> None:
    n_bytes = KVLayout.of([KVSpec(8, 128)] * 16, kv_type).n_bytes(4096)
    assert n_bytes == 2 * 16 * 4096 * 8 * 128 // 32 * block
    assert new_sequence([KVSpec(8, 128)], 64, (kv_type, "f16")).n_bytes == 64 * 8 * (4 * block + 256)


heads = st.builds(KVSpec, st.integers(1, 3), st.sampled_from([1, 8, 16, 24, 48, 64]))


@given(st.lists(heads, min_size=1, max_size=3), st.integers(1, 60), types, types)
@example([KVSpec(1, 1)], 52, "f32", "q5_0")
def test_what_is_written_is_read(layers: list[KVSpec], n: int, k_type: str, v_type: str) -> None:
    sequence = new_sequence(layers, 64, (k_type, v_type))
    sequence.reserve(0, n)
    written = [random_cells(n, state, seed) for seed, state in enumerate(layers)]
    for layer, (k, v) in enumerate(written):
        sequence.write(layer, 0, k, v)
    for layer, (k, v) in enumerate(written):
        keys, values = sequence.read(layer, n)
        check_rounded(keys.transpose(2, 0, 1), k, k_type, is_key=True)
        check_rounded(values.transpose(1, 0, 2), v, v_type, is_key=False)


def check_rounded(stored: np.ndarray, x: np.ndarray, kv_type: str, *, is_key: bool) -> None:
    """Floats are the nearest; turned values are within half a step, or a step where the code of 0 is chosen."""
    if kv_type in ("f32", "f16"):
        np.testing.assert_array_equal(stored, x.astype({"f32": np.float32, "f16": np.float16}[kv_type]))
    elif kv_type == "bf16":
        assert (stored.view(np.uint32) & 0xFFFF == 0).all()
        assert (np.abs(stored - x) <= np.abs(x) * 2**-8).all()
    elif is_key:  # less the mean of others: of random numbers that is up to twice as much to be rounded
        assert naive.nmse(stored, x) < {8: 2e-4, 5: 1.2e-2, 4: 5e-2}[BITS[kv_type]]
    else:
        turned, expected = turn(stored), turn(x)
        for start in range(0, x.shape[-1], 32):
            block, got = expected[..., start : start + 32], turned[..., start : start + 32]
            peak = np.abs(block).max(-1)
            step = np.maximum(block.max(-1), 0) - np.minimum(block.min(-1), 0)
            most = {"q8_0": peak / 254, "iq4_nl": peak * 12 / 127}.get(kv_type, step / (2 ** BITS[kv_type] - 1))
            # The scale may be a few bits short of a float16, and small ones are short of more.
            slack = 3e-4 * np.square(peak) + (32 * 2**-20) ** 2
            assert (np.square(got - block).mean(-1) <= 1.02 * np.square(most) + slack).all()


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"])
@pytest.mark.parametrize("head_dim", [16, 64, 96])
def test_values_are_closer_than_ggml_rounds_them(kv_type: str, head_dim: int) -> None:
    state = KVSpec(4, head_dim)
    k, v = random_cells(60, state)
    v[..., 3] *= 20  # an outlier that would take all codes of its block
    sequence = new_sequence([state], 60, ("f32", kv_type))
    sequence.reserve(0, 60)
    sequence.write(0, 0, k, v)
    blocks = v.reshape(60, -1, min(32, head_dim))
    error = naive.nmse(sequence.read(0, 60)[1].transpose(1, 0, 2), v)
    assert error < 0.8 * naive.nmse(ggml_rounded(blocks, kv_type), blocks)


def turn(x: np.ndarray) -> np.ndarray:
    """Times the Hadamard matrix of as many dimensions as divide the head, in float64 by its definition."""
    matrix = np.ones((1, 1))
    while x.shape[-1] % (2 * len(matrix)) == 0:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    size = len(matrix)
    return (x.reshape(*x.shape[:-1], -1, size) @ (matrix / np.sqrt(size))).reshape(x.shape)


def ggml_rounded(block: np.ndarray, kv_type: str) -> np.ndarray:
    """Blocks as GGML rounds them, with a scale in float64."""
    low, high = block.min(-1, keepdims=True), block.max(-1, keepdims=True)
    peak, last = np.where(-low > high, low, high), 2 ** BITS[kv_type] - 1
    if kv_type == "iq4_nl":
        table = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
        scale = peak / -127 + 1e-300
        return table[np.abs(block[..., None] / scale[..., None] - table).argmin(-1)] * scale
    if kv_type.endswith("_1"):
        scale = (high - low) / last + 1e-300
        return np.rint((block - low) / scale) * scale + low
    scale = peak / {8: -127, 5: -16, 4: -8}[BITS[kv_type]] + 1e-300
    return np.clip(np.rint(block / scale), -(last // 2) - 1, last // 2) * scale


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_what_keys_have_in_common_costs_no_precision(kv_type: str, head_dim: int) -> None:
    state = KVSpec(2, head_dim)
    k, v = random_cells(64, state)
    common = np.random.default_rng(1).normal(0, 30, (1, 2, head_dim)).astype(np.float32)
    errors = []
    for keys in (k, k + common):
        sequence = new_sequence([state], 64, (kv_type, "f32"))
        sequence.reserve(0, 64)
        sequence.write(0, 0, keys, v)
        error = np.square(sequence.read(0, 64)[0].transpose(2, 0, 1) - keys)
        errors.append(error[np.arange(64) % PAGE > 1].mean())  # the first ones of a page have nothing to lean on
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"])
def test_a_page_may_be_written_in_any_number_of_parts(kv_type: str) -> None:
    state = KVSpec(2, 48)
    k, v = random_cells(40, state)
    whole = new_sequence([state], 64, kv_type)
    whole.reserve(0, 40)
    whole.write(0, 0, k, v)
    for step in (1, 3, 7):
        parts = new_sequence([state], 64, kv_type)
        parts.reserve(0, 40)
        parts.write(0, 5, v[5:30], k[5:30])  # of what was there before nothing stays
        for start in range(0, 40, step):
            parts.write(0, start, k[start : start + step], v[start : start + step])
        for mine, theirs in zip(parts.read(0, 40), whole.read(0, 40), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("start", [1, 3, 9])
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_copy_from_the_middle_of_a_page_means_the_same(kv_type: str, start: int) -> None:
    """Behind the same cells it is the same bits; behind others, other bits are the same numbers, rounded once more."""
    state = KVSpec(2, 32)
    pool = KVPool(KVLayout.of([state], kv_type))
    source, alike, other = (KVSequence(pool, 40) for _ in range(3))
    k, v = random_cells(40, state)
    k += np.random.default_rng(1).normal(0, 30, (1, 2, 32)).astype(np.float32)
    for sequence, keys in ((source, k), (alike, k[:start]), (other, -k[:start])):
        sequence.reserve(0, len(keys))
        sequence.write(0, 0, keys, v[: len(keys)])
        sequence.tokens = list(range(len(keys)))
    other.tokens = [7] * start
    expected = source.read(0, 40)
    before = other.read(0, start)
    for sequence in (alike, other):
        sequence.copy(source, start, 40)
    for mine, theirs in zip(alike.read(0, 40), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    keys, values = other.read(0, 40)
    np.testing.assert_array_equal(keys[..., :start], before[0])
    np.testing.assert_array_equal(values, expected[1])
    assert naive.nmse(keys[..., start:], expected[0][..., start:]) < {4: 2e-2, 5: 5e-3}.get(BITS[kv_type], 1e-4)
    assert naive.nmse(source.read(0, 40)[0], expected[0]) == 0


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_what_is_no_number_does_not_become_one(kv_type: str, number: float) -> None:
    k, v = random_cells(3)
    k[1, 0, 2] = v[1, 1, 3] = number
    sequence = new_sequence([ONE], 16, kv_type)
    sequence.reserve(0, 3)
    sequence.write(0, 0, k, v)
    keys, values = sequence.read(0, 3)
    assert not np.isfinite(keys[0, :, 1]).all()
    assert not np.isfinite(values[1, 1]).all()
    assert np.isfinite(keys[..., 0]).all()
    assert np.isfinite(values[0]).all()


def test_memory_is_taken_when_needed_and_given_back() -> None:
    sequence = new_sequence([ONE], 1000)
    pool = sequence.pool
    assert pool.n_bytes == 0
    sequence.reserve(0, 1)
    assert pool.groups[0].n_used == 1
    sequence.reserve(1, PAGE)
    assert pool.groups[0].n_used == 2
    sequence.close()
    sequence.close()
    assert (pool.groups[0].n_used, pool.n_bytes) == (0, 0)


def test_an_abandoned_sequence_gives_its_pages_back() -> None:
    sequence = new_sequence([ONE], 100)
    pool = sequence.pool
    sequence.reserve(0, 100)
    assert pool.n_bytes > 0
    del sequence
    gc.collect()
    assert pool.n_bytes == 0


def test_a_page_is_zeros_again() -> None:
    sequence, other = (KVSequence(pool, 64) for pool in [KVPool(KVLayout.of([ONE], "f32"))] * 2)
    fill(other, 0, 1)  # keeps the memory from going back to the system
    fill(sequence, 0, 64)
    sequence.truncate(0)
    sequence.reserve(0, 64)
    assert not any(array.any() for array in sequence.read(0, 64))


class TestForks:
    def test_share_pages_until_one_writes(self) -> None:
        parent = new_sequence([ONE, ONE], 64)
        k, v = fill(parent, 0, 40)
        child = parent.fork()
        pages = parent.pool.groups[0]
        assert pages.n_used == 3
        fill(child, 40, 1, seed=1)
        assert pages.n_used == 4, "the page that both had begun is copied"
        fill(parent, 40, 8, seed=2)
        assert pages.n_used == 4
        for sequence, seed in ((child, 1), (parent, 2)):
            keys, values = sequence.read(1, 41)
            np.testing.assert_array_equal(keys[..., :40], k.transpose(1, 2, 0))
            np.testing.assert_array_equal(values[:, :40], v.transpose(1, 0, 2))
            np.testing.assert_array_equal(keys[..., 40], random_cells(8 if seed == 2 else 1, seed=seed)[0][0])

    def test_outlive_one_another(self) -> None:
        parent = new_sequence([ONE], 64)
        k, _ = fill(parent, 0, 20)
        child = parent.fork()
        parent.close()
        np.testing.assert_array_equal(child.read(0, 20)[0], k.transpose(1, 2, 0))
        child.close()
        assert child.pool.n_bytes == 0


CHECKED = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}
"""After these instructions Python hears of an interrupt."""


class Interrupt:
    """Raises KeyboardInterrupt where the code of a file hears of interrupts for the nth time."""

    def __init__(self, file: str, n: int):
        self.file, self.n = file, n
        self.last: dict[int, str] = {}

    def __enter__(self) -> "Interrupt":
        self.outer = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(self.outer)
        return kind is KeyboardInterrupt

    def enter(self, frame: FrameType, event: str, arg: object) -> object:
        frame.f_trace_opcodes = frame.f_code.co_filename == self.file
        return self.step if frame.f_trace_opcodes else None

    def step(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "opcode":
            before = self.last.get(id(frame))
            self.last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self.n -= before in CHECKED
            if not self.n:
                raise KeyboardInterrupt
        return self.step


ACTIONS: dict[str, Callable[[KVSequence], object]] = {
    "reserve": lambda sequence: sequence.reserve(48, 40),
    "own": lambda sequence: sequence.reserve(0, 40),
    "share": lambda sequence: sequence.fork(),
    "truncate": lambda sequence: sequence.truncate(3),
    "close": lambda sequence: sequence.close(),
}


def test_closing_can_be_interrupted_and_begun_again() -> None:
    for n in itertools.count(1):
        sequence = new_sequence([ONE, KVSpec(2, 4, window=20)], 100)
        fill(sequence, 0, 90)
        pool = sequence.pool
        with Interrupt(sequence_module.__file__, n) as interrupt:
            sequence.close()
        if n % 2:
            sequence.close()
            assert sequence.closed
        del sequence
        gc.collect()
        assert pool.n_bytes == 0
        if interrupt.n > 0:
            return


@pytest.mark.parametrize("action", ACTIONS)
def test_an_interrupt_leaves_the_books_right(action: str) -> None:
    for n in itertools.count(1):
        pool = KVPool(KVLayout.of([ONE, KVSpec(2, 4, window=20)], "f32"))
        one, other = KVSequence(pool, 100), KVSequence(pool, 100)
        fill(one, 0, 40)
        one.tokens += range(40)
        other.copy(one, 0, 40)
        with Interrupt(pool_module.__file__, n) as interrupt:
            ACTIONS[action](one)
        gc.collect()
        pool.collect()
        for g, pages in enumerate(pool.groups):
            held = [int(page) for sequence in (one, other) for page in sequence.tables[g] if page]
            assert pages.n_used == len(set(held))
            assert all(pages.owners(page) == held.count(page) for page in held)
        for sequence in (one, other):
            sequence.close()
        assert [pages.n_used for pages in pool.groups] == [0, 0]
        if interrupt.n > 0:
            assert n > 5
            return


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_cells_that_go_on_from_others_are_those_copied(kv_type: str) -> None:
    """Within a page, and where those before them differ."""
    source = new_sequence([ONE], 100, kv_type)
    fill(source, 0, 60)
    source.tokens += range(60)
    for same, start in itertools.product((True, False), (0, 5, 16, 21)):
        target = KVSequence(source.pool, 100)
        fill(target, 0, start, seed=0 if same else 9)
        target.tokens += range(start) if same else [7] * start
        target.copy(source, start, 40)
        assert target.cut == (None if same or not start else start)
        for mine, theirs in zip(target.read(0, 40, start), source.read(0, 40, start), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=0 if same else 0.5)
        whole = source.read(0, 40)
        np.testing.assert_array_equal(source.read(0, 40, start)[0], whole[0][..., start:])
        np.testing.assert_array_equal(source.read(0, 40, start)[1], whole[1][:, start:])


class TestWindows:
    STATES: ClassVar = [ONE, KVSpec(2, 4, window=20), ONE]

    def test_only_the_window_is_kept(self) -> None:
        sequence = new_sequence(self.STATES, 1000)
        whole, windowed = sequence.pool.groups
        for n in range(1, 200):
            sequence.reserve(n - 1, 1)
            sequence.evict(n)
            assert whole.n_used == -(-n // PAGE)
            assert windowed.n_used <= 20 // PAGE + 2
            first = max(0, n - 20 + 1)
            assert all(sequence.tables[1][first // PAGE : -(-n // PAGE)])

    def test_size_law(self) -> None:
        sequence = new_sequence(self.STATES, 10000)
        layer = 2 * 2 * 4 * 4 * PAGE
        assert sequence.n_bytes == 2 * layer * 625 + layer * (-(-(20 + N_BATCH) // PAGE) + 1)
        most = 0
        for start in range(0, 10000 - N_BATCH, N_BATCH):
            sequence.reserve(start, N_BATCH)
            most = max(most, sum(pages.n_used * pages.page_bytes for pages in sequence.pool.groups))
            sequence.evict(start + N_BATCH)
        assert most <= sequence.n_bytes

    def test_going_back_needs_what_is_seen_there(self) -> None:
        sequence = new_sequence(self.STATES, 200)
        fill(sequence, 0, 100)
        sequence.evict(100)
        kept = sequence.tables[1].copy()
        with pytest.raises(InvalidRequestError, match="cannot go back to position 60: the sliding window"):
            sequence.truncate(60)
        np.testing.assert_array_equal(sequence.tables[1], kept)
        sequence.truncate(99)
        sequence.truncate(0)
        assert [pages.n_used for pages in sequence.pool.groups] == [0, 0]
        fill(sequence, 0, 100)

    def test_copying_nothing_changes_nothing(self) -> None:
        source = new_sequence(self.STATES, 200)
        fill(source, 0, 100)
        source.tokens += range(100)
        source.evict(100)
        target = KVSequence(source.pool, 200)
        target.copy(source, 0, 0)
        assert (target.tokens, target.first_cells, target.cut) == ([], [0, 0], None)

    def test_one_can_go_back_to_where_a_batch_began(self) -> None:
        sequence = new_sequence(self.STATES, 400)
        k, _ = fill(sequence, 0, 50)
        sequence.evict(50)
        for start in range(50, 350, 50):
            sequence.reserve(start, 50)
            sequence.evict(start + 50, since=50)
        assert sequence.pool.groups[1].n_used <= 2 * (20 // PAGE + 2), "what lies between is given back"
        sequence.truncate(50)
        np.testing.assert_array_equal(sequence.read(1, 50)[0][..., 31:], k.transpose(1, 2, 0)[..., 31:])


@pytest.mark.parametrize("kv_type", ["F32", "q9_0", "", None, 7, ("f16",), ("f16", "q9"), ("f16", "f16", "f16")])
def test_unknown_types(kv_type: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not one of f32, f16"):
        KVLayout.of([ONE], kv_type)


def test_no_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = new_sequence([ONE, KVSpec(2, 4, window=20)], 10**6)
    fill(sequence, 0, 20)
    kept = [table.copy() for table in sequence.tables]

    def refuse(n_bytes: int) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr("llamacli.kv.pool.anonymous", refuse)
    with pytest.raises(MemoryError):
        sequence.reserve(20, 10**5)
    for table, before in zip(sequence.tables, kept, strict=True):
        np.testing.assert_array_equal(table, before)


def test_an_interrupted_copy_leaves_no_page_that_is_taken_to_be_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, table = KVPool(KVLayout.of([KVSpec(1, 8)], "f32")).groups[0], np.zeros(4, np.int64)
    pages.allocate(table, 0)
    pages.share(int(table[0]), table, 1)
    view(int(table[0]), pages.page_bytes)[:] = 1

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pages, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pages.own(table, 1)
    assert (pages.n_used, table[0]) == (1, table[1])
    pages.allocate(table, 2)
    assert not view(int(table[2]), pages.page_bytes).any()
