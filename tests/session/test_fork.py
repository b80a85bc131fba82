"""`Session.fork`."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from llamacli import Model, Session
from sessions import LONG, PROMPT, RANDOM, fresh, logits_after


def test_fork_draws_the_same_tokens(model: Model) -> None:
    session = fresh(model, LONG[:20])
    [session.sample(RANDOM) for _ in range(3)]
    child = session.fork()
    np.testing.assert_array_equal(child.logits, session.logits)
    drawn = [[token.id for token in one.generate([], RANDOM, max_tokens=10)] for one in (child, session)]
    assert drawn[0] == drawn[1]
    child.eval([1, 2])
    assert (session.n_past, child.n_past) == (30, 32)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_copies_are_forks(model: Model, session: Session, make: Callable[[Session], Session]) -> None:
    session.eval(PROMPT)
    with make(session) as child:
        assert (child.model, child.tokens) == (model, session.tokens)
        child.eval([1, 2])
        assert session.n_past == len(PROMPT)
        np.testing.assert_array_equal(session.logits, logits_after(model, PROMPT))
        np.testing.assert_array_equal(child.logits, logits_after(model, [*PROMPT, 1, 2]))


def test_pickling_is_refused(model: Model, session: Session) -> None:
    with pytest.raises(TypeError, match="use save_state and load_state"):
        pickle.dumps(session)
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a model cannot be copied or pickled"):
            make(model)
