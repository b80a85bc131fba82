"""KeyboardInterrupt at any call leaves sessions and caches consistent."""

import contextlib
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import llamacli
from conftest import LoadTiny
from llamacli import InvalidRequestError, Model
from llamacli.generation.stream import eval_batch
from llamacli.kernels.kv_types.types import PAGE
from llamacli.kv import KVPool, KVSequence
from llamacli.session import Session

CORE = Path(llamacli.__file__).parent
WATCHED = tuple(
    str(CORE / part) for part in ("session.py", "generation", "kv", "engine/batching.py", "util/locking.py")
)
TOKENS = np.random.RandomState(3).randint(0, 32, 90).tolist()
OTHERS = TOKENS[:70] + TOKENS[10:30]
STRIDE = 89
"""Stride over the two or three thousand calls, of which each may be interrupted."""


def interrupted(work: Callable[[list[Session]], None], sessions: list[Session], n: int) -> bool:
    """Interrupt at the n-th call or return from C; False if fewer."""
    left = n

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(WATCHED):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work(sessions)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
    return left < 0


def check_reference_counts(pool: KVPool, sequences: weakref.WeakSet[KVSequence]) -> None:
    """Compare reference counts with tables; each cell needs a page."""
    pool.collect()
    for g, pages in enumerate(pool.groups):
        held = Counter(page for sequence in sequences for page in sequence.tables[g].tolist() if page)
        assert {page: pages.ref_count(page) for page in held} == held
        assert pages.n_used == len(held)
    for sequence in sequences:
        for group, table, first in zip(pool.layout.groups, sequence.tables, sequence.first_cells, strict=True):
            n_pages = min(1, len(sequence.tokens)) if group.recurrent else -(-len(sequence.tokens) // PAGE)
            assert table[first // PAGE : n_pages].all()


def use(model: Model, sessions: list[Session]) -> None:
    """Exercise all operations that change a cache."""
    one = model.create_session()
    sessions.append(one)
    one.eval(TOKENS[:70])
    one.eval([TOKENS[70]])
    two = model.create_session()
    sessions.append(two)
    eval_batch([(two, OTHERS), (one, TOKENS[71:])])
    one.rewind(75)
    one.eval([1])
    three = two.fork()
    sessions.append(three)
    three.rewind(70)
    three.reuse(TOKENS)
    one.load_state(three.save_state())
    with contextlib.suppress(InvalidRequestError):  # the cells are evicted from a window
        two.remove_range(80, 85)
        two.remove_range(60, 70)
    three.close()


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts while a generator is closed
@pytest.mark.parametrize(
    "variant", ["gqa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen35"))]
)
def test_cache_consistent_after_interrupt_anywhere(
    variant: str, load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny(variant)
    pool = model.kv_pool()
    sequences: weakref.WeakSet[KVSequence] = weakref.WeakSet()
    begin = KVSequence.__init__

    def noted(sequence: KVSequence, *args: object) -> None:
        begin(sequence, *args)
        sequences.add(sequence)

    monkeypatch.setattr(KVSequence, "__init__", noted)
    expected: dict[tuple[int, ...], np.ndarray] = {}

    def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
        if tokens not in expected:
            with model.create_session(reuse=False) as session:
                session.eval(tokens)
                expected[tokens] = session.logits.copy()
        return expected[tokens]

    def check(session: Session) -> None:
        more = (*session.tokens, 5)
        with model.create_session() as other:  # shares what can be shared
            other.eval(more)
            np.testing.assert_array_equal(other.logits, logits_after(more))
        with model.create_session() as other:
            other.load_state(session.save_state())
            assert other.tokens == session.tokens
        session.eval([5])
        if session.cache.first_stale_cell is None:
            np.testing.assert_array_equal(session.logits, logits_after(more))
        session.close()

    for n in itertools.count(step=STRIDE):
        sessions: list[Session] = []
        came = interrupted(lambda sessions: use(model, sessions), sessions, n)
        check_reference_counts(pool, sequences)
        while sessions:
            with contextlib.suppress(llamacli.ClosedError):
                check(sessions.pop())
        check_reference_counts(pool, sequences)
        for index in model._prefixes.values():
            index.clear()
        assert pool.n_used_bytes == 0
        if not came:
            break
