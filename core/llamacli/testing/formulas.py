"""Formulas of the ops in float64: plain NumPy, no blocking, no rounding."""

import math

import numpy as np


def nmse(value: np.ndarray, expected: np.ndarray) -> float:
    """Normalized mean squared error: mean((value - expected)^2) / mean(expected^2).

    That of the finite numbers; infinite where the others are not equal.
    """
    finite = np.isfinite(expected)
    if not np.array_equal(value[~finite], expected[~finite]):
        return np.inf
    value, expected = value[finite], expected[finite].astype(np.float64)
    return float(np.mean((value - expected) ** 2) / max(np.mean(expected**2), 1e-300))


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Matrix product x @ weight.T: x [..., k], weight [m, k], result [..., m]."""
    return x.astype(np.float64) @ weight.astype(np.float64).T


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over the last axis: x / sqrt(mean(x^2) + eps) * weight."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """SiLU: x / (1 + e^-x)."""
    x = x.astype(np.float64)
    return x * np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


def gated(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """Gated unit: swiglu, geglu (by tanh), reglu or swiglu_oai, which is clamped."""
    if activation == "swiglu":
        return silu(gate) * up
    if activation == "geglu":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if activation == "reglu":
        return np.maximum(gate, 0) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    chunk: int | None = None,
    alibi: float | None = None,
    n_after: int = 0,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Grouped-query attention, [n, n_head, dv].

    q [n, n_head, d] stands at the last n of the m positions of k, [m, n_head_kv, d], and v, [m, n_head_kv, dv].
    `window` is how many positions a query sees, its own and those before it, none of them before the last multiple of
    `chunk`; besides, it sees `n_after` behind it. `softcap` caps scores by tanh, `sinks` [n_head] are scores without a
    value, `alibi` is the largest exponent of ALiBi's slopes. `bias` [n_head, 2m - 1] is added by distance, 1 - m first.
    """
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    n, n_head, _ = q.shape
    group = n_head // k.shape[1]
    out = np.empty((n, n_head, v.shape[-1]))
    for i in range(n):
        own = len(k) - n + i
        begin = max(0, own + 1 - window) if window else 0
        begin = max(begin, own // chunk * chunk) if chunk else begin
        end = min(len(k), own + 1 + n_after)
        for head in range(n_head):
            scores = scale * (k[begin:end, head // group] @ q[i, head])
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            if alibi:
                n_first = 2 ** math.floor(math.log2(n_head))
                steps = head + 1 if head < n_first else head - n_first + 0.5
                scores = scores - 2 ** (-alibi * steps / n_first) * abs(np.arange(begin, end) - own)
            if bias is not None:
                scores = scores + bias[head, np.arange(begin, end) - own + len(k) - 1]
            largest = scores.max() if sinks is None else max(scores.max(), sinks[head])
            p = np.exp(scores - largest)
            total = p.sum() + (np.exp(sinks[head] - largest) if sinks is not None else 0)
            out[i, head] = (p / total) @ v[begin:end, head // group]
    return out
