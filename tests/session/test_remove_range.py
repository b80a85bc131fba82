"""`Session.remove_range` (context shift) and `clear_and_reseed`."""

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import (
    InvalidRequestError,
    Model,
    Session,
)
from llamacli.testing import formulas
from sessions import LONG, fresh


@pytest.mark.parametrize("variant", ["gqa", "rope_yarn", "rope_linear", "rope_freqs"])
def test_keys_behind_a_gap_are_shifted(variant: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(variant)
    session = fresh(model, LONG[:50])
    logits = session.logits.copy()
    session.remove_range(5, 23)
    rest = LONG[:5] + LONG[23:50]
    assert (session.n_past, session.pos_max, session.tokens) == (32, 31, tuple(rest))
    np.testing.assert_array_equal(session.logits, logits)
    # Keys and values of the first layer depend on a token and its position alone.
    for mine, expected in zip(session.cache.read(0, 32), fresh(model, rest).cache.read(0, 32), strict=True):
        assert formulas.nmse(mine, expected) < 1e-9
    session.eval([1, 2, 3])
    assert session.n_past == 35


def test_range_at_the_end_is_a_rewind(model: Model) -> None:
    session = fresh(model, LONG[:30])
    session.remove_range(20)
    session.eval(LONG[20:40])
    np.testing.assert_array_equal(session.logits, fresh(model, LONG[:40]).logits)


@pytest.mark.parametrize(("p0", "p1"), [(-1, 3), (5, 4), (0, 31), (31, -1), (0, -2), (True, 3), (1.0, 3)])
def test_invalid_ranges_raise(p0: object, p1: object, model: Model) -> None:
    session = fresh(model, LONG[:30])
    with pytest.raises(InvalidRequestError, match="positions"):
        session.remove_range(p0, p1)
    session.eval(LONG[30:40])
    np.testing.assert_array_equal(session.logits, fresh(model, LONG[:40]).logits)


def test_clear_and_reseed_evaluates_sinks_and_tail(model: Model) -> None:
    session = fresh(model, LONG, n_ctx=128)
    session.clear_and_reseed(LONG[:4], LONG[-20:])
    assert session.pos_max == 23
    np.testing.assert_array_equal(session.logits, fresh(model, LONG[:4] + LONG[-20:]).logits)
    with pytest.raises(InvalidRequestError, match="at least one token"):
        session.clear_and_reseed([], [])
    assert session.pos_max == 23


def test_cells_behind_a_gap_are_not_shared(model: Model) -> None:
    """It remembers what was cut out, and what others hold does not."""
    model.prefix_cache_bytes = 0
    first = model.create_session()
    first.eval(LONG[:50])
    first.remove_range(20, 30)
    rest = LONG[:20] + LONG[30:60]
    copies = [model.create_session(reuse=False) for _ in range(2)]
    copies[0].load_state(first.save_state())
    copies[1].cache.copy(first.cache, 0, 35)
    for source in (first, *(Session(model, sequence=copy.cache.fork()) for copy in copies)):
        with model.create_session() as second:
            second.eval(rest)
            assert second.n_reused == 20
            np.testing.assert_array_equal(second.logits, fresh(model, rest).logits)
            source.rewind(20)
    whole = model.create_session()
    whole.eval(rest)
    first.eval(LONG[20:50])
    first.remove_range(15, 20)
    held = first.fork()
    held._prefixes = None
    for session in (first, held):
        session.eval([1, 2, 3])
    np.testing.assert_array_equal(first.logits, held.logits)


def test_windows_keep_cells_that_a_rewind_sees(load_tiny: LoadTiny) -> None:
    """Cells that move onto a page with evicted cells."""
    model = load_tiny("gemma3", n_layer=6, context_length=400)
    for n, start, stop in ((253, 230, 238), (225, 25, 39), (142, 99, 124), (91, 9, 20)):
        session = fresh(model, (LONG * 3)[:n])
        session.remove_range(start, stop)
        for layer, state in enumerate(model.program.states):
            for n_left in range(start + 1, session.n_past):
                if state.window is not None and session.cache.can_truncate(n_left):
                    seen = session.cache.read(layer, n_left)[1][:, max(0, n_left - state.window + 1) :]
                    assert seen.any(axis=-1).all()


@pytest.mark.parametrize("variant", ["gemma3", "gemma4_e", "gptoss_gqa", "phi3_long", "phi3_partial_long"])
def test_keys_of_families_behind_a_gap_are_shifted(variant: str, load_tiny: LoadTiny) -> None:
    model = load_tiny(variant, "fp32")
    tokens = [token % model.config.n_vocab for token in LONG[:30]]
    session = fresh(model, tokens)
    try:
        session.remove_range(22, 25)
    except InvalidRequestError:
        assert any(state.window for state in model.program.states)
        return
    rest = tokens[:22] + tokens[25:]
    first = 0 if model.program.states[0].window is None else 27 - model.program.states[0].window + 1
    pairs = zip(session.cache.read(0, 27), fresh(model, rest).cache.read(0, 27), strict=True)
    for axis, (mine, expected) in zip((2, 1), pairs, strict=True):
        kept = np.arange(first, 27)
        assert formulas.nmse(mine.take(kept, axis), expected.take(kept, axis)) < 1e-9
