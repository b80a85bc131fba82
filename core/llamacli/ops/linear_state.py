"""Linear recurrence with a matrix state a head.

Gated delta nets (Yang et al. 2024), selective state spaces (Gu and Dao 2023, Dao and Gu 2024), RWKV (Peng et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import attrs
import numpy as np

from llamacli.kernels.layout import LANES
from llamacli.kv import N_BATCH
from llamacli.ops.activations import sigmoid
from llamacli.ops.base import MakeParam, Recorder, expect
from llamacli.ops.linear import linear
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.map import map_
from llamacli.ops.recurrent import Floats, StateOp
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value


@attrs.frozen(eq=False)
class LinearState(StateOp):
    """Linear recurrence op over the tokens of a sequence; see `linear_state`.

    A state S, zero before the first token, is a d_k x d_v matrix for each of `n_head` heads.
    """

    r: Value
    k: Value
    v: Value
    w: Value | tuple[float, ...]
    rates: Tensor | None
    beta: Value | None
    a: Value | None
    b: Value | None
    bonus: Tensor | None
    n_head: int
    n_head_k: int
    scale: float
    tiled: bool

    @property
    def d_k(self) -> int:
        """Rows of a head's state."""
        return self.k.width // self.n_head_k

    @property
    def d_v(self) -> int:
        """Columns of a head's state."""
        return self.v.width // self.n_head

    def advance(self, run: Run, first: int, last: int, state: Floats) -> tuple[Array, Floats]:
        # The state is rounded to float32 after each token, as a sequence keeps it.
        n, rows, heads = last - first, slice(first, last), np.arange(self.n_head)
        shared = heads % self.n_head_k if self.tiled else heads // (self.n_head // self.n_head_k)
        r, k = (run[x][rows].reshape(n, self.n_head_k, self.d_k)[:, shared] for x in (self.r, self.k))
        v = run[self.v][rows].reshape(n, self.n_head, self.d_v)
        w: Array
        if isinstance(self.w, tuple):  # [n_head, 1, 1] for every token
            w = np.broadcast_to(np.array(self.w, np.float32)[:, None, None], (n, self.n_head, 1, 1))
        elif self.rates:  # [n, 1, d_k, d_v]
            w = np.exp(run[self.w][rows, None, None] * run[self.rates].T[None, None])
        else:  # [n, n_head, 1 or d_k, 1]
            w = run[self.w][rows].reshape(n, self.n_head, self.w.width // self.n_head, 1)
        a, b = (None if x is None else run[x][rows].reshape(n, self.n_head, self.d_k) for x in (self.a, self.b))
        out = np.empty((n, self.n_head, self.d_v))
        for t in range(n):
            old = state.astype(np.float64)
            taken = v[t]
            new = w[t] * old
            if self.beta:
                seen = np.einsum("hkv,hk->hv", new, k[t])
                taken = run[self.beta][first + t, :, None] * (taken - seen)
            if a is not None and b is not None:
                new = new + np.einsum("hkv,hk,hj->hjv", old, a[t], b[t])
            new = new + k[t][:, :, None] * taken[:, None]
            read = new
            if self.bonus:
                read = old + (run[self.bonus] * k[t])[:, :, None] * taken[:, None]
            out[t] = self.scale * np.einsum("hkv,hk->hv", read, r[t])
            state = new.astype(np.float32)
        return out.reshape(n, self.v.width), state

    def lower(self, to: Lowering) -> None:
        from llamacli.kernels import linear_state as kernels
        from llamacli.kernels.linear_state import BETA, HEAD, KEY, LINEAR_STATE, LOW_RANK, MATRIX, NONE

        n_vectors = next(n for n in range(kernels.MOST_VECTORS, 0, -1) if self.d_v // LANES % n == 0)
        values = {name: getattr(self, name) for name in ("r", "k", "v", "beta", "a", "b")}
        fields: dict[str, Any] = {name: None if value is None else f32(value) for name, value in values.items()}
        if isinstance(self.w, tuple):
            n_decays, fields["w"] = len(self.w), to.memory(np.tile(np.array(self.w, np.float32), (N_BATCH, 1)))
        else:
            n_decays, fields["w"] = self.w.width, f32(self.w)
        decay = MATRIX if self.rates else HEAD if n_decays == self.n_head else KEY
        correction = BETA if self.beta else LOW_RANK if self.a else NONE
        decays = bonus = None
        if self.rates:
            decays = to.memory(np.ascontiguousarray(to.vector(self.rates)[: self.d_v, : self.d_k].T))
        if self.bonus:
            bonus = to.memory(np.ascontiguousarray(to.vector(self.bonus)[: self.n_head, : self.d_k]))
        to.step(
            kernels.linear_state(kernels.StateForm(n_vectors, decay, correction, self.bonus is not None)),
            LINEAR_STATE, **fields, **self.state_params(to), out=f32(self.out), decay=decays, bonus=bonus,
            n_head=self.n_head, n_head_k=self.n_head_k, d_k=self.d_k, d_v=self.d_v, tiled=self.tiled, scale=self.scale,
            work=4.0 * self.n_head * self.d_k * self.d_v,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        gate = map_(g, linear(g, x, param("gate", 2, x.width)), sigmoid)
        v, few = linear(g, x, param("v", 32, x.width)), linear(g, x, param("few", 5, x.width))
        keys = map_(g, linear(g, x, param("keys", 10, x.width)), sigmoid)
        yield linear_state(g, few, few, v, gate, n_head=2, n_head_k=1)
        yield linear_state(g, few, few, v, gate, n_head=2, n_head_k=1, beta=gate, scale=0.5)
        yield linear_state(g, keys, keys, v, (0.9, 0.5), n_head=2)
        four = linear(g, x, param("four", 4, x.width))
        wide = linear(g, x, param("wide", 128, x.width))
        yield linear_state(g, keys, keys, wide, map_(g, four, sigmoid), n_head=4, n_head_k=2, shared="tiled")
        yield linear_state(g, keys, keys, v, keys, n_head=2, beta=gate)
        yield linear_state(g, keys, keys, v, keys, n_head=2, a=keys, b=keys)
        yield linear_state(g, keys, keys, v, keys, n_head=2, bonus=param("bonus", 2, 5))
        yield linear_state(g, few, few, x, map_(g, x, sigmoid), n_head=1, rates=param("rates", x.width, 5))


def linear_state(
    g: Recorder,
    r: Value,
    k: Value,
    v: Value,
    w: Value | tuple[float, ...],
    *,
    n_head: int,
    n_head_k: int | None = None,
    rates: Param | Tensor | None = None,
    beta: Value | None = None,
    a: Value | None = None,
    b: Value | None = None,
    bonus: Param | None = None,
    scale: float = 1.0,
    shared: Literal["blocks", "tiled"] = "blocks",
) -> Value:
    """Record a linear recurrence of matrix states (linear attention, SSM).

    Each head has a state S of d_k rows and d_v columns.

    - `v`: n_head * d_v numbers a token; d_v is a multiple of 16. The result has the same width.
    - `r`, `k`: n_head_k * d_k numbers; n_head_k divides n_head, its default. With `shared` "blocks", consecutive heads
      read the same head of r and k (h // (n_head / n_head_k)); with "tiled", head h reads head h mod n_head_k.
    - `w`: the decay, a number a head or n_head * d_k numbers, or a tuple of one a head for all tokens. With `rates`,
      (d_v, d_k), there is one head, w has d_v numbers, and the decay is exp(w[j] * rates[j, i]) for row i and column j
      (selective scan).
    - `beta`, a number a head: the delta rule; v is replaced by beta * (v - (diag(w) S[t-1])^T k).
    - `a`, `b`: n_head * d_k numbers each (RWKV-7).
    - `bonus`, (n_head, d_k): `out[t]` reads S[t-1] + (bonus * k) v^T (RWKV-6).

    These are gated delta nets (`beta`), state space duality (neither), the selective scan (`rates`), RWKV and gated
    linear attention. The state is float32 and zero before the first token. Tokens are computed one after another, so
    results do not depend on how a prompt is divided.

    Formula: `S[t] = diag(w) @ S[t-1] + outer(b, S[t-1].T @ a) + outer(k, v)`, `out[t] = scale * S[t].T @ r`
    Shapes: r and k [n, n_head_k * d_k], v [n, n_head * d_v]; w [n, n_head] or [n, n_head * d_k]; beta [n, n_head];
        out [n, n_head * d_v]
    Limits: d_v is a multiple of 16; n_head_k divides n_head; `rates` needs a single head
    Example: `out = g.linear_state(q, k, v, decay, n_head=32, n_head_k=16, beta=beta, scale=128**-0.5)`
    """
    expect("linear_state", n_head > 0 and v.width % n_head == 0, f"v of width {v.width} and {n_head} heads")
    d_v = v.width // n_head
    expect("linear_state", d_v % LANES == 0, f"heads of {d_v} numbers of v and multiples of {LANES}")
    n_head_k = n_head if n_head_k is None else n_head_k
    fits = n_head_k > 0 and n_head % n_head_k == 0 and k.width % n_head_k == 0 and r.width == k.width
    expect("linear_state", fits, f"r and k of widths {r.width} and {k.width}, {n_head} heads and {n_head_k} of r and k")
    d_k, matrix = k.width // n_head_k, rates.weight if isinstance(rates, Param) else rates
    if isinstance(w, tuple):
        expect("linear_state", len(w) == n_head and not matrix, f"{len(w)} constant decays and {n_head} heads")
    elif matrix:
        fits = n_head == 1 and matrix.shape == (d_v, d_k) and w.width == d_v
        expect("linear_state", fits, f"{matrix.name} {matrix.shape}, w of width {w.width} and {n_head} heads of {d_v}")
    else:
        fits = w.width in (n_head, n_head * d_k)
        expect("linear_state", fits, f"w of width {w.width}, {n_head} heads and rows of {d_k}")
    expect("linear_state", beta is None or beta.width == n_head, f"beta and {n_head} heads")
    pair = (a is None) == (b is None) and all(x is None or x.width == n_head * d_k for x in (a, b))
    expect("linear_state", pair and not (a and beta), f"a and b and {n_head} heads with rows of {d_k}")
    if bonus:
        shape = bonus.weight.shape
        expect("linear_state", shape == (n_head, d_k), f"{bonus.weight.name} {shape} and {n_head} heads of {d_k}")
    state = g.recurrent_state("linear_state", n_head, d_k, d_v)
    weight = bonus.weight if bonus else None
    return g.record(
        LinearState(
            g.value(v.width), state, r, k, v, w, matrix, beta, a, b, weight, n_head, n_head_k, scale, shared == "tiled"
        )
    )
