"""Programs: batches, modes, extreme values, last logits."""

from pathlib import Path

import numpy as np
import pytest

from llamacli import ArrayFile, Graph, QuantMode, Rope, Value
from llamacli.engine import Engine, Span
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.testing import formulas
from verbs import N_VOCAB, TOKENS, WIDTH, Params, Run, span


def test_sequences_of_a_batch_are_independent(engine: Engine) -> None:
    """Compare spans of several sequences with each sequence alone.

    They lie at different positions, and results are equal bit for bit.
    """

    def build(g: Graph, param: Params, x: Value) -> Value:
        q, k, v = (g.linear(x, param(name, 64, WIDTH)) for name in "qkv")
        q, k = (g.rope(value, Rope(16, False), 16) for value in (q, k))
        return x + g.attention(q, g.store(k, v, head_dim=16, window=9), scale=0.3)

    run = Run(engine, build)
    tokens = np.array(TOKENS, np.int32)
    forward, begin = run.program.forward, [tokens[:3], tokens[3:15], tokens[15:16]]
    alone, together = ([span(run.program, len(part), 32) for part in begin] for _ in range(2))
    expected = [forward(part, [at], [len(part)]) for part, at in zip(begin, alone, strict=True)]
    actual = forward(np.concatenate(begin), together, [len(part) for part in begin])
    np.testing.assert_array_equal(actual, np.concatenate(expected))
    following = [Span(at.sequence, at.n, 1) for at in (*alone, *together)]
    for at in following:
        at.sequence.reserve(at.start, 1)
    expected = [forward(tokens[:1], [at], [1]) for at in following[:3]]
    actual = forward(np.repeat(tokens[:1], 3), following[3:], [1] * 3)
    np.testing.assert_array_equal(actual, np.concatenate(expected))
    longer = [Span(at.sequence, at.start + 1, n) for at, n in zip(following, (2, 1, 4, 2, 1, 4), strict=True)]
    for at in longer:
        at.sequence.reserve(at.start, at.n)
    expected = [forward(tokens[: at.n], [at], [1]) for at in longer[:3]]
    actual = forward(np.concatenate([tokens[: at.n] for at in longer[3:]]), longer[3:], [1] * 3)
    np.testing.assert_array_equal(actual, np.concatenate(expected))


def test_extreme_values_stay_finite(engine: Engine) -> None:
    """Large gates and scores: no overflow where the formula has a limit."""

    def build(g: Graph, param: Params, x: Value) -> Value:
        large = g.linear(x, param("large", WIDTH, WIDTH))
        for _ in range(3):
            large = g.linear(large, param("larger", WIDTH, WIDTH))
        gated = g.swiglu(large, x)
        return g.rms_norm(
            g.attention(large, g.store(large, gated, head_dim=16), scale=10.0), param("norm", WIDTH), 1e-5
        )

    run = Run(engine, build)
    assert np.abs(formulas.linear(run.x, run["large"])).max() > 1
    assert np.isfinite(run.logits).all()


@pytest.mark.parametrize(("mode", "bound"), [("auto", 1e-12), ("fp32", 1e-12), ("q8", 1e-3), ("q4", 0.05)])
def test_modes(mode: str, bound: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.linear(x, param("up", 96, WIDTH, bias=True)), mode=mode)
    error = formulas.nmse(
        run.logits, formulas.linear(formulas.linear(run.x, run["up"]) + run["up.bias"], run["output"])
    )
    assert bound / 1000 < error < bound or error < bound <= 1e-12


def test_only_the_last_tokens_logits(engine: Engine) -> None:
    graph = Graph()
    table, output = (Param(Tensor(f"{name}.weight", (20, 64))) for name in ("token_embd", "output"))
    graph.linear(graph.embed(table), output)
    random = np.random.default_rng(1)
    arrays = {f"{name}.weight": random.normal(size=(20, 64)).astype(np.float32) for name in ("token_embd", "output")}
    program = engine.compile(graph, ArrayFile(Path("m"), Metadata({}), arrays), QuantMode.FP32)
    tokens, spans = np.array(TOKENS, np.int32), [span(program, len(TOKENS))]
    whole = program.forward(tokens, spans, [len(TOKENS)])
    last = program.forward(tokens, spans, [1])
    assert (whole.shape, last.shape) == ((18, 20), (1, 20))
    np.testing.assert_array_equal(last[0], whole[-1])
    whole[:] = 0
    assert program.forward(tokens, spans, [len(TOKENS)]).any(), "each call returns an array of its own"


def test_attention_may_come_last(engine: Engine) -> None:
    """Compute all rows of a last attention, and return the wanted ones."""
    random = np.random.default_rng(4)
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (N_VOCAB, 32))))
    graph.attention(x, graph.store(x, x, head_dim=16), scale=0.3)
    arrays = {"token_embd.weight": random.normal(0, 1, (N_VOCAB, 32)).astype(np.float32)}
    program = engine.compile(graph, ArrayFile(Path("m"), Metadata({}), arrays), QuantMode.FP32)
    tokens = np.array(TOKENS, np.int32)
    whole = program.forward(tokens, [span(program, len(tokens))], [len(tokens)])
    last = program.forward(tokens, [span(program, len(tokens))], [1])
    np.testing.assert_array_equal(last, whole[-1:])


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("n_last", [(1, 0, 1), (0, 12, 0), (0, 0, 0), (3, 12, 1), (0, 1, 1)])
def test_chosen_rows_equal_those_of_a_whole_evaluation(n_last: tuple[int, ...], hidden: bool, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        q, k, v = (g.linear(x, param(name, 64, WIDTH)) for name in "qkv")
        x = x + g.attention(q, g.store(k, v, head_dim=16), scale=0.3)
        return x + g.linear(
            g.swiglu(g.linear(x, param("gate", 96, WIDTH)), g.linear(x, param("up", 96, WIDTH))),
            param("down", WIDTH, 96),
        )

    run = Run(engine, build, mode="q8")
    assert run.program.has_hidden
    tokens, lengths = np.array(TOKENS, np.int32)[:16], (3, 12, 1)

    def spans() -> list[Span]:
        return [span(run.program, n, 32) for n in lengths]

    whole = run.program.forward(tokens, spans(), lengths, hidden=hidden)
    ends = np.cumsum(lengths)
    wanted = [row for end, n in zip(ends, n_last, strict=True) for row in range(end - n, end)]
    chosen = run.program.forward(tokens, spans(), n_last, hidden=hidden)
    assert whole.shape == (16, WIDTH if hidden else run.logits.shape[1])
    np.testing.assert_array_equal(chosen, whole[wanted])
    np.testing.assert_array_equal(run.program.forward(tokens, spans(), lengths, hidden=hidden), whole)
    logits, states = run.program.forward_with_hidden(tokens, spans(), n_last)
    if hidden:
        np.testing.assert_array_equal(states, whole)
    else:
        np.testing.assert_array_equal(logits, whole[wanted])


def test_a_program_is_extended_by_another_graph_of_the_file(engine: Engine, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    shapes = {"token_embd.weight": (20, 64), "output.weight": (32, 64), "more.weight": (64, 64), "norm.weight": (64,)}
    arrays = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    embd, output, more, norm = (Param(Tensor(name, shape)) for name, shape in shapes.items())
    first, second = Graph(), Graph()
    first.linear(first.embed(embd), output)
    second.linear(second.rms_norm(second.linear(second.embed(embd), more), norm, 1e-5), output)
    tokens = np.array(TOKENS, np.int32)
    for mode in QuantMode:
        program = engine.compile(first, ArrayFile(tmp_path, Metadata({}), arrays), mode)
        before = program.forward(tokens, [span(program, len(tokens))], [len(tokens)])
        file = ArrayFile(tmp_path, Metadata({}), arrays)
        extended = program.extended(second, file)
        file.close()
        alone = engine.compile(second, ArrayFile(tmp_path, Metadata({}), arrays), mode)
        found, expected = (one.forward(tokens, [span(one, len(tokens))], [len(tokens)]) for one in (extended, alone))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(program.forward(tokens, [span(program, len(tokens))], [len(tokens)]), before)
