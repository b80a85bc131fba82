"""Cache strategies, and a cache that runs out of memory."""

import numpy as np
import pytest

from llamacli import (
    InvalidRequestError,
    Model,
)
from llamacli.kv import CacheStrategy, OutOfMemoryError
from sessions import LONG, fresh


@pytest.mark.parametrize("strategy", CacheStrategy)
def test_no_strategy_changes_logits(strategy: CacheStrategy, model: Model) -> None:
    session = model.create_session(strategy=strategy, reuse=False)
    for start in (0, 7, 8, 9):
        session.eval(LONG[start : start + 7] if start == 0 else LONG[start - 0 : start + 1])
        tokens = list(session.tokens)
        np.testing.assert_array_equal(session.logits, fresh(model, tokens).logits)
        held = 0 if strategy in ("disabled", "long_sequence_only") else len(tokens)
        assert len(session.cache.tokens) == held
    if strategy == "disabled":
        assert not any(table.any() for table in session.cache.tables)


def test_tokens_behind_a_gap_are_evaluated_again(model: Model) -> None:
    session = model.create_session(strategy="disabled", reuse=False)
    session.load_state(fresh(model, LONG[:9]).save_state())
    session.remove_range(0, 3)
    session.eval(LONG[9:10])
    np.testing.assert_array_equal(session.logits, fresh(model, LONG[3:10]).logits)


def test_cells_behind_a_gap_that_were_loaded_are_evaluated_again(model: Model) -> None:
    """All tokens see the same ones, whenever a strategy drops the cells."""
    other, session = fresh(model, LONG[:50]), model.create_session(strategy="disabled", reuse=False)
    other.remove_range(6, 17)
    session.load_state(other.save_state())
    np.testing.assert_array_equal(session.logits, other.logits)
    tokens = LONG[:6] + LONG[17:52]
    for n in (40, 41):
        session.eval([tokens[n - 1]])
        np.testing.assert_array_equal(session.logits, fresh(model, tokens[:n]).logits)


def test_long_sequences_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.kv.strategies.LONG_SEQUENCE", 20)
    session = model.create_session(strategy="long_sequence_only", reuse=False)
    held = []
    for token in LONG[:24]:
        session.eval([token])
        held.append(len(session.cache.tokens))
    assert held == [0] * 20 + [21, 22, 23, 24]
    np.testing.assert_array_equal(session.logits, fresh(model, LONG[:24]).logits)


@pytest.mark.parametrize("strategy", ["always", "long_sequence_only", "disabled"])
def test_only_adaptive_reads_available_memory(strategy: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.kv.strategies.available_memory", lambda: pytest.fail("nobody asked"))
    fresh(model, LONG[:5], strategy=strategy)


def test_unknown_strategy_raises(model: Model) -> None:
    with pytest.raises(InvalidRequestError, match="'never' is not one of always"):
        model.create_session(strategy="never")


def test_out_of_memory_names_both_figures(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = model.create_session()
    monkeypatch.setattr("llamacli.kv.pool.available_memory", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"needs \d+ bytes more, and 1000 are available") as raised:
        session.eval(LONG[:3])
    assert isinstance(raised.value, MemoryError)
    monkeypatch.undo()
    session.eval(LONG[:3])
    np.testing.assert_array_equal(session.logits, fresh(model, LONG[:3]).logits)
