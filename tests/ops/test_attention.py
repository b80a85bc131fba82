"""Attention: groups, windows, soft caps, sinks, relative position bias, shared caches."""

import itertools

import numpy as np
import pytest

from llamacli import Graph, Value
from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.ops.attention import relative_buckets
from llamacli.testing import formulas
from verbs import TOKENS, WIDTH, Params, Run, on_patches


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


@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ({"chunk": 7}, {}),
        ({"chunk": 32, "window": 20}, {"softcap": 2.0}),
        ({}, {"alibi": 8.0}),
        ({"window": 20}, {"alibi": 4.0, "softcap": 3.0}),
        ({}, {"causal": False}),
        ({"window": 7}, {"causal": False}),
        ({"window": 40}, {"causal": False, "alibi": 8.0}),
    ],
    ids=str,
)
def test_attention_options(stored: dict, options: dict, engine: Engine) -> None:
    head_dim, value_dim, tokens = 16, 24, TOKENS * 9

    def build(g: Graph, param: Params, x: Value) -> Value:
        q, k, v = (g.linear(x, param(name, n, WIDTH)) for name, n in (("q", 96), ("k", 32), ("v", 48)))
        return g.attention(q, g.store(k, v, head_dim=head_dim, value_dim=value_dim, **stored), scale=0.3, **options)

    run = Run(engine, build, tokens)
    q, k, v = (
        formulas.linear(run.x, run[name]).reshape(len(run.x), -1, width)
        for name, width in (("q", head_dim), ("k", head_dim), ("v", value_dim))
    )
    window, seen = stored.get("window"), dict(stored)
    if options.get("causal") is False:
        n_side = len(tokens) if window is None else window // 2
        seen["window"], seen["n_after"] = n_side + 1, n_side
    numbers = {name: value for name, value in options.items() if name != "causal"}
    run.check(formulas.attention(q, k, v, 0.3, **seen, **numbers).reshape(len(run.x), -1))


@pytest.mark.parametrize("value_dim", [16, 40, 48])
def test_values_in_keys(value_dim: int, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        q, k = (g.linear(x, param(name, n, WIDTH)) for name, n in (("q", 192), ("k", 48)))
        return g.attention(q, g.store(k, None, head_dim=48, value_dim=value_dim), scale=0.3)

    run = Run(engine, build, TOKENS * 9)
    q, k = (formulas.linear(run.x, run[name]).reshape(len(run.x), -1, 48) for name in "qk")
    run.check(formulas.attention(q, k, k[..., :value_dim], 0.3).reshape(len(run.x), -1))


def bucket(distance: int, n_buckets: int, max_distance: int) -> int:
    """Bucket of a distance of at least 0, without logarithms."""
    exact = n_buckets // 2
    if distance < exact:
        return distance
    # exact + k where (distance / exact) ** (n_buckets - exact) reaches (max_distance / exact) ** k
    n, reached = n_buckets - exact, 0
    while reached < n and distance**n * exact**reached >= max_distance**reached * exact**n:
        reached += 1
    return min(exact + reached - 1, n_buckets - 1)


@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (16, 128), (8, 20), (64, 256), (6, 100)])
def test_relative_buckets(n_buckets: int, max_distance: int) -> None:
    distances = np.arange(-300, 301)
    causal = [bucket(max(0, -d), n_buckets, max_distance) for d in distances.tolist()]
    assert relative_buckets(distances, n_buckets, max_distance, causal=True).tolist() == causal
    half = n_buckets // 2
    both = [bucket(abs(d), half, max_distance) + half * (d > 0) for d in distances.tolist()]
    assert relative_buckets(distances, n_buckets, max_distance, causal=False).tolist() == both


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 20), (6, 5)])
def test_relative_bias(n_buckets: int, max_distance: int, causal: bool, engine: Engine) -> None:
    tokens = TOKENS * 9

    def build(g: Graph, param: Params, x: Value) -> Value:
        q, k, v = (g.linear(x, param(name, n, WIDTH)) for name, n in (("q", 64), ("k", 32), ("v", 32)))
        kv, bias = g.store(k, v, head_dim=16), param("table", n_buckets, 4)
        return g.attention(q, kv, scale=0.3, causal=causal, bias=bias, max_distance=max_distance)

    run = Run(engine, build, tokens)
    q, k, v = (formulas.linear(run.x, run[name]).reshape(len(run.x), -1, 16) for name in "qkv")
    distances = np.arange(1 - len(tokens), len(tokens))
    bias = run["table"][relative_buckets(distances, n_buckets, max_distance, causal=causal)].T
    expected = formulas.attention(q, k, v, 0.3, n_after=0 if causal else len(tokens), bias=bias)
    run.check(expected.reshape(len(run.x), -1))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 3), {}, r"attention: table\.weight \(8, 3\) and 4 heads"),
        ((3, 4), {}, r"attention: table\.weight \(3, 4\) and 4 heads"),
        ((32, 4), {"max_distance": 16}, r"attention: table\.weight \(32, 4\) and distances up to 16"),
    ],
)
def test_biases_that_do_not_fit(shape: tuple[int, int], options: dict, message: str, engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.attention(x, g.store(x, x, head_dim=16), scale=0.3, bias=param("table", *shape), **options)

    with pytest.raises(PluginError, match=message):
        Run(engine, build)


def test_cells_of_another_shape_are_refused(engine: Engine) -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        g.store(x, x, head_dim=32, into=g.store(x, x, head_dim=16))
        return x

    with pytest.raises(PluginError, match=r"store: .* do not fit together"):
        Run(engine, build)


def test_attention_within_spans(engine: Engine) -> None:
    rows = np.random.RandomState(4).standard_normal((96, 32)).astype(np.float32)
    edges = [0, 3, 40, 41, 90]  # tokens behind the last one see only themselves

    def build(g: Graph, x: Value) -> Value:
        return g.attention(x, g.store(x, x, head_dim=16), scale=0.3, spans=True)

    spans = tuple(itertools.pairwise(edges))
    found = on_patches(engine, build, rows, spans=spans)
    heads = rows.astype(np.float64).reshape(96, 2, 16)
    expected = heads.copy()
    for start, stop in spans:
        part = heads[start:stop]
        scores = np.exp(0.3 * np.einsum("ihd,jhd->hij", part, part))
        expected[start:stop] = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), part)
    np.testing.assert_allclose(found, expected.reshape(96, 32), atol=2e-5)
