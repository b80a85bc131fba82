"""Rotation of heads by RoPE."""

import numpy as np
import pytest

from llamacli import Graph, Rope, Value
from llamacli.engine import Engine
from verbs import Params, Run


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


@pytest.mark.parametrize("seq_len", [20, 40])
def test_long_factors_are_for_long_sequences(seq_len: int, engine: Engine) -> None:
    rope = Rope(16, False, n_ctx_orig=32)

    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.rope(x, rope, 16, param("short", 8), param("long", 8))

    run = Run(engine, build, seq_len=seq_len)
    run.check(rotated(run.x, rope, 16, run["long" if seq_len > 32 else "short"]), bound=1e-10)
