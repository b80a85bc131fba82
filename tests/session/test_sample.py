"""`Session.sample` and `Session.draw`."""

import numpy as np
import pytest

from llamacli import (
    InvalidRequestError,
    SamplingParams,
    Session,
)
from sessions import PROMPT, RANDOM


def test_greedy_by_default(session: Session) -> None:
    session.eval(PROMPT)
    before = session.logits.copy()
    assert session.sample() == session.sample(SamplingParams()) == int(before.argmax())
    np.testing.assert_array_equal(session.logits, before)


def test_needs_logits(session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="no token has been evaluated"):
        session.sample()


def test_sample_does_not_evaluate(session: Session) -> None:
    session.eval(PROMPT)
    session.sample(RANDOM)
    assert session.n_past == len(PROMPT)


def test_penalty_counts_generated_tokens_only(session: Session) -> None:
    session.eval(PROMPT)
    before = session.logits.copy()
    first = session.sample(SamplingParams(repeat_penalty=1e6))
    assert first == int(before.argmax())
    assert session.sample(SamplingParams(repeat_penalty=1e6)) != first


def test_the_same_seed_draws_the_same(session: Session) -> None:
    def draw(n: int) -> list[int]:
        session.eval(PROMPT[:1])
        flat = np.zeros(128, np.float32)
        return [int(session._sampler.sample(flat.copy(), RANDOM)) for _ in range(n)]

    session.set_seed(7)
    first = draw(20)
    session.set_seed(7)
    again, further = draw(20), draw(20)
    session.set_seed(8)
    assert first == again
    assert first not in (further, draw(20))


@pytest.mark.parametrize("seed", [-2, 1.5, True, "7"])
def test_invalid_seed_raises(seed: object, session: Session) -> None:
    with pytest.raises(InvalidRequestError, match="seed"):
        session.set_seed(seed)
