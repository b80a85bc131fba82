"""`eval_batch`: many sessions in one pass."""

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import (
    Model,
    eval_batch,
)
from llamacli.kv import KVSequence, OutOfMemoryError
from sessions import LONG, fresh


@pytest.mark.parametrize("mode", ["fp32", "auto"])
def test_logits_equal_those_of_single_evaluation(mode: str, load_tiny: LoadTiny) -> None:
    model = load_tiny("q8_0", mode)
    sessions = [model.create_session(reuse=False) for _ in range(9)]
    alone = [model.create_session(reuse=False) for _ in range(9)]
    random = np.random.RandomState(1)
    for n_most in (20, 1, 1, 3):
        work = [random.randint(0, 128, random.randint(1, n_most + 1)).tolist() for _ in sessions]
        eval_batch(zip(sessions, work, strict=True))
        for session, other, tokens in zip(sessions, alone, work, strict=True):
            other.eval(tokens)
            assert session.tokens == other.tokens
            np.testing.assert_array_equal(session.logits, other.logits)


def test_more_tokens_than_a_batch(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.engine.batching.N_BATCH", 16)
    sessions = [model.create_session(reuse=False) for _ in range(3)]
    eval_batch(zip(sessions, (LONG[:40], [], LONG[40:59]), strict=True))
    np.testing.assert_array_equal(sessions[0].logits, fresh(model, LONG[:40]).logits)
    np.testing.assert_array_equal(sessions[2].logits, fresh(model, LONG[40:59]).logits)
    assert sessions[1].n_past == 0


def test_cache_types_may_differ(model: Model) -> None:
    sessions = [model.create_session(kv_type=kind, reuse=False) for kind in ("f32", "f16", "f32")]
    eval_batch((session, LONG[:20]) for session in sessions)
    for session, kind in zip(sessions, ("f32", "f16", "f32"), strict=True):
        np.testing.assert_array_equal(session.logits, fresh(model, LONG[:20], kv_type=kind).logits)


def test_refusals_change_nothing(model: Model, load_tiny: LoadTiny) -> None:
    one, other = fresh(model, LONG[:10]), fresh(model, LONG[:12])
    for work in ([(one, [1]), (one, [2])], [(one, [1]), (other, [128])], [(one, [1]), (other, [1] * 300)],
                 [(one, [1]), (fresh(load_tiny("mha"), [1]), [1])]):  # fmt: skip
        with pytest.raises(Exception, match=r"twice|index 0|overflow|different models"):
            eval_batch(work)
    assert (one.n_past, other.n_past) == (10, 12)
    one.eval(LONG[10:20])
    np.testing.assert_array_equal(one.logits, fresh(model, LONG[:20]).logits)


def test_failure_in_one_pool_changes_no_session(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = fresh(model, LONG[:10], kv_type="f16"), fresh(model, LONG[:12], kv_type="f32")
    real = KVSequence.reserve

    def refuse(sequence: KVSequence, start: int, n: int, **_: object) -> None:
        if sequence is other.cache:
            raise OutOfMemoryError(1, 0)
        real(sequence, start, n)

    with monkeypatch.context() as patch:
        patch.setattr(KVSequence, "reserve", refuse)
        with pytest.raises(OutOfMemoryError):
            eval_batch([(one, [1, 2]), (other, [3])])
    assert (one.n_past, other.n_past) == (10, 12)
    eval_batch([(one, [1, 2]), (other, [3])])
    np.testing.assert_array_equal(one.logits, fresh(model, [*LONG[:10], 1, 2], kv_type="f16").logits)
    np.testing.assert_array_equal(other.logits, fresh(model, [*LONG[:12], 3], kv_type="f32").logits)
