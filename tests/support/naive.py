"""What the kernels compute, written so that it is obviously right: NumPy in float64, no blocking, no tricks."""

import numpy as np


def nmse(value: np.ndarray, expected: np.ndarray) -> float:
    """Mean square error over mean square."""
    expected = expected.astype(np.float64)
    return float(np.mean((value - expected) ** 2) / max(np.mean(expected**2), 1e-300))


def quantize_rows(x: np.ndarray, width: int, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Integers [n, blocks, 32] and the scale of each block, one for `width` numbers.

    The largest magnitude becomes 127 and the scale is rounded to float16; if `signed`, it becomes -127 and the scale
    stays as it is.
    """
    units = x.astype(np.float32).reshape(len(x), -1, width)
    extreme = np.take_along_axis(units, np.abs(units).argmax(-1)[..., None], -1)
    target = np.float32(127)
    if signed:
        target = np.float32(-127)
    else:
        extreme = np.abs(extreme)
    usable = np.abs(extreme) > 1e-30
    inverse = np.divide(target, extreme, out=np.zeros_like(extreme), where=usable)
    if signed:
        scale = np.divide(np.float32(1), inverse, out=np.zeros_like(extreme), where=usable)
    else:
        scale = (extreme / target).astype(np.float16).astype(np.float32)
    q = np.rint(units * inverse).reshape(len(x), -1, 32)
    return q, np.repeat(scale[..., 0], width // 32, axis=1)


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight.T."""
    return x.astype(np.float64) @ weight.astype(np.float64).T


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + e^-x)."""
    x = x.astype(np.float64)
    return x * np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


def gated(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """What each kind of gated unit makes of gate and up."""
    if activation == "swiglu":
        return silu(gate) * up
    if activation == "geglu":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
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
) -> np.ndarray:
    """q [n, n_head, d] at the last n of the m positions of k, v [m, n_head_kv, d]; returns [n, n_head, d]."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    n, n_head, _ = q.shape
    group = n_head // k.shape[1]
    out = np.empty_like(q)
    for i in range(n):
        end = len(k) - n + i + 1
        begin = max(0, end - window) if window else 0
        for head in range(n_head):
            scores = scale * (k[begin:end, head // group] @ q[i, head])
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            p = np.exp(scores)
            total = p.sum() + (np.exp(sinks[head]) if sinks is not None else 0)
            out[i, head] = (p / total) @ v[begin:end, head // group]
    return out
