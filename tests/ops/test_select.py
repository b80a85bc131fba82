"""Sparse attention: choice of cells by an indexer, against masks in float64."""

import numpy as np
import pytest

from llamacli import Graph, Value
from llamacli.engine import Engine
from llamacli.errors import PluginError
from llamacli.testing import formulas
from verbs import TOKENS, WIDTH, Params, Run

D, N_TOKENS = 16, 60


def masks(scores: np.ndarray, n: int, block: int, n_local: int, pooled: bool) -> np.ndarray:
    """Cells that each token sees, by scores [n_head, n_tokens, n_tokens]."""
    n_head, n_tokens, _ = scores.shape
    seen = np.zeros(scores.shape, bool)
    for head in range(n_head):
        for i in range(n_tokens):
            best = {b: scores[head, i, b * block : min(i + 1, (b + 1) * block)].max() for b in range(i // block + 1)}
            if pooled:
                best = {b: scores[head, i, (b + 1) * block - 1] for b in range((i + 1) // block)}
            best |= {b: np.inf for b in best if b > i // block - n_local}
            incomplete = [i // block] if pooled and (i + 1) % block else []
            for b in sorted(best, key=lambda b: (-best[b], b))[:n] + incomplete:
                seen[head, i, b * block : min(i + 1, (b + 1) * block)] = True
    return seen


@pytest.mark.parametrize(
    ("n", "n_head", "n_query", "block", "n_local", "weighted", "latent", "pooled"),
    [
        (5, 1, 4, 1, 0, True, True, False),
        (16, 1, 2, 1, 0, True, False, False),
        (2, 2, 1, 4, 1, False, False, False),
        (3, 1, 2, 5, 2, False, True, False),
        (3, 1, 4, 4, 0, True, True, True),
        (2, 2, 1, 3, 1, False, False, True),
    ],
)
def test_attention_to_chosen_cells(
    n: int,
    n_head: int,
    n_query: int,
    block: int,
    n_local: int,
    weighted: bool,
    latent: bool,
    pooled: bool,
    engine: Engine,
) -> None:
    n_head_kv, value_dim = (1, 24) if latent else (2, 16)
    head_dim = 40 if latent else 16
    widths = {
        "qi": n_head * n_query * D, "ki": D, "wi": n_head * n_query, "q": 4 * head_dim, "k": n_head_kv * head_dim,
        "v": n_head_kv * value_dim,
    }  # fmt: skip

    def build(g: Graph, param: Params, x: Value) -> Value:
        qi, ki, wi, q, k, v = (g.linear(x, param(name, width, WIDTH)) for name, width in widths.items())
        options = {"weights": wi} if weighted else {}
        index = g.store(ki, None, head_dim=D)
        cells = g.select(qi, index, n, n_head=n_head, block=block, n_local=n_local, pooled=pooled, **options)
        kv = g.store(k, None if latent else v, head_dim=head_dim, value_dim=value_dim)
        return g.attention(q, kv, scale=0.3, cells=cells)

    run = Run(engine, build, (TOKENS * 20)[:N_TOKENS])
    qi, ki, wi, q, k, v = (formulas.linear(run.x, run[name]) for name in widths)
    products = np.einsum("ihqd,jd->hqij", qi.reshape(N_TOKENS, n_head, n_query, D), ki)
    if weighted:
        products = np.maximum(products, 0) * wi.reshape(N_TOKENS, n_head, n_query).transpose(1, 2, 0)[..., None]
    seen = np.repeat(masks(products.sum(1).astype(np.float32), n, block, n_local, pooled), 4 // n_head, axis=0)
    assert 0 < seen.sum() < 4 * N_TOKENS * (N_TOKENS + 1) // 2, "some cells are not seen"
    keys = np.repeat(k.reshape(N_TOKENS, n_head_kv, head_dim), 4 // n_head_kv, axis=1)
    values = keys[..., :value_dim] if latent else np.repeat(v.reshape(N_TOKENS, -1, value_dim), 4 // n_head_kv, axis=1)
    scores = 0.3 * np.einsum("ihd,jhd->hij", q.reshape(N_TOKENS, 4, head_dim), keys)
    weights = np.exp(np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(-1, keepdims=True))
    out = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), values)
    run.check(out.reshape(N_TOKENS, -1))


def test_all_cells_are_chosen_of_few(engine: Engine) -> None:
    def dense(g: Graph, param: Params, x: Value) -> Value:
        return g.attention(x, g.store(x, x, head_dim=16), scale=0.3)

    def sparse(g: Graph, param: Params, x: Value) -> Value:
        cells = g.select(x, g.store(g.columns(x, 0, D), None, head_dim=D), len(TOKENS))
        return g.attention(x, g.store(x, x, head_dim=16), scale=0.3, cells=cells)

    expected, found = (Run(engine, build).logits for build in (dense, sparse))
    assert formulas.nmse(found, expected) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "0 blocks of 1"),
        ({"n_local": 6}, "6 of them local"),
        ({"n_head": 5}, "5 choices and keys"),
        ({"heads": 2}, "2 heads of keys and choices by one"),
        ({"head_dim": 8}, "keys of 8 numbers"),
        ({"softcap": 2.0}, "an option other than scale"),
        ({"n_head": 3}, "3 choices of cells"),
    ],
    ids=str,
)
def test_refusals(options: dict, message: str) -> None:
    g = Graph()
    x = g.value(48)
    head_dim, heads = options.pop("head_dim", 16), options.pop("heads", 1)
    attend = {"softcap": options.pop("softcap")} if "softcap" in options else {}
    key = g.value(heads * head_dim)
    index, kv = g.store(key, None, head_dim=head_dim), g.store(x, None, head_dim=48)
    with pytest.raises(PluginError, match=message):
        g.attention(x, kv, scale=0.3, cells=g.select(x, index, **{"n": 5, **options}), **attend)
