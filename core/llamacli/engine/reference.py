"""The obvious engine: every op in NumPy, float32 throughout, one token at a time.

It is what faster engines are checked against. Matrix products are taken token by token so that a token's result does
not depend on how many tokens are evaluated together (BLAS sums in another order for each shape).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli import graph as g
from llamacli.engine.base import QuantMode
from llamacli.kv import PAGE, KVCache
from llamacli.loaders import ModelFile
from llamacli.quantization import TensorType, dequantize, quantize

Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.floating[Any]]

_REQUANTISED = {QuantMode.Q8: TensorType.Q8_0, QuantMode.Q4: TensorType.Q4_0}


class ReferenceEngine:
    """Compiles graphs to NumPy."""

    def compile(self, graph: g.Graph, file: ModelFile, mode: QuantMode) -> ReferenceProgram:
        """Dequantise every tensor that the graph reads; `q8` and `q4` round all matrices but routers first."""
        tensors = {tensor.name: tensor for op in graph.ops for tensor in op.tensors()}
        modes = defaultdict(lambda: mode, dict.fromkeys(graph.routers(), QuantMode.FP32))
        return ReferenceProgram(graph, {name: _load(tensor, file, modes[name]) for name, tensor in tensors.items()})


class ReferenceProgram:
    """A graph and its weights in float32."""

    def __init__(self, graph: g.Graph, weights: dict[str, Array]):
        self._graph, self._weights = graph, weights

    @property
    def states(self) -> Sequence[g.AttentionState]:
        """What each attention layer keeps."""
        return self._graph.states

    def forward(self, tokens: npt.NDArray[np.int32], n_past: int, cache: KVCache, *, all_logits: bool) -> Array:
        """See `llamacli.engine.base.Program.forward`."""
        values: dict[g.Value, Array] = {}
        last = self._graph.ops[-1]
        for op in self._graph.ops:
            if op is last and not all_logits:
                values = {value: rows[-1:] for value, rows in values.items()}
            values[op.out] = self._run(op, values, tokens, n_past, cache)
        return values[last.out]

    def _run(
        self, op: g.Op, values: dict[g.Value, Array], tokens: npt.NDArray[np.int32], n_past: int, cache: KVCache
    ) -> Array:
        weights = self._weights
        match op:
            case g.Embed():
                return weights[op.table.name][tokens]
            case g.Add():
                return values[op.a] + values[op.b]
            case g.RmsNorm():
                return rms_norm(values[op.x], weights[op.weight.name], op.eps)
            case g.Linear():
                product = linear(values[op.x], weights[op.weight.name])
                return product + weights[op.bias.name] if op.bias else product
            case g.Rotate():
                factors = weights[op.factors.name] if op.factors else None
                return rotate(values[op.x], op, n_past, factors)
            case g.Attention():
                k, v = values[op.k], values[op.v]
                return attention(values[op.q], k, v, cache.k[op.layer], cache.v[op.layer], n_past, op.scale)
            case g.SwiGLU():
                return swiglu(values[op.gate], values[op.up])
            case g.MoE():
                experts = (weights[op.gate.name], weights[op.up.name], weights[op.down.name])
                return moe(values[op.x], values[op.router], *experts, op.n_used, op.renormalize)
        raise TypeError(f"no reference for {type(op).__name__}")


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the mean is summed in float64, as GGML does."""
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True).astype(np.float32)
    return x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight


def linear(x: Array, weight: Array) -> Array:
    """x [n, n_in] @ weight.T, weight [n_out, n_in], one row of x at a time."""
    out = np.empty((len(x), len(weight)), np.float32)
    for row, result in zip(x, out, strict=True):
        np.dot(weight, row, out=result)
    return out


def rotate(x: Array, op: g.Rotate, n_past: int, factors: Array | None) -> Array:
    """Turn the first `n_dims` of every head: pairs are neighbours or halves as the variant says."""
    cos, sin = op.rope.table(n_past, len(x), factors)
    heads = x.reshape(len(x), -1, op.head_dim).copy()
    turned = heads[..., : op.rope.n_dims]
    if op.rope.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        half = op.rope.n_dims // 2
        first, second = turned[..., :half], turned[..., half:]
    a, b = first.copy(), second.copy()
    first[...] = a * cos[:, None] - b * sin[:, None]
    second[...] = a * sin[:, None] + b * cos[:, None]
    return heads.reshape(x.shape)


def attention(q: Array, k: Array, v: Array, k_pages: Floats, v_pages: Floats, n_past: int, scale: float) -> Array:
    """Store k and v at position n_past onwards in the pages, then attend from each q to all positions up to its own."""
    n_head_kv, head_dim = k_pages.shape[1:3]
    n = len(q)
    page, lane = np.divmod(np.arange(n_past, n_past + n), PAGE)
    k_pages[page, :, :, lane] = k.reshape(n, n_head_kv, head_dim)
    v_pages[page, :, lane] = v.reshape(n, n_head_kv, head_dim)
    used = -(-(n_past + n) // PAGE)
    keys = k_pages[:used].transpose(1, 2, 0, 3).reshape(n_head_kv, head_dim, -1).astype(np.float32)
    seen = v_pages[:used].transpose(1, 0, 2, 3).reshape(n_head_kv, -1, head_dim).astype(np.float32)
    out = np.empty_like(q)
    for i in range(n):
        heads = q[i].reshape(n_head_kv, -1, head_dim)
        scores = np.matmul(heads, keys)[..., : n_past + i + 1] * np.float32(scale)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out[i] = np.matmul(scores, seen[:, : n_past + i + 1]).reshape(-1)
    return out


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    with np.errstate(over="ignore"):  # exp of a large negative gate is infinite, its quotient 0
        return gate / (1 + np.exp(-gate)) * up


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def moe(x: Array, router: Array, gate: Array, up: Array, down: Array, n_used: int, renormalize: bool) -> Array:
    """Each token through its `n_used` most probable experts, their outputs weighted and summed in that order."""
    probabilities = softmax(router)
    out = np.zeros_like(x)
    for i in range(len(x)):
        chosen = np.argsort(-probabilities[i], kind="stable")[:n_used]
        weights = probabilities[i, chosen]
        if renormalize:
            weights = weights / max(weights.sum(), np.float32(2**-14))  # GGML's floor: the smallest normal float16
        for expert, weight in zip(chosen, weights, strict=True):
            row = x[i : i + 1]
            hidden = swiglu(linear(row, gate[expert]), linear(row, up[expert]))
            out[i] += weight * linear(hidden, down[expert])[0]
    return out


def _load(tensor: g.Tensor, file: ModelFile, mode: QuantMode) -> Array:
    """Float32 in the tensor's shape, by way of the type that the mode asks for."""
    weights = dequantize(file.data(tensor.name), file.tensors[tensor.name].type)
    if mode in _REQUANTISED and len(tensor.shape) > 1:
        padding = -weights.shape[1] % 32
        padded = np.pad(weights, ((0, 0), (0, padding)))
        weights = dequantize(quantize(padded, _REQUANTISED[mode]), _REQUANTISED[mode])[:, : weights.shape[1]]
    return weights.reshape(tensor.shape)
