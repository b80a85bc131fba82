"""States of ops: what is kept before drafted tokens."""

import numpy as np
import pytest

from llamacli.engine import Engine, Span
from llamacli.ops.values import Value
from verbs import Run, span

TOKENS = np.array([3, 11, 0, 19, 7, 2, 16, 5], np.int32)


def conv(g, param, x: Value) -> Value:
    return g.short_conv(x, param("conv", x.width, 4))


def recurrence(g, param, x: Value) -> Value:
    small = g.scale(x, 0.1)
    return g.linear_state(small, small, x, small, n_head=4)


@pytest.mark.parametrize("build", [conv, recurrence])
@pytest.mark.parametrize("n_behind", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 1, 4])
def test_a_batch_of_drafts_alone_keeps_the_state_before_it(build, n_behind: int, start: int, engine: Engine) -> None:
    program = Run(engine, build).program
    whole = program.forward(TOKENS, [span(program, len(TOKENS))], [len(TOKENS)])
    sequence = span(program, len(TOKENS) + 3).sequence

    def evaluate(tokens: np.ndarray, at: int, n_drafts: int) -> np.ndarray:
        sequence.reserve(at, len(tokens), n_behind=n_drafts)
        rows = program.forward(tokens, [Span(sequence, at, len(tokens))], [len(tokens)])
        sequence.commit(tokens.tolist(), n_ahead=n_drafts)
        return rows

    if start:
        evaluate(TOKENS[:start], 0, 0)
    stop = start + 3 - n_behind
    evaluate(np.r_[TOKENS[start:stop], np.full(n_behind, 13)].astype(np.int32), start, n_behind)
    sequence.truncate(stop)
    assert (evaluate(TOKENS[stop:], stop, 0) == whole[stop:]).all()
