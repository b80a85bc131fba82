"""K-shift: cached keys moved to lower positions."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import LoadTiny
from llamacli import ArrayFile, Graph, InvalidRequestError, QuantMode, Rope, Value
from llamacli.engine import Engine, Program, Span
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.ops.shift_plan import ShiftPlan

WIDTH, HEAD_DIM = 32, 16
ROPE = Rope(HEAD_DIM, interleaved=False)
Keys = Callable[[Graph, Callable[..., Param], Value], Value]


def compile_keys(engine: Engine, keys: Keys, weights: dict[str, np.ndarray] | None = None) -> Program:
    """Compile a program of one layer with these keys."""
    random, arrays = np.random.default_rng(1), dict[str, np.ndarray]()

    def param(name: str, *shape: int, bias: bool = False) -> Param:
        arrays[f"{name}.weight"] = random.normal(1, 0.3, shape).astype(np.float32)
        arrays[f"{name}.bias"] = random.normal(0, 0.3, shape).astype(np.float32)
        return Param(Tensor(f"{name}.weight", shape), Tensor(f"{name}.bias", shape) if bias else None)

    graph = Graph()
    x = graph.embed(param("token_embd", 20, WIDTH))
    kv = graph.store(keys(graph, param, x), x, head_dim=HEAD_DIM)
    graph.attention(x, kv, scale=1.0)
    return engine.compile(graph, ArrayFile(Path("m"), Metadata({}), arrays | (weights or {})), QuantMode.FP32)


def keys_of(program: Program, tokens: list[int]) -> np.ndarray:
    """The cached keys of layer 0, float32 [n_head_kv, head_dim, n]."""
    sequence = KVSequence(KVPool(KVLayout.of(program.states, "f32")), 64)
    sequence.reserve(0, len(tokens))
    program.forward(np.array(tokens, np.int32), [Span(sequence, 0, len(tokens))], [len(tokens)])
    return sequence.read(0, len(tokens))[0]


def roped(g: Graph, x: Value) -> Value:
    return g.rope(x, ROPE, HEAD_DIM)


SHIFTED: dict[str, Keys] = {
    "rope": lambda g, param, x: roped(g, x),
    "norm, then rope": lambda g, param, x: roped(g, g.rms_norm(x, param("norm", HEAD_DIM), 1e-5, HEAD_DIM)),
    "rope, then norm": lambda g, param, x: g.rms_norm(roped(g, x), param("norm", HEAD_DIM), 1e-5, HEAD_DIM),
    "rope, then norm a head": lambda g, param, x: g.rms_norm(roped(g, x), param("norm", 2, HEAD_DIM), 1e-5, HEAD_DIM),
    "rope, then norm without weight": lambda g, param, x: g.rms_norm(roped(g, x), None, 1e-5, HEAD_DIM),
    "rope, then scale": lambda g, param, x: g.scale(roped(g, x), 0.5),
    "concat of a part with rope": lambda g, param, x: g.concat(
        g.columns(x, 0, 12, of=16), g.rope(g.columns(x, 3, 4), Rope(4, interleaved=True), 4), of=(12, 4)
    ),
    "concat, then norm": lambda g, param, x: g.rms_norm(
        g.concat(g.columns(x, 0, 8, of=16), g.rope(g.columns(x, 5, 16), Rope(8, interleaved=False), 8), of=(8, 8)),
        param("norm", HEAD_DIM),
        1e-5,
        HEAD_DIM,
    ),
    "no positions": lambda g, param, x: g.rms_norm(g.linear(x, param("k", WIDTH, WIDTH)), param("norm", WIDTH), 1e-5),
}


@pytest.mark.parametrize("keys", SHIFTED.values(), ids=SHIFTED)
def test_shifted_keys_are_those_of_the_lower_position(keys: Keys, engine: Engine) -> None:
    program = compile_keys(engine, keys)
    before, expected = keys_of(program, [3, 11, 7, 2, 19, 5]), keys_of(program, [3, 2, 19, 5])
    actual = program.shift_keys(0, before[..., 3:], 2, 64)
    np.testing.assert_allclose(actual, expected[..., 1:], atol=2e-6)
    assert actual.dtype == np.float32


REFUSED: dict[str, Keys] = {
    "rope, then norm with bias": lambda g, param, x: g.rms_norm(
        roped(g, x), param("norm", HEAD_DIM, bias=True), 1e-5, HEAD_DIM
    ),
    "rope, then norm over heads": lambda g, param, x: g.rms_norm(roped(g, x), param("norm", WIDTH), 1e-5),
    "rope, then layer norm": lambda g, param, x: g.layer_norm(roped(g, x), None, 1e-5, HEAD_DIM),
    "rope, then product": lambda g, param, x: g.linear(roped(g, x), param("k", WIDTH, WIDTH)),
    "two norms behind rope": lambda g, param, x: g.rms_norm(
        g.rms_norm(roped(g, x), param("inner", HEAD_DIM), 1e-5, HEAD_DIM), param("norm", HEAD_DIM), 1e-5, HEAD_DIM
    ),
    "concat across heads": lambda g, param, x: g.concat(g.columns(roped(g, x), 0, 16), g.columns(x, 0, 16)),
    "rope, then clamp": lambda g, param, x: g.clamp(roped(g, x), -1.0, 1.0),
    "rope, then mul": lambda g, param, x: g.mul(roped(g, x), x),
    "rope twice": lambda g, param, x: roped(g, roped(g, x)),
    "learned positions": lambda g, param, x: g.linear(x + g.positions(param("p", 64, WIDTH)), param("k", WIDTH, WIDTH)),
}


@pytest.mark.parametrize("keys", REFUSED.values(), ids=REFUSED)
def test_keys_that_cannot_be_shifted_are_refused(keys: Keys, engine: Engine) -> None:
    program = compile_keys(engine, keys)
    before = keys_of(program, [3, 11, 7])
    with pytest.raises(InvalidRequestError, match="the cached keys of layer 0 cannot be moved to other positions"):
        program.shift_keys(0, before, 1, 64)


def test_keys_with_a_zero_weight_are_refused(engine: Engine) -> None:
    zero = {"norm.weight": np.array([0.0] + [1.0] * (HEAD_DIM - 1), np.float32)}
    program = compile_keys(engine, SHIFTED["rope, then norm"], zero)
    with pytest.raises(InvalidRequestError, match="RmsNorm cannot undo"):
        program.shift_keys(0, keys_of(program, [3, 11, 7]), 1, 64)


@pytest.mark.parametrize(
    ("keys", "expected"), [("norm, then rope", set()), ("rope, then norm", {"norm.weight"}), ("no positions", set())]
)
def test_shifts_read_weights_behind_rope_only(keys: str, expected: set[str]) -> None:
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (20, WIDTH))))
    k = SHIFTED[keys](graph, lambda name, *shape: Param(Tensor(f"{name}.weight", shape)), x)
    graph.attention(x, graph.store(k, x, head_dim=HEAD_DIM), scale=1.0)
    assert {tensor.name for tensor in ShiftPlan(graph.ops, lambda tensor: np.ones(tensor.shape)).tensors()} == expected


@pytest.mark.parametrize("value_dim", [4, 12])
def test_values_that_are_a_part_of_shifted_keys(value_dim: int) -> None:
    """Latent attention: refused where the shift moves the part."""
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (20, HEAD_DIM))))
    rest = graph.rope(graph.columns(x, 4, 12), Rope(12, interleaved=False), 12)
    kv = graph.store(graph.concat(graph.columns(x, 0, 4), rest), None, head_dim=HEAD_DIM, value_dim=value_dim)
    graph.attention(x, kv, scale=1.0)
    plan = ShiftPlan(graph.ops, lambda tensor: np.ones(tensor.shape))
    keys = np.random.default_rng(1).normal(size=(1, HEAD_DIM, 3)).astype(np.float32)
    if value_dim == 4:
        np.testing.assert_array_equal(plan.shift(0, keys, 2, 64)[:, :4], keys[:, :4])
        return
    with pytest.raises(InvalidRequestError, match="cached values of layer 0 cannot be moved"):
        plan.shift(0, keys, 2, 64)


def test_the_op_at_fault_is_named(engine: Engine) -> None:
    program = compile_keys(engine, REFUSED["learned positions"])
    with pytest.raises(InvalidRequestError, match="Linear cannot undo how they depend on positions by Positions"):
        program.shift_keys(0, keys_of(program, [3, 11, 7]), 1, 64)


def test_values_that_depend_on_positions_are_refused(engine: Engine) -> None:
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (20, WIDTH))))
    graph.attention(x, graph.store(roped(graph, x), roped(graph, x), head_dim=HEAD_DIM), scale=1.0)
    arrays = {"token_embd.weight": np.ones((20, WIDTH), np.float32)}
    program = engine.compile(graph, ArrayFile(Path("m"), Metadata({}), arrays), QuantMode.FP32)
    with pytest.raises(InvalidRequestError, match=r"cached values of layer 0 cannot be moved .* by Rotate"):
        program.shift_keys(0, keys_of(program, [3, 11, 7]), 1, 64)


def test_context_of_the_original_length_takes_short_factors(load_tiny: LoadTiny) -> None:
    model = load_tiny("phi3_long", "fp32")
    (length,) = {length for op in model.program.graph.ops for length in op.context_lengths()}
    lengths = (8, length, length + 1)
    assert [model.program.rope_variant(n) for n in lengths] == [0, 0, 1]
    logits = []
    for n in lengths:
        with model.create_session(n_ctx=n, reuse=False) as session:
            session.eval([1, 2, 3])
            logits.append(session.logits.copy())
    np.testing.assert_array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[1], logits[2])
