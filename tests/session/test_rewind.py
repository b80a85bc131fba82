"""`Session.rewind`, also behind sliding windows."""

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import (
    InvalidRequestError,
    Model,
)
from sessions import LONG, fresh


def test_rewind_truncates_the_context(load_tiny):
    with load_tiny() as model, model.create_session() as session:
        expected = session.eval([1, 2, 3, 4, 5], all_logits=True)
        session.rewind(2)
        assert session.n_past == 2
        with pytest.raises(InvalidRequestError, match="no token has been evaluated"):
            session.logits  # noqa: B018
        np.testing.assert_array_equal(session.eval([3, 4, 5], all_logits=True), expected[2:])
        for wrong in (-1, 6, True, 1.0):
            with pytest.raises(InvalidRequestError, match="n_past must be"):
                session.rewind(wrong)
        assert session.n_past == 5


def test_rewind_lowers_n_reused(model: Model) -> None:
    first, second = model.create_session(), model.create_session()
    first.eval(LONG)
    second.eval(LONG)
    second.rewind(7)
    assert second.n_reused == 7


@pytest.fixture
def windowed(load_tiny: LoadTiny) -> Model:
    return load_tiny("gemma3", n_layer=6, context_length=400)


def test_rewind_behind_sliding_windows(windowed: Model) -> None:
    session = windowed.create_session()
    session.eval(LONG)
    list(session.generate(LONG, max_tokens=60, ignore_eos=True))
    for n, again in ((150, 50), (50, 50)):
        session.rewind(n)
        list(session.generate([1, 2], max_tokens=1, ignore_eos=True))
        assert session.stats.n_prompt == n + 2, "evicted tokens count"
        assert session.stats.n_prompt - session.stats.n_reused == again + 2
        session.rewind(n + 2)
        session.eval([3])
        tokens = [*(LONG + LONG)[:n], 1, 2, 3]
        np.testing.assert_array_equal(session.logits, fresh(windowed, tokens).logits)


def test_the_last_token_can_always_be_evaluated_again(windowed: Model) -> None:
    session = windowed.create_session(reuse=False)
    for n, token in enumerate(LONG[:70], start=1):
        session.eval([token])
        assert session.cache.can_truncate(n - 1)
