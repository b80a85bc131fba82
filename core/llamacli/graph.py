"""The verbs that an architecture's forward pass is written in, and the graph that they record.

A plugin's `forward` runs once, when a model is loaded, on symbolic values: one per activation, holding no numbers. What
it records is a list of ops, data only, which an engine compiles and then replays for every batch of tokens. Plugins see
the verbs alone, so engines can be replaced or made faster without touching them.

Every value is a matrix [n_tokens, width] of float32 whose number of rows is known only when the graph is run.
"""

from __future__ import annotations

import attrs

from llamacli.errors import PluginError
from llamacli.rope import Rope


@attrs.frozen(eq=False)
class Tensor:
    """A tensor of the model file: its name and its shape, rows first, e.g. (n_out, n_in) for a linear layer."""

    name: str
    shape: tuple[int, ...]


@attrs.frozen(eq=False)
class Param:
    """A parameter of the model: `weight`, and `bias` where the file has one. Absent optional ones are None instead."""

    weight: Tensor
    bias: Tensor | None = None


@attrs.frozen(eq=False)
class Value:
    """An activation, float32 [n_tokens, width]."""

    graph: Graph = attrs.field(repr=False)
    width: int

    def __add__(self, other: Value) -> Value:
        return self.graph.add(self, other)


@attrs.frozen
class AttentionState:
    """What one attention layer keeps of every token: `n_head_kv` keys and values of `head_dim` numbers each."""

    n_head_kv: int
    head_dim: int


@attrs.frozen(eq=False)
class Op:
    """One recorded operation; `out` is the value that it computes."""

    out: Value

    def tensors(self) -> list[Tensor]:
        """The model's tensors that it reads."""
        values = [getattr(self, field.name) for field in attrs.fields(type(self))]
        return [value for value in values if isinstance(value, Tensor)]


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
class RmsNorm(Op):
    """out = x / sqrt(mean(x^2) + eps) * weight."""

    x: Value
    weight: Tensor
    eps: float


@attrs.frozen(eq=False)
class Linear(Op):
    """out = x @ weight.T + bias."""

    x: Value
    weight: Tensor
    bias: Tensor | None


@attrs.frozen(eq=False)
class Rotate(Op):
    """out = x with each head of `head_dim` turned by its token's position."""

    x: Value
    rope: Rope
    factors: Tensor | None
    head_dim: int


@attrs.frozen(eq=False)
class Attention(Op):
    """out = softmax(scale * q k^T, causal) v over all tokens so far, after k and v joined layer `layer`'s state."""

    q: Value
    k: Value
    v: Value
    layer: int
    head_dim: int
    scale: float


@attrs.frozen(eq=False)
class SwiGLU(Op):
    """out = silu(gate) * up."""

    gate: Value
    up: Value


@attrs.frozen(eq=False)
class MoE(Op):
    """out = sum over the `n_used` experts e of largest p = softmax(router): p(e) * down_e(silu(gate_e(x)) * up_e(x)).

    Expert tensors are (n_expert, n_out, n_in). With `renormalize` the chosen probabilities are scaled to sum to 1.
    """

    x: Value
    router: Value
    gate: Tensor
    up: Tensor
    down: Tensor
    n_used: int
    renormalize: bool


class Graph:
    """Records the verbs of one forward pass. `ops` in order, and `states`, what each attention layer keeps."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.states: list[AttentionState] = []

    def routers(self) -> set[str]:
        """The names of the tensors that decide which experts are chosen: rounding them would change choices."""
        values = {op.router for op in self.ops if isinstance(op, MoE)}
        return {op.weight.name for op in self.ops if isinstance(op, Linear) and op.out in values}

    def embed(self, table: Param) -> Value:
        """The embedding of each token: rows of `table`, (n_vocab, n_embd)."""
        return self._record(Embed(self._value(table.weight.shape[1]), table.weight))

    def add(self, a: Value, b: Value) -> Value:
        """a + b; also written with the operator."""
        self._expect("add", a.width == b.width, f"widths {a.width} and {b.width}")
        return self._record(Add(self._value(a.width), a, b))

    def rms_norm(self, x: Value, norm: Param, eps: float) -> Value:
        """Root-mean-square norm over the width (Zhang and Sennrich 2019)."""
        self._expect("rms_norm", norm.weight.shape == (x.width,), f"{norm.weight.name} on width {x.width}")
        return self._record(RmsNorm(self._value(x.width), x, norm.weight, eps))

    def linear(self, x: Value, param: Param) -> Value:
        """A linear layer, with its bias where the file has one."""
        n_out, n_in = param.weight.shape
        self._expect("linear", n_in == x.width, f"{param.weight.name} of width {n_in} on width {x.width}")
        return self._record(Linear(self._value(n_out), x, param.weight, param.bias))

    def rope(self, x: Value, rope: Rope, head_dim: int, factors: Param | None = None) -> Value:
        """Turn every head of x by its token's position; `factors` divide the frequency of each pair."""
        fits = x.width % head_dim == 0 and 0 < rope.n_dims <= head_dim and rope.n_dims % 2 == 0
        self._expect("rope", fits, f"{rope.n_dims} dimensions of head_dim {head_dim} on width {x.width}")
        if factors:
            pairs = (rope.n_dims // 2,)
            self._expect("rope", factors.weight.shape == pairs, f"{factors.weight.name} and {rope.n_dims} dimensions")
        return self._record(Rotate(self._value(x.width), x, rope, factors.weight if factors else None, head_dim))

    def attention(self, q: Value, k: Value, v: Value, *, head_dim: int, scale: float) -> Value:
        """Causal attention; heads of q share the fewer heads of k and v in groups (Ainslie et al. 2023).

        Each call is one layer of the KV cache.
        """
        fits = k.width == v.width and k.width % head_dim == 0 and q.width % k.width == 0
        self._expect("attention", fits, f"q, k, v of widths {q.width}, {k.width}, {v.width} and head_dim {head_dim}")
        self.states.append(AttentionState(k.width // head_dim, head_dim))
        return self._record(Attention(self._value(q.width), q, k, v, len(self.states) - 1, head_dim, scale))

    def swiglu(self, gate: Value, up: Value) -> Value:
        """silu(gate) * up (Shazeer 2020)."""
        self._expect("swiglu", gate.width == up.width, f"widths {gate.width} and {up.width}")
        return self._record(SwiGLU(self._value(gate.width), gate, up))

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
    ) -> Value:
        """A mixture of SwiGLU experts: each token is given to its `n_used` most probable ones (Jiang et al. 2024)."""
        n_expert, n_ff, n_in = gate.weight.shape
        fits = up.weight.shape == gate.weight.shape and down.weight.shape == (n_expert, x.width, n_ff)
        self._expect("moe", fits and n_in == x.width, f"experts {gate.weight.name} on width {x.width}")
        self._expect("moe", router.width == n_expert >= n_used > 0, f"{n_used} of {n_expert} experts")
        out = self._value(x.width)
        return self._record(MoE(out, x, router, gate.weight, up.weight, down.weight, n_used, renormalize))

    def _value(self, width: int) -> Value:
        return Value(self, width)

    def _record(self, op: Op) -> Value:
        self.ops.append(op)
        return op.out

    @staticmethod
    def _expect(verb: str, holds: bool, what: str) -> None:
        if not holds:
            raise PluginError(f"{verb}: {what} do not fit together")
