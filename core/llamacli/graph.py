"""The verbs that an architecture's forward pass is written in, and the graph that they record.

A plugin's `forward` runs once, when a model is loaded, on symbolic values: one per activation, holding no numbers. What
it records is a list of ops, data only, which an engine compiles and then replays for every batch of tokens. Plugins see
the verbs alone, so engines can be replaced or made faster without touching them.

Every value is a matrix [n_tokens, width] of float32 whose number of rows is known only when the graph is run.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import attrs
import numpy.typing as npt

from llamacli.errors import PluginError
from llamacli.kv.layout import KVSpec
from llamacli.ops.rope import Rope


@attrs.frozen
class Tensor:
    """A tensor of the model file, or some of its rows: its name and its shape, rows first, e.g. (n_out, n_in).

    `first_row` is where its rows begin in the tensor of that name.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int = 0

    @property
    def is_matrix(self) -> bool:
        """Whether it is multiplied with; what is added or scales, one number a row, is not."""
        return self.name.endswith(".weight") and len(self.shape) > 1

    def rows_of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The tensor's part of the whole one of its name; rows are the last axis but one, in biases the last."""
        axis = -2 if self.is_matrix else -1
        rows = slice(self.first_row, self.first_row + self.shape[axis])
        return array[..., rows, :] if self.is_matrix else array[..., rows]


@attrs.frozen(eq=False)
class Param:
    """A parameter of the model: `weight`, and `bias` and `scale` where the file has them.

    Absent optional parameters are None instead.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    def split(self, *n_rows: int) -> list[Param]:
        """Parameters that were stored one below the other, e.g. `q, k, v = attn_qkv.split(n_q, n_kv, n_kv)`.

        Raises PluginError if the rows do not add up.
        """
        have = self.weight.shape[-2]
        if sum(n_rows) != have:
            raise PluginError(f"{self.weight.name} has {have} rows and is to be split into {sum(n_rows)}")
        firsts = [sum(n_rows[:i]) for i in range(len(n_rows))]
        return [
            Param(
                attrs.evolve(self.weight, shape=(*self.weight.shape[:-2], n, self.weight.shape[-1]), first_row=first),
                self.bias and attrs.evolve(self.bias, shape=(*self.bias.shape[:-1], n), first_row=first),
            )
            for first, n in zip(firsts, n_rows, strict=True)
        ]


@attrs.frozen(eq=False)
class Value:
    """An activation, float32 [n_tokens, width]."""

    graph: Graph = attrs.field(repr=False)
    width: int

    def __add__(self, other: Value) -> Value:
        return self.graph.add(self, other)


@attrs.frozen(eq=False)
class KeyValues:
    """Keys and values that `Graph.store` keeps: those of state number `layer`."""

    graph: Graph = attrs.field(repr=False)
    layer: int
    state: KVSpec


class Activation(enum.StrEnum):
    """What a gated unit makes of gate g and up u.

    - SWIGLU: silu(g) * u (Shazeer 2020).
    - GEGLU: gelu(g) * u, with the approximation by tanh (Hendrycks and Gimpel 2016).
    - SWIGLU_OAI: g * sigmoid(1.702 g) * (u + 1), with g at most 7 and u from -7 to 7.
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    SWIGLU_OAI = "swiglu_oai"


@attrs.frozen(eq=False)
class Op:
    """One recorded operation; `out` is the value that it computes."""

    out: Value

    def tensors(self) -> list[Tensor]:
        """The model's tensors that it reads."""
        return [value for value in self._fields() if isinstance(value, Tensor)]

    def inputs(self) -> list[Value]:
        """The values that it reads."""
        return [value for value in self._fields() if isinstance(value, Value)]

    def _fields(self) -> list[object]:
        return [getattr(self, field.name) for field in attrs.fields(type(self)) if field.name != "out"]


@attrs.frozen(eq=False)
class Embed(Op):
    """out = table[token]."""

    table: Tensor


@attrs.frozen(eq=False)
class Add(Op):
    """out = a + b."""

    a: Value
    b: Value


@attrs.frozen(eq=False)
class Scale(Op):
    """out = x * factor, times the one number of `by` where there is one."""

    x: Value
    factor: float
    by: Tensor | None


@attrs.frozen(eq=False)
class Softcap(Op):
    """out = cap * tanh(x / cap)."""

    x: Value
    cap: float


@attrs.frozen(eq=False)
class Columns(Op):
    """out = the columns of x from `first` on."""

    x: Value
    first: int


@attrs.frozen(eq=False)
class RmsNorm(Op):
    """out = x / sqrt(mean(x^2) + eps) * weight, for each head of `head_dim` on its own; without weight, times 1."""

    x: Value
    weight: Tensor | None
    eps: float
    head_dim: int


@attrs.frozen(eq=False)
class Linear(Op):
    """out = x @ weight.T + bias. A weight of one dimension is one row."""

    x: Value
    weight: Tensor
    bias: Tensor | None


@attrs.frozen(eq=False)
class Rotate(Op):
    """out = x with each head of `head_dim` turned by its token's position.

    `long_factors` stand in for `factors` in sequences that are created for more than `rope.n_ctx_orig` tokens.
    """

    x: Value
    rope: Rope
    factors: Tensor | None
    long_factors: Tensor | None
    head_dim: int


@attrs.frozen(eq=False)
class Store(Op):
    """Puts k and v with state `layer`. `out` is never read and has no numbers."""

    k: Value
    v: Value
    layer: int


@attrs.frozen(eq=False)
class Attention(Op):
    """out = softmax(softcap(scale * q k^T), causal, windowed) v over all tokens of state `layer`.

    `sinks`, one number a head, are logits of one more position, whose value is zero.
    """

    q: Value
    layer: int
    head_dim: int
    scale: float
    softcap: float | None
    sinks: Tensor | None


@attrs.frozen(eq=False)
class Gated(Op):
    """out = activation(gate, up)."""

    gate: Value
    up: Value
    activation: Activation


@attrs.frozen(eq=False)
class SigmoidGate(Op):
    """out = x * sigmoid(gate), gate one number a token."""

    x: Value
    gate: Value


@attrs.frozen(eq=False)
class MoE(Op):
    """out = sum over the `n_used` experts e of largest p = softmax(router): p(e) * scale(e) * down_e(gated_e(x)).

    gated_e(x) = activation(gate_e(x), up_e(x)). Expert tensors are (n_expert, n_out, n_in), biases (n_expert, n_out).
    With `renormalize` the chosen probabilities are scaled to sum to 1.
    """

    x: Value
    router: Value
    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    scale: Tensor | None
    n_used: int
    renormalize: bool
    activation: Activation


class Graph:
    """Records the verbs of one forward pass. `ops` in order, and `states`, what each `store` keeps."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.states: list[KVSpec] = []

    def routers(self) -> set[str]:
        """The names of the tensors that decide which experts are chosen: rounding them would change choices."""
        values = {op.router for op in self.ops if isinstance(op, MoE)}
        return {op.weight.name for op in self.ops if isinstance(op, Linear) and op.out in values}

    def without_output(self) -> Graph:
        """The pass up to what the output layer, the last matrix product, reads: its last op computes that value."""
        makers = {op.out: op for op in self.ops}
        op = self.ops[-1]
        while not isinstance(op, Linear):
            op = makers[op.inputs()[0]]
        part = Graph()
        part.states = self.states
        part.ops = self.ops[: self.ops.index(makers[op.x]) + 1]
        return part

    def embed(self, table: Param) -> Value:
        """The embedding of each token: rows of `table`, (n_vocab, n_embd)."""
        return self._record(Embed(self._value(table.weight.shape[1]), table.weight))

    def add(self, a: Value, b: Value) -> Value:
        """a + b; also written with the operator."""
        self._expect("add", a.width == b.width, f"widths {a.width} and {b.width}")
        return self._record(Add(self._value(a.width), a, b))

    def scale(self, x: Value, factor: float | Param) -> Value:
        """x * factor; a parameter must hold one number."""
        by = factor.weight if isinstance(factor, Param) else None
        if by:
            self._expect("scale", math.prod(by.shape) == 1, f"{by.name} of shape {by.shape} and a single factor")
        return self._record(Scale(self._value(x.width), x, 1.0 if isinstance(factor, Param) else factor, by))

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap): bounds x softly (Bello et al. 2016)."""
        self._expect("softcap", cap > 0, f"cap {cap} and a bound")
        return self._record(Softcap(self._value(x.width), x, cap))

    def columns(self, x: Value, first: int, width: int) -> Value:
        """Columns `first` to `first + width - 1` of x."""
        self._expect("columns", 0 <= first < first + width <= x.width, f"{first} + {width} and width {x.width}")
        return self._record(Columns(self._value(width), x, first))

    def rms_norm(self, x: Value, norm: Param | Tensor | None, eps: float, head_dim: int | None = None) -> Value:
        """Root-mean-square norm over the width, or over each head (Zhang and Sennrich 2019). None has no weight."""
        weight = norm.weight if isinstance(norm, Param) else norm
        head_dim = x.width if head_dim is None else head_dim
        self._expect("rms_norm", x.width % head_dim == 0, f"head_dim {head_dim} and width {x.width}")
        if weight:
            self._expect("rms_norm", weight.shape == (head_dim,), f"{weight.name} {weight.shape} on width {head_dim}")
        return self._record(RmsNorm(self._value(x.width), x, weight, eps, head_dim))

    def linear(self, x: Value, param: Param) -> Value:
        """A linear layer, with its bias where the file has one. A weight of one dimension is one row."""
        n_out, n_in = (1, *param.weight.shape)[-2:]
        self._expect("linear", n_in == x.width, f"{param.weight.name} of width {n_in} on width {x.width}")
        return self._record(Linear(self._value(n_out), x, param.weight, param.bias))

    def rope(
        self, x: Value, rope: Rope, head_dim: int, factors: Param | None = None, long_factors: Param | None = None
    ) -> Value:
        """Turn every head of x by its token's position; `factors` divide the frequency of each pair.

        `long_factors` take their place in sequences created for more than `rope.n_ctx_orig` tokens (LongRoPE, Ding et
        al. 2024).
        """
        fits = x.width % head_dim == 0 and 0 < rope.n_dims <= head_dim and rope.n_dims % 2 == 0
        self._expect("rope", fits, f"{rope.n_dims} dimensions of head_dim {head_dim} on width {x.width}")
        normal, long = (param.weight if param else None for param in (factors, long_factors))
        for weight in filter(None, (normal, long)):
            self._expect("rope", weight.shape == (rope.n_dims // 2,), f"{weight.name} and {rope.n_dims} dimensions")
        return self._record(Rotate(self._value(x.width), x, rope, normal, long, head_dim))

    def store(self, k: Value, v: Value, *, head_dim: int, window: int | None = None) -> KeyValues:
        """Keep keys and values for attention: one layer of the KV cache.

        With a `window`, a token sees itself and the `window` - 1 before it.
        """
        fits = k.width == v.width and k.width % head_dim == 0
        self._expect("store", fits, f"k and v of widths {k.width} and {v.width} and head_dim {head_dim}")
        self._expect("store", window is None or window > 0, f"window {window} and a token that sees itself")
        self.states.append(KVSpec(k.width // head_dim, head_dim, window))
        kept = KeyValues(self, len(self.states) - 1, self.states[-1])
        self._record(Store(self._value(0), k, v, kept.layer))
        return kept

    def attention(
        self, q: Value, kv: KeyValues, *, scale: float, softcap: float | None = None, sinks: Param | None = None
    ) -> Value:
        """Causal attention; heads of q share the fewer heads of k and v in groups (Ainslie et al. 2023).

        Several layers may read what one stored. `softcap` bounds the scores; `sinks`, (n_head,), join the softmax as
        the logits of a position without value (Xiao et al. 2023).
        """
        state = kv.state
        fits = q.width % (state.n_head_kv * state.head_dim) == 0
        self._expect("attention", fits, f"q of width {q.width} and {state.n_head_kv} heads of {state.head_dim}")
        if sinks:
            n_head = q.width // state.head_dim
            self._expect("attention", sinks.weight.shape == (n_head,), f"{sinks.weight.name} and {n_head} heads")
        weight = sinks.weight if sinks else None
        return self._record(Attention(self._value(q.width), q, kv.layer, state.head_dim, scale, softcap, weight))

    def gated(self, gate: Value, up: Value, activation: Activation = Activation.SWIGLU) -> Value:
        """A gated linear unit: activation(gate, up)."""
        self._expect("gated", gate.width == up.width, f"widths {gate.width} and {up.width}")
        return self._record(Gated(self._value(gate.width), gate, up, activation))

    def swiglu(self, gate: Value, up: Value) -> Value:
        """silu(gate) * up (Shazeer 2020)."""
        return self.gated(gate, up, Activation.SWIGLU)

    def geglu(self, gate: Value, up: Value) -> Value:
        """gelu(gate) * up (Shazeer 2020)."""
        return self.gated(gate, up, Activation.GEGLU)

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        """x * sigmoid(gate), where gate is one number a token."""
        self._expect("sigmoid_gate", gate.width == 1, f"a gate of width {gate.width} and one number a token")
        return self._record(SigmoidGate(self._value(x.width), x, gate))

    def moe(
        self,
        x: Value,
        router: Value,
        *,
        gate: Param,
        up: Param,
        down: Param,
        n_used: int,
        renormalize: bool = True,
        activation: Activation = Activation.SWIGLU,
    ) -> Value:
        """A mixture of gated experts: each token is given to its `n_used` most probable ones (Jiang et al. 2024).

        With `renormalize` the probabilities of the chosen are scaled to sum to 1, which is a softmax over them alone.
        A `scale` of `down` multiplies each expert's output.
        """
        n_expert, n_ff, n_in = gate.weight.shape
        fits = up.weight.shape == gate.weight.shape and down.weight.shape == (n_expert, x.width, n_ff)
        self._expect("moe", fits and n_in == x.width, f"experts {gate.weight.name} on width {x.width}")
        self._expect("moe", router.width == n_expert >= n_used > 0, f"{n_used} of {n_expert} experts")
        return self._record(
            MoE(
                self._value(x.width),
                x,
                router,
                gate=gate.weight,
                gate_bias=gate.bias,
                up=up.weight,
                up_bias=up.bias,
                down=down.weight,
                down_bias=down.bias,
                scale=down.scale,
                n_used=n_used,
                renormalize=renormalize,
                activation=activation,
            )
        )

    def _value(self, width: int) -> Value:
        return Value(self, width)

    def _record(self, op: Op) -> Value:
        self.ops.append(op)
        return op.out

    @staticmethod
    def _expect(verb: str, holds: bool, what: str) -> None:
        if not holds:
            raise PluginError(f"{verb}: {what} do not fit together")
