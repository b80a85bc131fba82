"""Hidden states of the tokens before, as an input of a graph."""

import attrs
import numpy as np
import pytest

from llamacli import Graph, PluginError
from llamacli.engine import Engine, Span
from llamacli.graph import Value
from llamacli.testing import formulas
from verbs import TOKENS, WIDTH, Params, Run, span


def with_attention(g: Graph, param: Params, x: Value) -> Value:
    q, k, v = (g.linear(x, param(name, 64, WIDTH)) for name in "qkv")
    return x + g.attention(q, g.store(k, v, head_dim=16), scale=0.3)


@pytest.mark.parametrize("mixes", ["before", "behind", "not at all"])
def test_rows_are_those_given_with_their_spans(mixes: str, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        if mixes == "before":
            x = with_attention(g, param, x)
        h = g.previous_hidden(40)
        if mixes == "behind":
            with_attention(g, param, x)
        return h

    run, lengths = Run(engine, build), (3, 12, 3)
    hidden = np.random.default_rng(0).normal(size=(18, 40)).astype(np.float32)
    assert run.program.graph.reads_hidden
    np.testing.assert_array_equal(run.logits, 0)

    def spans() -> list[Span]:
        ends = np.cumsum(lengths)
        return [
            attrs.evolve(span(run.program, n), hidden=None if n == 12 else hidden[end - n : end])
            for n, end in zip(lengths, ends, strict=True)
        ]

    expected = hidden.copy()
    expected[3:15] = 0
    logits = run.program.forward(np.array(TOKENS, np.int32), spans(), [one.n for one in spans()])
    assert formulas.nmse(logits, formulas.linear(expected, run["output"])) < 1e-12
    for n_last in ((1, 1, 1), (2, 0, 1), (0, 5, 3), (0, 0, 1)):
        rows = [row for end, n in zip(np.cumsum(lengths), n_last, strict=True) for row in range(end - n, end)]
        chosen = run.program.forward(np.array(TOKENS, np.int32), spans(), n_last)
        np.testing.assert_allclose(chosen, logits[rows], rtol=1e-6)


def test_the_width_is_positive() -> None:
    with pytest.raises(PluginError, match="previous_hidden: a hidden state of 0 numbers"):
        Graph().previous_hidden(0)
