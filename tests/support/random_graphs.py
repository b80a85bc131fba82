"""Random graphs of every op, for comparisons with NumPy.

Sizes begin at 1, numbers have very different magnitudes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np

from llamacli.engine.examples import N_VOCAB, Example, op_classes
from llamacli.graph import Graph
from llamacli.ops import activations
from llamacli.ops.activations import Activation
from llamacli.ops.base import Op
from llamacli.ops.embed import Embed
from llamacli.ops.linear import Linear
from llamacli.ops.moe import Expert, MoE, Routing, Scoring
from llamacli.ops.rope import Rope
from llamacli.ops.select import Selection
from llamacli.ops.values import LowRank, LowRanks, Param, Tensor, Value
from llamacli_deepseek.pooling import pooled, pooled_attention
from llamacli_deepseek.streams import mix_streams, stream_gate, stream_weights
from llamacli_gemma.altup import correct, match_magnitude, predict
from llamacli_gemma.gaussian_topk import gaussian_topk
from llamacli_l2 import slow_l2_norm
from llamacli_l2.l2_norm import l2_norm
from llamacli_rwkv.dot import dot

Choose = Callable[[int, int], int]
"""Function that chooses an integer of a range, both ends included."""

MAGNITUDES = np.float32([1, 1, 1, 1, 0, 1e-3, 1e3, 1e-20, 1e-40])
"""Magnitudes of the rows of inputs; the last is that of subnormal numbers."""

LEAST_SCORED = 1e-3
"""Least magnitude of factors of scores that choose cells: subnormal scores tie or not by the order of their sums."""

N_TOKENS = 18


@attrs.frozen(eq=False)
class Draft:
    """Graph in the making, with random weights.

    `choose` chooses its sizes.
    """

    choose: Choose
    graph: Graph = attrs.field(factory=Graph)
    weights: dict[str, np.ndarray] = attrs.field(factory=dict)
    random: np.random.Generator = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "random", np.random.default_rng(self.choose(0, 1 << 30)))

    def pick(self, *options: Any) -> Any:
        """Choose one of some values."""
        return options[self.choose(0, len(options) - 1)]

    def width(self, of: int = 1) -> int:
        """Choose a width, a multiple of `of`."""
        return of * self.choose(1, max(1, 100 // of))

    def tensor(self, *shape: int) -> Tensor:
        """Tensor of random weights."""
        name = f"weight.{len(self.weights)}"
        self.weights[name] = self.random.normal(0, 0.3, shape).astype(np.float32)
        return Tensor(name, shape)

    def param(self, *shape: int, bias: bool = False) -> Param:
        """Parameter of random weights.

        The bias has a number for each row, or for each number of a vector.
        """
        return Param(self.tensor(*shape), self.tensor(*(shape[:-1] or shape)) if bias else None)

    def x(self, width: int, *, even: bool = False, least: float = 0.0) -> Value:
        """Input of random rows.

        They are of one magnitude if `even`, else of 0 or magnitudes of at least `least`.
        """
        table = self.param(N_VOCAB, width)
        if not even:
            rows = self.weights[table.weight.name]
            rows *= self.random.choice(MAGNITUDES[(MAGNITUDES == 0) | (least <= MAGNITUDES)], (N_VOCAB, 1))
            rows[self.random.random(rows.shape) < 0.05] = self.pick(0.0, -0.0)
        return self.graph.embed(table)


Maker = Callable[[Draft], object]
_MAKERS: dict[str, tuple[type[Op], Maker]] = {}

FLOORS = {"Softcap": 30.0, "Xielu": 1.0, "Map": 1.0, "CorrectStream": 1000.0, "LinearState": 1e-3}
"""Magnitudes from which on rows have a relative error bound, for ops that add numbers that may nearly cancel."""

INPUT_BOUNDS = {"GaussianTopK"}
"""Ops whose rows have an error bound relative to their input, which may nearly cancel."""

NUDGED = {"Attention", "SelectedAttention", "Pool", "PooledAttention", "MixStreams"}
"""Ops whose rows have an error bound by random changes of the input: sums that may cancel, weighted by exponentials."""


def maker(op: type[Op], name: str) -> Callable[[Maker], Maker]:
    """Decorate the function that records an op, last of a graph."""

    def register(function: Maker) -> Maker:
        _MAKERS[f"{op.__name__}-{name}"] = op, function
        return function

    return register


def _op(name: str) -> type[Op]:
    return next(op for op in op_classes() if op.__name__ == name and op.__module__.startswith("llamacli"))


def _simple(op: str, **makers: Maker) -> None:
    for name, function in makers.items():
        maker(_op(op), name)(function)


def of_heads(d: Draft, *, even: bool = False) -> tuple[Value, int]:
    """Input of some heads, and their width."""
    head_dim = d.choose(1, 40)
    return d.x(head_dim * d.choose(1, 5), even=even), head_dim


# --- elementwise -----------------------------------------------------------------------------------------------------


def _two(d: Draft) -> tuple[Value, Value]:
    width = d.width()
    return d.x(width), d.x(width)


def _bounded(d: Draft, function: str) -> Value:
    return d.x(d.width(), even=function == "exp")  # e^x of other numbers is bounded


def _row_of_rows(d: Draft) -> Param:
    n, width = d.choose(1, 3), d.graph.ops[0].out.width
    return d.param(n + 1, width).split(*[1] * (n + 1))[n]


_simple(
    "Add",
    values=lambda d: d.graph.add(*_two(d)),
    vector=lambda d: d.graph.add(x := d.x(d.width()), d.param(x.width)),
    row=lambda d: d.graph.add(d.x(d.width()), _row_of_rows(d)),
)
_simple(
    "Scale",
    number=lambda d: d.graph.scale(d.x(d.width()), d.pick(2.5, -0.0, 1e-30)),
    tensor=lambda d: d.graph.scale(d.x(d.width()), d.param(1)),
)
_simple("Clamp", any=lambda d: d.graph.clamp(d.x(d.width()), d.pick(-0.1, -np.inf), d.pick(0.2, np.inf)))
_simple("Softcap", any=lambda d: d.graph.softcap(d.x(d.width()), d.pick(0.5, 30.0)))
_simple("Xielu", any=lambda d: d.graph.xielu(d.x(d.width()), 0.8, 0.6, 0.5, -1e-6))
_simple(
    "Mul",
    values=lambda d: d.graph.mul(*_two(d)),
    number=lambda d: d.graph.mul(d.x(d.width()), d.x(1)),
    vector=lambda d: d.graph.mul(x := d.x(d.width()), d.param(x.width)),
)
_simple(
    "Div",
    values=lambda d: d.graph.div(x := d.x(d.width()), d.x(x.width, even=True)),
    number=lambda d: d.graph.div(d.x(d.width()), d.x(1, even=True)),
    vector=lambda d: d.graph.div(x := d.x(d.width()), d.param(x.width)),
)
_simple("SigmoidGate", any=lambda d: d.graph.sigmoid_gate(d.x(d.width()), d.x(1)))
for _name in ("identity", "silu", "gelu", "relu", "relu_squared", "sigmoid", "tanh", "softplus", "exp", "never"):
    _simple("Map", **{_name: lambda d, _name=_name: d.graph.map(_bounded(d, _name), getattr(activations, _name))})
for _kind in Activation:
    _simple("Gated", **{_kind.value: lambda d, _kind=_kind: d.graph.gated(*_two(d), _kind)})


@maker(_op("CorrectStream"), "any")
def _correct(d: Draft) -> None:
    width, n = d.width(), d.choose(1, 4)
    predicted = tuple(d.x(width) for _ in range(n))
    correct(d.graph, predicted, d.x(n), d.x(width))


@maker(_op("StreamGate"), "any")
def _stream_gate(d: Draft) -> None:
    stream_gate(d.graph, d.x(d.width()), d.pick(1.0, 2.0), d.pick(1e-6, 0.5))


@maker(_op("StreamWeights"), "any")
def _stream_weights(d: Draft) -> None:
    n = d.choose(1, 5)
    base, scale = d.param(n * (n + 2)), d.param(3)
    stream_weights(d.graph, d.x(n * (n + 2), even=True), base, scale, n, d.choose(1, 4), d.pick(1e-6, 0.1))


@maker(_op("MixStreams"), "any")
def _mix_streams(d: Draft) -> None:
    (n_in, n_out), width = (d.choose(1, 5) for _ in range(2)), d.choose(1, 40)
    mix_streams(d.graph, d.x(n_in * width, even=True), d.x(n_in * n_out, even=True), width)


@maker(_op("AttentionTemperature"), "any")
def _attention_temperature(d: Draft) -> None:
    d.graph.attention_temperature(d.x(d.width()), d.pick(0.1, 0.3), d.choose(1, 20), d.choose(0, 3))


# --- heads and columns -----------------------------------------------------------------------------------------------


@maker(_op("MulHeads"), "value")
def _mul_heads(d: Draft) -> None:
    x, head_dim = of_heads(d)
    d.graph.mul(x, d.x(x.width // head_dim), head_dim)


@maker(_op("MulHeads"), "vector")
def _mul_heads_by_vector(d: Draft) -> None:
    x, head_dim = of_heads(d)
    d.graph.mul(x, d.param(x.width // head_dim), head_dim)


@maker(_op("Columns"), "of the row")
def _columns(d: Draft) -> None:
    x = d.x(d.width())
    first = d.choose(0, x.width - 1)
    d.graph.columns(x, first, d.choose(1, x.width - first))


@maker(_op("Columns"), "of each head")
def _columns_of_heads(d: Draft) -> None:
    x, head_dim = of_heads(d)
    first = d.choose(0, head_dim - 1)
    d.graph.columns(x, first, d.choose(1, head_dim - first), of=head_dim)


@maker(_op("Concat"), "heads")
def _concat(d: Draft) -> None:
    n, da, db = d.choose(1, 5), d.choose(1, 40), d.choose(1, 40)
    n_a, n_b = d.pick((n, n), (n, 1), (1, n))
    d.graph.concat(d.x(n_a * da), d.x(n_b * db), of=(da, db))


@maker(_op("Repeat"), "any")
def _repeat(d: Draft) -> None:
    x, head_dim = of_heads(d)
    d.graph.repeat(x, head_dim, d.choose(1, 4), tiled=d.pick(False, True))


@maker(_op("Dot"), "any")
def _dot(d: Draft) -> None:
    # Heads of equal signs: a sum of float32 that cancels has no relative error bound.
    head_dim = d.choose(1, 40)
    width = head_dim * d.choose(1, 5)
    a, b = (d.graph.map(d.x(width, even=True), activations.sigmoid) for _ in "ab")
    dot(d.graph, a, b, head_dim)


# --- norms -----------------------------------------------------------------------------------------------------------


def _norm(verb: Callable[..., Value], *, shape: str, bias: bool = False) -> Maker:
    def make(d: Draft) -> None:
        x, head_dim = of_heads(d)
        shapes = {"whole": (x.width,), "shared": (head_dim,), "heads": (x.width // head_dim, head_dim)}
        norm = None
        if shape != "none":
            norm = Param(d.tensor(*shapes[shape]), d.tensor(*shapes[shape]) if bias else None)
        verb(d.graph, x, norm, d.pick(1e-6, 0.5), None if shape == "whole" else head_dim)

    return make


for _shape in ("whole", "shared", "heads", "none"):
    _simple("RmsNorm", **{_shape: _norm(Graph.rms_norm, shape=_shape)})
    _simple("LayerNorm", **{_shape: _norm(Graph.layer_norm, shape=_shape)})
for _shape in ("whole", "heads"):
    _simple("RmsNorm", **{f"{_shape} with bias": _norm(Graph.rms_norm, shape=_shape, bias=True)})
    _simple("LayerNorm", **{f"{_shape} with bias": _norm(Graph.layer_norm, shape=_shape, bias=True)})


def _l2(verb: Callable[..., Value]) -> Maker:
    def make(d: Draft) -> None:
        verb(d.graph, *of_heads(d), d.pick(1e-6, 0.5))

    return make


_simple("L2Norm", any=_l2(l2_norm))
_simple("SlowL2Norm", any=_l2(slow_l2_norm))


@maker(_op("MatchMagnitude"), "any")
def _match(d: Draft) -> None:
    width = d.width()
    match_magnitude(d.graph, d.x(width, even=True), d.x(width))


@maker(_op("GaussianTopK"), "any")
def _gaussian_topk(d: Draft) -> None:
    gaussian_topk(d.graph, d.x(1 + d.width()), d.pick(0.5, -0.2))


@maker(_op("PredictStream"), "any")
def _predict(d: Draft) -> None:
    width, n = d.width(), d.choose(1, 4)
    predict(d.graph, tuple(d.x(width) for _ in range(n)), d.x(n * n))


# --- matrices --------------------------------------------------------------------------------------------------------


def _changes(d: Draft, n_out: int, n_in: int, *stack: int) -> LowRanks:
    rank = d.choose(1, 5)
    a, b = d.tensor(*stack, rank, n_in), d.tensor(*stack, n_out, rank)
    return LowRank(a, b, 0.5), LowRank(a, b, 0.25)


@maker(_op("Embed"), "changed")
def _embed(d: Draft) -> None:
    width, rank = d.width(), d.choose(1, 5)
    change = LowRank(d.tensor(N_VOCAB, rank), d.tensor(width, rank), 0.5)
    d.graph.record(Embed(d.graph.value(width), d.tensor(N_VOCAB, width), 1.5, changes=(change, change)))


@maker(_op("Linear"), "plain")
def _linear(d: Draft) -> None:
    x = d.x(d.width())
    d.graph.linear(x, d.param(d.width(), x.width, bias=d.pick(False, True)))


@maker(_op("Linear"), "residual")
def _linear_residual(d: Draft) -> None:
    x, n_out = d.x(d.width()), d.width()
    d.graph.record(
        Linear(
            d.graph.value(n_out), x, d.tensor(n_out, x.width), d.tensor(n_out), d.x(n_out), _changes(d, n_out, x.width)
        )
    )


@maker(_op("BatchedLinear"), "any")
def _batched_linear(d: Draft) -> None:
    x, head_dim = of_heads(d)
    d.graph.batched_linear(x, d.param(x.width // head_dim, d.choose(1, 40), head_dim, bias=d.pick(False, True)))


@maker(_op("Positions"), "any")
def _positions(d: Draft) -> None:
    x = d.x(d.width())
    d.graph.add(x, d.graph.positions(d.param(d.choose(N_TOKENS, 64), x.width)))


# --- attention, RoPE, recurrent states -------------------------------------------------------------------------------


def _rope(*, interleaved: bool, **options: Any) -> Maker:
    def make(d: Draft) -> None:
        head_dim = d.choose(2, 80)
        n_dims = 2 * d.choose(1, head_dim // 2)
        variant = Rope(n_dims, interleaved=interleaved, first=d.choose(0, head_dim - n_dims), **options)
        factors = [Param(d.tensor(n_dims // 2)) if d.choose(0, 1) else None for _ in range(2)]
        for factor in filter(None, factors):
            d.weights[factor.weight.name] = 1 + np.abs(d.weights[factor.weight.name])
        d.graph.rope(d.x(head_dim * d.choose(1, 4)), variant, head_dim, *factors)

    return make


_yarn = {"freq_scale": 0.25, "ext_factor": 1.0, "n_ctx_orig": 4096}
_simple("Rotate", neighbours=_rope(interleaved=True), halves=_rope(interleaved=False))
_simple("Rotate", yarn=_rope(interleaved=False, **_yarn), long=_rope(interleaved=True, n_ctx_orig=7))


@maker(_op("ShortConv"), "weights")
def _short_conv(d: Draft) -> None:
    x = d.x(d.width(), even=True)
    n_taps = d.choose(2, 6)
    n_ahead = d.choose(0, n_taps - 1) if d.choose(0, 1) else 0
    d.graph.short_conv(x, d.param(x.width, n_taps, bias=d.pick(False, True)), n_ahead=n_ahead)


@maker(_op("ShortConv"), "numbers")
def _short_conv_of_numbers(d: Draft) -> None:
    d.graph.short_conv(d.x(d.width()), d.pick((1.0, -1.0), (1.0, 0.0), (0.5, 0.0, 2.0)))


@maker(_op("BlockConv"), "any")
def _block_conv(d: Draft) -> None:
    n_sides, n_taps, n_groups, group = d.choose(1, 3), d.choose(1, 6), d.choose(1, 5), d.choose(1, 40)
    base, factors = Param(d.tensor(n_sides, n_taps, n_groups * group)), d.x(n_sides * n_taps * n_groups)
    d.graph.block_conv(d.x(n_groups * group), base, factors, d.choose(0, n_sides - 1))


@maker(_op("Conv2d"), "any")
def _conv_2d(d: Draft) -> None:
    strides, freqs, n_in = (d.choose(1, 2), d.choose(1, 3)), d.choose(1, 7), d.choose(1, 9)
    times, taps = strides[0] * d.choose(1, 3), (d.pick(1, 3, 5), d.pick(1, 3, 5))
    param = d.param(16 * d.choose(1, 3), n_in * taps[0] * taps[1], bias=d.pick(False, True))
    x, first = d.x(times * freqs * n_in, even=True), d.pick(False, True)
    d.graph.conv_2d(x, param, (times, freqs), 99, kernel=taps, stride=strides, channels_first=first)


def _linear_state(make: Callable[[Draft, "_Heads"], object], *, one: bool = False) -> Maker:
    def record(d: Draft) -> None:
        n_head = 1 if one else d.choose(1, 4)
        d_v = 16 * d.choose(1, 6)
        make(d, _Heads(d, n_head, 1 if n_head == 1 else d.pick(1, n_head), d.choose(1, 20), d_v))

    return record


@attrs.frozen
class _Heads:
    """Inputs of a linear recurrence that does not grow.

    Vectors have at most unit length, decays are below 1.
    """

    d: Draft
    n: int
    n_k: int
    d_k: int
    d_v: int

    def rows(self, width: int) -> Value:
        return self.d.graph.scale(self.gates(width), 1 / max(1, self.d_k))

    def gates(self, width: int) -> Value:
        return self.d.graph.map(self.d.x(width, even=True), activations.sigmoid)

    def rkv(self) -> tuple[Value, Value, Value]:
        r, k = self.rows(self.n_k * self.d_k), self.rows(self.n_k * self.d_k)
        return r, k, self.d.x(self.n * self.d_v, even=True)

    def record(self, w: Value, **options: Any) -> None:
        shared = self.d.pick("blocks", "tiled")
        self.d.graph.linear_state(*self.rkv(), w, n_head=self.n, n_head_k=self.n_k, shared=shared, **options)


_simple(
    "LinearState",
    heads=_linear_state(lambda d, h: h.record(h.gates(h.n), scale=0.5)),
    delta=_linear_state(lambda d, h: h.record(h.gates(h.n), beta=h.gates(h.n))),
    keys=_linear_state(lambda d, h: h.record(h.gates(h.n * h.d_k), beta=h.gates(h.n))),
    low_rank=_linear_state(
        lambda d, h: h.record(h.gates(h.n * h.d_k), a=h.rows(h.n * h.d_k), b=h.rows(h.n * h.d_k))
    ),
    bonus=_linear_state(lambda d, h: h.record(h.gates(h.n * h.d_k), bonus=d.param(h.n, h.d_k))),
    rates=_linear_state(
        lambda d, h: h.record(h.gates(h.d_v), rates=_falling(d, h.d_v, h.d_k)), one=True
    ),
)  # fmt: skip


def _falling(d: Draft, *shape: int) -> Tensor:
    tensor = d.tensor(*shape)
    d.weights[tensor.name] = -np.abs(d.weights[tensor.name])
    return tensor


def _attention(*, both_ways: bool = False, latent: bool = False) -> Maker:
    def make(d: Draft) -> None:
        n_kv, group, head_dim = d.choose(1, 3), d.choose(1, 10), d.choose(1, 40)
        value_dim = d.choose(1, head_dim if latent else 40)
        k, v = d.x(n_kv * head_dim, even=True), None if latent else d.x(n_kv * value_dim)
        window, chunk = d.pick(None, 1, 3, 30), None if both_ways else d.pick(None, None, 1, 7)
        kv = d.graph.store(k, v, head_dim=head_dim, value_dim=value_dim, window=window, chunk=chunk)
        n_head = n_kv * group
        d.graph.attention(
            d.x(n_head * head_dim), kv, scale=0.3, softcap=d.pick(None, 2.0), causal=not both_ways,
            sinks=d.param(n_head) if d.choose(0, 1) else None, alibi=d.pick(None, 4.0),
        )  # fmt: skip

    return make


def _selection(d: Draft, *, pools: bool = False) -> Selection:
    head_dim, n_head, n_query = 16 * d.choose(1, 3), d.choose(1, 3), d.choose(1, 4)
    window = None if pools else d.pick(None, None, 7)
    kv = d.graph.store(d.x(head_dim, even=True), None, head_dim=head_dim, window=window)
    n = d.choose(1, 8)
    weights = d.x(n_head * n_query, least=LEAST_SCORED) if d.choose(0, 1) else None
    q = d.x(n_head * n_query * head_dim, least=LEAST_SCORED)
    return d.graph.select(
        q, kv, n, weights=weights, n_head=n_head, block=d.choose(1, 4),
        n_local=d.choose(0, min(2, n)), pooled=pools,
    )  # fmt: skip


def _selected(d: Draft, *, has_sinks: bool = False) -> None:
    cells, group, head_dim = _selection(d), d.choose(1, 4), d.choose(1, 40)
    is_latent = bool(d.choose(0, 1))
    value_dim = d.choose(1, head_dim if is_latent else 40)
    k, v = d.x(cells.n_head * head_dim, even=True), None if is_latent else d.x(cells.n_head * value_dim)
    kv = d.graph.store(k, v, head_dim=head_dim, value_dim=value_dim)
    sinks = d.param(cells.n_head * group) if has_sinks else None
    d.graph.attention(d.x(cells.n_head * group * head_dim), kv, scale=0.3, cells=cells, sinks=sinks)


@maker(_op("Pool"), "any")
def _pooled(d: Draft) -> None:
    block, overlap = d.choose(1, 5), d.pick(False, True)
    width = d.choose(1, 40) * (2 if overlap else 1)
    pooled(d.graph, d.x(width, even=True), d.x(width, even=True), d.param(block, width), block, overlap=overlap)


@maker(_op("PooledAttention"), "any")
def _pooled_attention(d: Draft) -> None:
    width, n_head, block = 16 * d.choose(1, 3), d.choose(1, 5), d.choose(1, 5)
    k, k_pooled, q = (d.x(n * width, even=True) for n in (1, 1, n_head))
    chosen = None
    if d.choose(0, 1):
        index = d.graph.store(d.x(16, even=True), None, head_dim=16)
        chosen = d.graph.select(d.x(16, least=LEAST_SCORED), index, d.choose(1, 6), block=block, pooled=True).chosen
    options = {"chosen": chosen, "block": block, "n_recent": d.choose(1, 20), "scale": 0.3}
    pooled_attention(d.graph, q, k, k_pooled, d.param(n_head), **options)


_simple("Select", chosen=lambda d: _selection(d), pooled=lambda d: _selection(d, pools=True))
_simple("SelectedAttention", any=_selected, sinks=lambda d: _selected(d, has_sinks=True))
_simple("Attention", causal=_attention(), latent=_attention(latent=True), both_ways=_attention(both_ways=True))


# --- mixtures of experts ---------------------------------------------------------------------------------------------


def _moe(**options: Any) -> Maker:
    def make(d: Draft) -> None:
        n_expert, n_ff, x = d.choose(1, 8), d.width(), d.x(d.width(), even=True)
        shapes = {"gate": (n_expert, n_ff, x.width), "up": (n_expert, n_ff, x.width), "down": (n_expert, x.width, n_ff)}
        parts: dict[str, Any] = {name: d.param(*shape, bias=d.pick(False, True)) for name, shape in shapes.items()}
        if d.choose(0, 1):
            parts = {name: attrs.evolve(param, scale=d.tensor(n_expert)) for name, param in parts.items()}
        given = {"activation": d.pick(*Activation), **options}
        if given.get("gate", ...) is None:
            parts["gate"], given["activation"] = None, activations.relu_squared
            del given["gate"]
        if given.pop("biased", False):
            given["selection_bias"] = d.param(n_expert)
        n_used = d.choose(1, n_expert)
        if given.pop("grouped", False):
            n_groups = d.choose(2, 3)
            shapes = {name: (2 * n_groups, *shape[1:]) for name, shape in shapes.items()}
            parts, n_expert = {name: d.param(*shape) for name, shape in shapes.items()}, 2 * n_groups
            given["groups"] = n_groups, d.choose(1, n_groups)
            n_used = d.choose(1, 2 * given["groups"][1])
        d.graph.moe(x, d.x(n_expert, even=True), **parts, n_used=n_used, **given)

    return make


for _scoring in Scoring:
    _simple("MoE", **{_scoring.name.lower(): _moe(scoring=_scoring, weight_scale=1.5)})
_simple("MoE", biased=_moe(biased=True, scoring=Scoring.SIGMOID), grouped=_moe(grouped=True), ungated=_moe(gate=None))
_simple("MoE", weighed=_moe(weigh_input=True, renormalize=False, gate=None))


@maker(_op("MoE"), "changed")
def _changed_moe(d: Draft) -> None:
    n_expert, n_ff, x = d.choose(1, 5), d.width(), d.x(d.width(), even=True)
    shapes = (n_ff, x.width), (n_ff, x.width), (x.width, n_ff)
    gate, up, down = (Expert(d.tensor(n_expert, *s), None, None, _changes(d, *s, n_expert)) for s in shapes)
    routing = Routing(d.choose(1, n_expert), True, Scoring.SOFTMAX, None, None, 1.0)
    weighs, router = d.pick(False, True), d.x(n_expert, even=True)
    activation = activations.relu_squared if weighs else Activation.SWIGLU
    parts = x, router, None if weighs else gate, up, down
    d.graph.record(MoE(d.graph.value(x.width), *parts, routing, activation, weighs))


MAKERS = dict(_MAKERS)
"""Makers of random graphs by name, which begins with that of the op."""


def random_example(name: str, choose: Choose) -> Example:
    """Make a random graph of an op."""
    op, make = MAKERS[name]
    draft = Draft(choose)
    make(draft)
    return Example(op, draft.choose(0, 999), draft.graph, draft.weights)


def made_ops() -> Iterator[type[Op]]:
    """Ops that have random graphs."""
    yield from {op for op, _ in MAKERS.values()}
