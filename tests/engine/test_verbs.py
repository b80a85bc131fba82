"""Every verb on every engine, against formulas in float64. A graph's input is the embedding, its output the logits."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import naive
from llamacli import ArrayFile, Graph, QuantMode, Rope, Value
from llamacli.engine import Engine
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.kv import KVCache

N_VOCAB, WIDTH = 20, 64
TOKENS = [3, 11, 0, 19, 7, 7, 2, 16, 5, 1, 9, 14, 18, 4, 12, 8, 6, 10]

Params = Callable[..., Param]
Build = Callable[[Graph, Params, Value], Value]


class Run:
    """A graph of one engine, its random weights by name, and the rows that the tokens are embedded as."""

    def __init__(self, engine: Engine, build: Build, tokens: Sequence[int] = TOKENS, mode: str = "fp32"):
        random = np.random.default_rng(5)
        self.arrays: dict[str, np.ndarray] = {}

        def param(name: str, *shape: int, bias: bool = False) -> Param:
            def tensor(kind: str, shape: tuple[int, ...]) -> Tensor:
                self.arrays[f"{name}.{kind}"] = random.normal(0, 0.3, shape).astype(np.float32)
                return Tensor(f"{name}.{kind}", shape)

            return Param(tensor("weight", shape), tensor("bias", shape[:-1]) if bias else None)

        graph = Graph()
        x = graph.embed(param("token_embd", N_VOCAB, WIDTH))
        out = build(graph, param, x)
        graph.linear(out, param("output", 32, out.width))
        program = engine.compile(graph, ArrayFile(Path("m"), Metadata({}), self.arrays), QuantMode(mode))
        cache = KVCache(program.states, len(tokens), "f32")
        self.logits = program.forward(np.array(tokens, np.int32), 0, cache, all_logits=True)
        self.x = self["token_embd"][list(tokens)].astype(np.float64)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name if name.endswith("bias") else f"{name}.weight"].astype(np.float64)

    def check(self, expected: np.ndarray, bound: float = 1e-12) -> None:
        """`expected` is what goes into the last linear layer."""
        assert naive.nmse(self.logits, naive.linear(expected, self["output"])) < bound


def test_embed(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: x)
    run.check(run.x)


def test_add(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: x + g.add(x, x))
    run.check(3 * run.x)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.rms_norm(x, param("norm", WIDTH), eps))
    run.check(naive.rms_norm(run.x, run["norm"], eps))


@pytest.mark.parametrize("n_out", [16, 24, 80, 3])
def test_linear(n_out: int, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.linear(x, param("up", n_out, WIDTH, bias=True)))
    run.check(naive.linear(run.x, run["up"]) + run["up.bias"])


def test_swiglu(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.swiglu(g.linear(x, param("gate", 48, WIDTH)), g.linear(x, param("up", 48, WIDTH)))

    run = Run(engine, build)
    run.check(naive.silu(naive.linear(run.x, run["gate"])) * naive.linear(run.x, run["up"]))


def turned(x: np.ndarray, rope: Rope, head_dim: int, factors: np.ndarray | None) -> np.ndarray:
    """Each pair of a head as a complex number, times e^(i angle)."""
    out = x.reshape(len(x), -1, head_dim).copy()
    half = rope.n_dims // 2
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + half)
        divisor = 1 if factors is None else factors[pair]
        angle = rope.freq_scale * np.arange(len(x)) * rope.base ** (-2 * pair / rope.n_dims) / divisor
        z = (out[..., first] + 1j * out[..., second]) * np.exp(1j * angle)[:, None] * rope.attn_factor
        out[..., first], out[..., second] = z.real, z.imag
    return out.reshape(x.shape)


@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize(
    "rope",
    [Rope(16, True), Rope(16, False), Rope(8, True), Rope(8, False), Rope(16, True, 500.0, 0.25, attn_factor=1.2)],
    ids=str,
)
def test_rope(rope: Rope, with_factors: bool, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.rope(x, rope, 16, param("rope_freqs", rope.n_dims // 2) if with_factors else None)

    run = Run(engine, build)
    run.check(turned(run.x, rope, 16, run["rope_freqs"] if with_factors else None), bound=1e-10)


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "head_dim"), [(4, 4, 16), (4, 2, 16), (4, 1, 16), (6, 3, 8), (2, 1, 48)]
)
def test_attention(n_head: int, n_head_kv: int, head_dim: int, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        widths = {"q": n_head * head_dim, "k": n_head_kv * head_dim, "v": n_head_kv * head_dim}
        q, k, v = (g.linear(x, param(name, width, WIDTH)) for name, width in widths.items())
        return g.attention(q, k, v, head_dim=head_dim, scale=0.3)

    run = Run(engine, build)
    q, k, v = (naive.linear(run.x, run[name]).reshape(len(run.x), -1, head_dim) for name in "qkv")
    run.check(naive.attention(q, k, v, 0.3).reshape(len(run.x), -1))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("n_expert", "n_used"), [(8, 2), (4, 1), (4, 4), (5, 3)])
def test_moe(n_expert: int, n_used: int, renormalize: bool, engine: Engine) -> None:
    n_ff = 32

    def build(g: Graph, param: Params, x: Value) -> Value:
        router = g.linear(x, param("router", n_expert, WIDTH))
        gate, up = (param(name, n_expert, n_ff, WIDTH) for name in ("gate", "up"))
        down = param("down", n_expert, WIDTH, n_ff)
        return g.moe(x, router, gate=gate, up=up, down=down, n_used=n_used, renormalize=renormalize)

    run = Run(engine, build)
    expected = np.zeros_like(run.x)
    for row, out in zip(run.x, expected, strict=True):
        scores = run["router"] @ row
        p = np.exp(scores - scores.max())
        p /= p.sum()
        chosen = sorted(range(n_expert), key=lambda expert: -p[expert])[:n_used]
        total = sum(p[expert] for expert in chosen) if renormalize else 1
        for expert in chosen:
            hidden = naive.silu(run["gate"][expert] @ row) * (run["up"][expert] @ row)
            out += p[expert] / total * (run["down"][expert] @ hidden)
    run.check(expected)


def test_extreme_values_stay_finite(engine: Engine) -> None:
    """Large gates and scores: no overflow where the formula has a limit."""

    def build(g: Graph, param: Params, x: Value) -> Value:
        large = g.linear(x, param("large", WIDTH, WIDTH))
        for _ in range(3):
            large = g.linear(large, param("larger", WIDTH, WIDTH))
        gated = g.swiglu(large, x)
        return g.rms_norm(g.attention(large, large, gated, head_dim=16, scale=10.0), param("norm", WIDTH), 1e-5)

    run = Run(engine, build)
    assert np.abs(naive.linear(run.x, run["large"])).max() > 1
    assert np.isfinite(run.logits).all()


@pytest.mark.parametrize(("mode", "bound"), [("auto", 1e-12), ("fp32", 1e-12), ("q8", 1e-3), ("q4", 0.05)])
def test_modes(mode: str, bound: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.linear(x, param("up", 96, WIDTH, bias=True)), mode=mode)
    error = naive.nmse(run.logits, naive.linear(naive.linear(run.x, run["up"]) + run["up.bias"], run["output"]))
    assert bound / 1000 < error < bound or error < bound <= 1e-12


def test_widths_that_are_no_whole_blocks_can_be_requantised(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.linear(g.linear(x, param("up", 44, WIDTH)), param("down", 20, 44))

    run = Run(engine, build, mode="q8")
    expected = naive.linear(naive.linear(run.x, run["up"]), run["down"])
    assert naive.nmse(run.logits, naive.linear(expected, run["output"])) < 2e-3


def test_only_the_last_tokens_logits(engine: Engine) -> None:
    graph = Graph()
    table, output = (Param(Tensor(f"{name}.weight", (20, 64))) for name in ("token_embd", "output"))
    graph.linear(graph.embed(table), output)
    random = np.random.default_rng(1)
    arrays = {f"{name}.weight": random.normal(size=(20, 64)).astype(np.float32) for name in ("token_embd", "output")}
    program = engine.compile(graph, ArrayFile(Path("m"), Metadata({}), arrays), QuantMode.FP32)
    tokens, cache = np.array(TOKENS, np.int32), KVCache(program.states, 32, "f32")
    whole = program.forward(tokens, 0, cache, all_logits=True)
    last = program.forward(tokens, 0, cache, all_logits=False)
    assert (whole.shape, last.shape) == ((18, 20), (1, 20))
    np.testing.assert_array_equal(last[0], whole[-1])
    whole[:] = 0
    assert program.forward(tokens, 0, cache, all_logits=True).any(), "each call returns an array of its own"
