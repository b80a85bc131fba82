"""The obvious engine: every op in NumPy, float32 throughout, one token at a time.

It is what faster engines are checked against. Matrix products are taken token by token so that a token's result does
not depend on how many tokens are evaluated together (BLAS sums in another order for each shape).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamacli import graph as g
from llamacli.engine.base import QuantMode, Span, expect_finite
from llamacli.engine.turning import Turns
from llamacli.kv.layout import KVSpec
from llamacli.loaders import ModelFile
from llamacli.quantization import TensorType, dequantize, quantize

Array = npt.NDArray[np.float32]

_REQUANTISED = {QuantMode.Q8: TensorType.Q8_0, QuantMode.Q4: TensorType.Q4_0}


class ReferenceEngine:
    """Compiles graphs to NumPy."""

    def compile(self, graph: g.Graph, file: ModelFile, mode: QuantMode) -> ReferenceProgram:
        """Dequantise every tensor that the graph reads; `q8` and `q4` round all matrices but routers first."""
        tensors = {tensor for op in graph.ops for tensor in op.tensors()}
        modes = defaultdict(lambda: mode, dict.fromkeys(graph.routers(), QuantMode.FP32))
        return ReferenceProgram(graph, {tensor: _load(tensor, file, modes[tensor.name]) for tensor in tensors})


class ReferenceProgram:
    """A graph and its weights in float32."""

    def __init__(self, graph: g.Graph, weights: dict[g.Tensor, Array]):
        self._graph, self._weights = graph, weights
        self._turns = Turns(graph, weights.__getitem__)
        attends = [i for i, op in enumerate(graph.ops) if isinstance(op, g.Attention)]
        self._tail = attends[-1] + 1 if attends else 0  # from here on, a row depends on no others

    @property
    def states(self) -> Sequence[KVSpec]:
        """What each attention layer keeps."""
        return self._graph.states

    def shift_keys(self, layer: int, keys: Array, by: int, seq_len: int) -> Array:
        """See `llamacli.engine.base.Program.shift_keys`."""
        return self._turns.shift_keys(layer, keys, by, seq_len)

    def rope_variant(self, seq_len: int) -> int:
        """See `llamacli.engine.base.Program.rope_variant`."""
        return self._turns.rope_variant(seq_len)

    def forward(self, tokens: npt.NDArray[np.int32], spans: Sequence[Span], *, all_logits: bool) -> Array:
        """See `llamacli.engine.base.Program.forward`."""
        parts, start = [], 0
        for span in spans:
            parts.append(self._forward(tokens[start : start + span.n], span, all_logits))
            start += span.n
        return np.concatenate(parts)

    def _forward(self, tokens: npt.NDArray[np.int32], span: Span, all_logits: bool) -> Array:
        values: dict[g.Value, Array] = {}
        for i, op in enumerate(self._graph.ops):
            if i == self._tail and not all_logits:
                values, tokens = {value: rows[-1:] for value, rows in values.items()}, tokens[-1:]
            values[op.out] = self._run(op, values, tokens, span)
        return values[self._graph.ops[-1].out]

    def _run(self, op: g.Op, values: dict[g.Value, Array], tokens: npt.NDArray[np.int32], span: Span) -> Array:
        weights = self._weights
        match op:
            case g.Embed():
                return weights[op.table][tokens]
            case g.Add():
                return values[op.a] + values[op.b]
            case g.Scale():
                factor = np.float32(op.factor)
                return values[op.x] * (factor * weights[op.by].reshape(()) if op.by else factor)
            case g.Softcap():
                cap = np.float32(op.cap)
                return cap * np.tanh(values[op.x] / cap)
            case g.Columns():
                return values[op.x][:, op.first : op.first + op.out.width]
            case g.RmsNorm():
                heads = values[op.x].reshape(len(values[op.x]), -1, op.head_dim)
                ones = np.ones(op.head_dim, np.float32)
                normed = rms_norm(heads, weights[op.weight] if op.weight else ones, op.eps)
                return normed.reshape(values[op.x].shape)
            case g.Linear():
                product = linear(values[op.x], weights[op.weight].reshape(op.out.width, -1))
                return product + weights[op.bias] if op.bias else product
            case g.Rotate():
                is_long = op.long_factors and span.sequence.seq_len > op.rope.n_ctx_orig
                factors = op.long_factors if is_long else op.factors
                return rotate(values[op.x], op, span.start, weights[factors] if factors else None)
            case g.Store():
                state = self._graph.states[op.layer]
                shape = (-1, state.n_head_kv, state.head_dim)
                k, v = values[op.k].reshape(shape), values[op.v].reshape(shape)
                span.sequence.write(op.layer, span.start, k, v)
                return values[op.k][:, :0]
            case g.Attention():
                sinks = weights[op.sinks] if op.sinks else None
                return attention(values[op.q], op, span, self._graph.states[op.layer].window, sinks)
            case g.Gated():
                return gated(values[op.gate], values[op.up], op.activation)
            case g.SigmoidGate():
                return values[op.x] * sigmoid(values[op.gate])
            case g.MoE():
                return moe(values[op.x], values[op.router], op, weights)
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


def attention(q: Array, op: g.Attention, span: Span, window: int | None, sinks: Array | None) -> Array:
    """From each q attend to the cells that it sees of the span's sequence, up to its own."""
    keys, values = span.sequence.read(op.layer, span.start + len(q))
    n_head_kv = len(keys)
    out = np.empty_like(q)
    for i in range(len(q)):
        end = span.start + i + 1
        seen = slice(max(0, end - window) if window else 0, end)
        heads = q[i].reshape(n_head_kv, -1, op.head_dim)
        # BLAS sums in an order that depends on the layout, which must be the same however the batch was cut.
        seen_keys, seen_values = np.ascontiguousarray(keys[..., seen]), np.ascontiguousarray(values[:, seen])
        scores = np.matmul(heads, seen_keys) * np.float32(op.scale)
        if op.softcap is not None:
            scores = np.float32(op.softcap) * np.tanh(scores / np.float32(op.softcap))
        top = scores.max(-1, keepdims=True)
        if sinks is not None:
            sink = sinks.reshape(n_head_kv, -1, 1)
            top = np.maximum(top, sink)
        scores = np.exp(scores - top)
        total = scores.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sink - top)
        out[i] = np.matmul(scores / total, seen_values).reshape(-1)
    return out


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    with np.errstate(over="ignore"):  # exp of a large negative x is infinite, its inverse 0
        return np.reciprocal(1 + np.exp(-x))


def gated(gate: Array, up: Array, activation: g.Activation) -> Array:
    """activation(gate, up)."""
    match activation:
        case g.Activation.SWIGLU:
            return gate * sigmoid(gate) * up
        case g.Activation.GEGLU:
            inner = np.float32(math.sqrt(2 / math.pi)) * gate * (1 + np.float32(0.044715) * np.square(gate))
            return gate * sigmoid(2 * inner) * up  # (1 + tanh(x)) / 2 = sigmoid(2 x)
        case g.Activation.SWIGLU_OAI:
            gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
            return gate * sigmoid(np.float32(1.702) * gate) * (up + 1)


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def moe(x: Array, router: Array, op: g.MoE, weights: dict[g.Tensor, Array]) -> Array:
    """Each token through its `n_used` most probable experts, their outputs weighted and summed in that order."""
    probabilities = softmax(router)
    out = np.zeros_like(x)

    def product(row: Array, weight: g.Tensor, bias: g.Tensor | None, expert: int) -> Array:
        result = linear(row, weights[weight][expert])
        return result + weights[bias][expert] if bias else result

    for i in range(len(x)):
        chosen = np.argsort(-probabilities[i], kind="stable")[: op.n_used]
        shares = probabilities[i, chosen]
        if op.renormalize:
            shares = shares / max(shares.sum(), np.float32(2**-14))  # GGML's floor: the smallest normal float16
        if op.scale:
            shares = shares * weights[op.scale][chosen]
        for expert, share in zip(chosen, shares, strict=True):
            row = x[i : i + 1]
            gate, up = product(row, op.gate, op.gate_bias, expert), product(row, op.up, op.up_bias, expert)
            out[i] += share * product(gated(gate, up, op.activation), op.down, op.down_bias, expert)[0]
    return out


def _load(tensor: g.Tensor, file: ModelFile, mode: QuantMode) -> Array:
    """Float32 in the tensor's shape, by way of the type that the mode asks for."""
    weights = dequantize(file.data(tensor.name), file.tensors[tensor.name].type)
    if mode in _REQUANTISED and tensor.is_matrix:
        padding = -weights.shape[1] % 32
        padded = np.pad(weights, ((0, 0), (0, padding)))
        weights = dequantize(quantize(padded, _REQUANTISED[mode]), _REQUANTISED[mode])[:, : weights.shape[1]]
    expect_finite(bool(np.isfinite(weights).all()), tensor.name, file)
    return tensor.rows_of(weights.reshape(file.tensors[tensor.name].shape))
