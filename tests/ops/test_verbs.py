"""Every op on every engine, against float64 formulas.

A graph's input is the embedding, its output the logits.
"""

from pathlib import Path

import numpy as np
import pytest

from llamacli import Activation, ArrayFile, Graph, QuantMode, Rope, Value
from llamacli.engine import Engine, Span
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.testing import formulas
from verbs import TOKENS, WIDTH, Params, Run, span


def test_embed(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: x)
    run.check(run.x)


def test_add(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: x + g.add(x, x))
    run.check(3 * run.x)


@pytest.mark.parametrize("product_is_first", [True, False])
def test_product_added_to_a_later_value(product_is_first: bool, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        product = g.linear(x, param("w", WIDTH, WIDTH))
        later = g.rms_norm(x, None, 1e-6)
        return (product + later if product_is_first else later + product) + later

    run = Run(engine, build)
    run.check(formulas.linear(run.x, run["w"]) + 2 * formulas.rms_norm(run.x, 1.0, 1e-6))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.rms_norm(x, param("norm", WIDTH), eps))
    run.check(formulas.rms_norm(run.x, run["norm"], eps))


@pytest.mark.parametrize("n_out", [16, 24, 80, 3])
def test_linear(n_out: int, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.linear(x, param("up", n_out, WIDTH, bias=True)))
    run.check(formulas.linear(run.x, run["up"]) + run["up.bias"])


def test_swiglu(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.swiglu(g.linear(x, param("gate", 48, WIDTH)), g.linear(x, param("up", 48, WIDTH)))

    run = Run(engine, build)
    run.check(formulas.silu(formulas.linear(run.x, run["gate"])) * formulas.linear(run.x, run["up"]))


def rotated(x: np.ndarray, rope: Rope, head_dim: int, factors: np.ndarray | None) -> np.ndarray:
    """RoPE: pairs of a head as complex numbers, times e^(i angle)."""
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
    run.check(rotated(run.x, rope, 16, run["rope_freqs"] if with_factors else None), bound=1e-10)


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "head_dim"), [(4, 4, 16), (4, 2, 16), (4, 1, 16), (6, 3, 8), (2, 1, 48)]
)
def test_attention(n_head: int, n_head_kv: int, head_dim: int, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        widths = {"q": n_head * head_dim, "k": n_head_kv * head_dim, "v": n_head_kv * head_dim}
        q, k, v = (g.linear(x, param(name, width, WIDTH)) for name, width in widths.items())
        return g.attention(q, g.store(k, v, head_dim=head_dim), scale=0.3)

    run = Run(engine, build)
    q, k, v = (formulas.linear(run.x, run[name]).reshape(len(run.x), -1, head_dim) for name in "qkv")
    run.check(formulas.attention(q, k, v, 0.3).reshape(len(run.x), -1))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("n_expert", "n_used", "n_ff"), [(8, 2, 32), (4, 1, 32), (4, 4, 32), (5, 3, 32), (4, 2, 1000)])
def test_moe(n_expert: int, n_used: int, n_ff: int, renormalize: bool, engine: Engine) -> None:
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
            hidden = formulas.silu(run["gate"][expert] @ row) * (run["up"][expert] @ row)
            out += p[expert] / total * (run["down"][expert] @ hidden)
    run.check(expected)


def test_scale_softcap_columns(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        factor = param("factor", 1)
        return g.scale(g.scale(g.softcap(g.columns(x, 5, 40), 0.4), factor), 2.5)

    run = Run(engine, build)
    run.check(0.4 * np.tanh(run.x[:, 5:45] / 0.4) * run["factor"] * 2.5)


@pytest.mark.parametrize("head_dim", [8, 16, 32])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_of_heads(head_dim: int, weighted: bool, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.rms_norm(x, param("norm", head_dim) if weighted else None, 1e-6, head_dim))
    heads = run.x.reshape(len(run.x), -1, head_dim)
    run.check(formulas.rms_norm(heads, run["norm"] if weighted else 1.0, 1e-6).reshape(run.x.shape))


@pytest.mark.parametrize("activation", Activation)
def test_gated(activation: Activation, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        x = g.scale(x, 4.0)
        return g.gated(g.linear(x, param("gate", 48, WIDTH)), g.linear(x, param("up", 48, WIDTH)), activation)

    run = Run(engine, build)
    gate, up = formulas.linear(4 * run.x, run["gate"]), formulas.linear(4 * run.x, run["up"])
    assert min(gate.max(), up.max(), -up.min()) > 7, "the limits are reached"
    run.check(formulas.gated(gate, up, activation))


def test_sigmoid_gate(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.sigmoid_gate(x, g.linear(x, param("gate", WIDTH))))
    run.check(run.x / (1 + np.exp(-(run.x @ run["gate"])))[:, None])


def test_rows_of_a_fused_weight(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        first, second = param("fused", 40, WIDTH, bias=True).split(23, 17)
        return g.linear(x, second) + g.columns(g.linear(x, first), 3, 17)

    run = Run(engine, build)
    whole = formulas.linear(run.x, run["fused"]) + run["fused.bias"]
    run.check(whole[:, 23:] + whole[:, 3:20])


@pytest.mark.parametrize("seq_len", [20, 40])
def test_long_factors_are_for_long_sequences(seq_len: int, engine: Engine) -> None:
    rope = Rope(16, False, n_ctx_orig=32)

    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.rope(x, rope, 16, param("short", 8), param("long", 8))

    run = Run(engine, build, seq_len=seq_len)
    run.check(rotated(run.x, rope, 16, run["long" if seq_len > 32 else "short"]), bound=1e-10)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40, 100])
def test_attention_variants(window: int | None, options: dict, engine: Engine) -> None:
    n_head, n_head_kv, head_dim, tokens = 4, 2, 16, TOKENS * 9

    def build(g: Graph, param: Params, x: Value) -> Value:
        widths = {"q": n_head * head_dim, "k": n_head_kv * head_dim, "v": n_head_kv * head_dim}
        q, k, v = (g.linear(x, param(name, width, WIDTH)) for name, width in widths.items())
        sinks = param("sinks", n_head) if options.get("sinks") else None
        kv = g.store(k, v, head_dim=head_dim, window=window)
        return g.attention(q, kv, scale=0.3, softcap=options.get("softcap"), sinks=sinks)

    run = Run(engine, build, tokens)
    q, k, v = (formulas.linear(run.x, run[name]).reshape(len(run.x), -1, head_dim) for name in "qkv")
    sinks = run["sinks"] if options.get("sinks") else None
    expected = formulas.attention(q, k, v, 0.3, window=window, softcap=options.get("softcap"), sinks=sinks)
    run.check(expected.reshape(len(run.x), -1))


def test_layers_share_cached_keys(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        kv = g.store(x, x, head_dim=16)
        return g.attention(g.attention(x, kv, scale=0.3), kv, scale=0.3)

    run = Run(engine, build)
    heads = run.x.reshape(len(run.x), -1, 16)
    once = formulas.attention(heads, heads, heads, 0.3)
    run.check(formulas.attention(once, heads, heads, 0.3).reshape(run.x.shape))


@pytest.mark.parametrize("activation", Activation)
def test_experts_with_biases_scales_and_fused_weights(activation: Activation, engine: Engine) -> None:
    n_expert, n_used, n_ff = 6, 2, 24

    def build(g: Graph, param: Params, x: Value) -> Value:
        router = g.linear(x, param("router", n_expert, WIDTH, bias=True))
        gate, up = param("gate_up", n_expert, 2 * n_ff, WIDTH, bias=True).split(n_ff, n_ff)
        down = param("down", n_expert, WIDTH, n_ff, bias=True)
        down = Param(down.weight, down.bias, param("scale", n_expert).weight)
        return g.moe(x, router, gate=gate, up=up, down=down, n_used=n_used, activation=activation)

    run = Run(engine, build)
    expected = np.zeros_like(run.x)
    for row, out in zip(run.x, expected, strict=True):
        scores = run["router"] @ row + run["router.bias"]
        chosen = np.argsort(-scores)[:n_used]
        p = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        for share, expert in zip(p, chosen, strict=True):
            gate, up = np.split(run["gate_up"][expert] @ row + run["gate_up.bias"][expert], 2)
            hidden = run["down"][expert] @ formulas.gated(gate, up, activation) + run["down.bias"][expert]
            out += share * run["scale"][expert] * hidden
    run.check(expected)


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
    expected = [forward(part, [at], all_logits=True) for part, at in zip(begin, alone, strict=True)]
    actual = forward(np.concatenate(begin), together, all_logits=True)
    np.testing.assert_array_equal(actual, np.concatenate(expected))
    following = [Span(at.sequence, at.n, 1) for at in (*alone, *together)]
    for at in following:
        at.sequence.reserve(at.start, 1)
    expected = [forward(tokens[:1], [at], all_logits=False) for at in following[:3]]
    actual = forward(np.repeat(tokens[:1], 3), following[3:], all_logits=False)
    np.testing.assert_array_equal(actual, np.concatenate(expected))
    longer = [Span(at.sequence, at.start + 1, n) for at, n in zip(following, (2, 1, 4, 2, 1, 4), strict=True)]
    for at in longer:
        at.sequence.reserve(at.start, at.n)
    expected = [forward(tokens[: at.n], [at], all_logits=False) for at in longer[:3]]
    actual = forward(np.concatenate([tokens[: at.n] for at in longer[3:]]), longer[3:], all_logits=False)
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


def test_rows_of_partial_blocks_can_be_requantized(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.linear(g.linear(x, param("up", 44, WIDTH)), param("down", 20, 44))

    run = Run(engine, build, mode="q8")
    expected = formulas.linear(formulas.linear(run.x, run["up"]), run["down"])
    assert formulas.nmse(run.logits, formulas.linear(expected, run["output"])) < 2e-3


def test_only_the_last_tokens_logits(engine: Engine) -> None:
    graph = Graph()
    table, output = (Param(Tensor(f"{name}.weight", (20, 64))) for name in ("token_embd", "output"))
    graph.linear(graph.embed(table), output)
    random = np.random.default_rng(1)
    arrays = {f"{name}.weight": random.normal(size=(20, 64)).astype(np.float32) for name in ("token_embd", "output")}
    program = engine.compile(graph, ArrayFile(Path("m"), Metadata({}), arrays), QuantMode.FP32)
    tokens, spans = np.array(TOKENS, np.int32), [span(program, len(TOKENS))]
    whole = program.forward(tokens, spans, all_logits=True)
    last = program.forward(tokens, spans, all_logits=False)
    assert (whole.shape, last.shape) == ((18, 20), (1, 20))
    np.testing.assert_array_equal(last[0], whole[-1])
    whole[:] = 0
    assert program.forward(tokens, spans, all_logits=True).any(), "each call returns an array of its own"
