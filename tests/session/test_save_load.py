"""`Session.save`, `load` and their bytes."""

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import (
    InvalidRequestError,
    Model,
    StateError,
    eval_batch,
)
from sessions import LONG, fresh


def test_save_after_an_interrupted_remove_range(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = fresh(model, LONG[:40])
    session.cache.remove(5, 9, lambda layer, keys: keys)  # what an interrupt leaves that comes right after it
    saved = session.save_state()
    other = model.create_session(reuse=False)
    other.load_state(saved)
    assert other.tokens == session.tokens == tuple(LONG[:40])
    for one in (session, other):
        one.eval(LONG[40:42])
        np.testing.assert_array_equal(one.logits, fresh(model, LONG[:42]).logits)


def test_state_of_another_rope_variant_is_refused(load_tiny: LoadTiny) -> None:
    model = load_tiny("phi3_long", "fp32")
    lengths = sorted({model.program.rope_variant(n): n for n in (8, model.config.n_ctx)}.values())
    assert len(lengths) == 2, "long factors make another rope_variant"
    tokens = [token % model.config.n_vocab for token in LONG[:5]]
    short, long = (fresh(model, tokens, n_ctx=n) for n in lengths)
    with pytest.raises(StateError, match="another length"):
        long.load_state(short.save_state())
    assert long.tokens == tuple(tokens)
    long.eval([1])
    np.testing.assert_array_equal(long.logits, fresh(model, [*tokens, 1], n_ctx=lengths[1]).logits)


def test_invalid_states_and_tokens_raise(model: Model) -> None:
    session = fresh(model, LONG[:5])
    for wrong in (5, None, "text"):
        with pytest.raises(StateError, match="a state is bytes, not"):
            session.load_state(wrong)
    for call in (session.eval, session.generate, session.reuse, lambda ids: eval_batch([(session, ids)])):
        with pytest.raises(InvalidRequestError, match="sequence of ids, not 5"):
            call(5)
    with model.kv_cache() as cache, pytest.raises(StateError, match="a state is bytes, not int"):
        cache.state_load(0, 5)
    assert session.tokens == tuple(LONG[:5])
