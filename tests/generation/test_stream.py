"""Steps of a sequence: draw, take, advance, settle a draft."""

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import Model
from llamacli.generation.drafters import PromptLookup
from llamacli.generation.drafting import Draft
from llamacli.generation.text import TokenText
from sessions import LONG, fresh


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny("gqa")


def test_drafted_tokens_have_logits_and_the_rest_of_a_draft_is_dropped(model: Model) -> None:
    with fresh(model, LONG[:5]) as session:
        session.draft = Draft(PromptLookup(), 3, tokens=LONG[6:9])
        session.eval_ahead(LONG[5], LONG[6:9])
        assert session.advance(LONG[6], accept=True)
        np.testing.assert_array_equal(session.logits, fresh(model, LONG[:7]).logits)
        other = LONG[7] + 1
        assert not session.advance(other, accept=True)
        assert session.tokens == tuple(session.cache.tokens) == tuple(LONG[:7])
        assert (session.context, session.n_missing) == ([*LONG[:7], other], 1)
        assert (session.draft.tokens, session.draft.n_accepted_in_all) == ((), 1)
        session.eval([other])
        np.testing.assert_array_equal(session.logits, fresh(model, [*LONG[:7], other]).logits)
        assert session._sampler.history == [LONG[6], other]


def test_a_drawn_token_is_neither_accepted_nor_evaluated(model: Model) -> None:
    with fresh(model, LONG[:5]) as session:
        session.text = TokenText(session.decoder(), (), frozenset(), 1)
        token = session.draw()
        assert [one.id for one in session.take(token)] == [token]
        assert (session.text.finish_reason, session.n_left) == ("length", 0)
        assert session._sampler.history == []
        assert session.tokens == tuple(LONG[:5])
