"""`Session.fork`."""

import numpy as np

from llamacli import (
    Model,
)
from sessions import LONG, RANDOM, fresh


def test_fork_draws_the_same_tokens(model: Model) -> None:
    session = fresh(model, LONG[:20])
    [session.sample(RANDOM) for _ in range(3)]
    child = session.fork()
    np.testing.assert_array_equal(child.logits, session.logits)
    drawn = [[token.id for token in one.generate([], RANDOM, max_tokens=10)] for one in (child, session)]
    assert drawn[0] == drawn[1]
    child.eval([1, 2])
    assert (session.n_past, child.n_past) == (30, 32)
