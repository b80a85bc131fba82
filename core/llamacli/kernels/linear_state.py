"""Linear recurrence kernel: matrix states that decay and take up outer products.

A state is float32 [n_head, d_k, d_v]. Its columns along d_v do not depend on one another: a unit of work is a tile of
up to 80 columns of one head of one sequence, and the rows of the sequence follow one another in it. Sums over d_k are
in their order, so a token's result does not depend on how a prompt is divided.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import numpy as np

from llamacli.kernels import ir
from llamacli.kernels.deferred import intrinsic, types
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import LANES, STATE_FIELDS, record
from llamacli.kernels.recurrent import state_kernel

LINEAR_STATE = record(
    "r", "r_stride", "k", "k_stride", "v", "v_stride", "w", "w_stride", "beta", "beta_stride", "a", "a_stride", "b",
    "b_stride", "decay", "bonus", "out", "out_stride", "n_head", "n_head_k", "d_k", "d_v", "tiled", *STATE_FIELDS,
    scale=np.float32,
)  # fmt: skip
"""Addresses of values, and the bytes between their rows. `decay`: float32 [d_k, d_v]; `bonus`: float32 [n_head, d_k];
`tiled`: 1 if head h reads head h mod n_head_k of r and k, else 0 for head h // (n_head / n_head_k)."""

HEAD, KEY, MATRIX = range(3)
"""Decay: a number w for each head, or for each head and index of d_k; or exp(w[v] * decay[k, v])."""

NONE, BETA, LOW_RANK = range(3)
"""Correction of the state: none, the delta rule with `beta`, or (state a) b^T."""

MOST_VECTORS = 5
"""Vectors of columns that a thread computes at once at most."""


@attrs.frozen
class StateForm:
    """Form of a linear recurrence.

    A tile has `n_vectors` vectors of columns. `decay` is one of HEAD, KEY and MATRIX, `correction` is one of NONE, BETA
    and LOW_RANK.
    """

    n_vectors: int
    decay: int
    correction: int
    has_bonus: bool


_TERMS = (
    (HEAD, NONE, False), (HEAD, BETA, False), (KEY, NONE, False), (KEY, BETA, False), (KEY, LOW_RANK, False),
    (KEY, NONE, True), (MATRIX, NONE, False),
)  # fmt: skip

STATE_FORMS = [StateForm(n, *terms) for terms in _TERMS for n in range(1, MOST_VECTORS + 1)]
"""Forms compiled ahead of time: those of published architectures."""

_i64, _f32 = types.int64, types.float32


@intrinsic(prefer_literal=True)
def _step(typingctx: Any, n: Any, decay_kind: Any, correction: Any, has_bonus: Any, state: Any, target: Any,
          row_bytes: Any, d_k: Any, r: Any, k: Any, v: Any, w: Any, beta: Any, a: Any, b: Any, decay: Any, bonus: Any,
          out: Any, scale: Any) -> Any:  # fmt: skip
    """Compute one token of n vectors of columns.

    `state` is read and `target` written, rows `row_bytes` apart; they may be the same. Other operands are addresses.
    """
    n_vectors, decays, corrects, adds_bonus = (x.literal_value for x in (n, decay_kind, correction, has_bonus))

    def codegen(context: Any, builder: ir.Builder, signature: Any, args: Any) -> Any:
        _, _, _, _, state, target, row_bytes, d_k, r, k, v, w, beta, a, b_, decay, bonus, out, scale = args
        bld, zero = builder, ir.constant(ir.F32X16, 0.0)
        columns = [4 * LANES * i for i in range(n_vectors)]
        taken = [ir.load(bld, ir.offset(bld, v, at), ir.F32X16) for at in columns]
        head_decay = ir.broadcast_f32(bld, w) if decays == HEAD else None
        dts = [ir.load(bld, ir.offset(bld, w, at), ir.F32X16) for at in columns] if decays == MATRIX else []

        def number(base: ir.Value, i: ir.Value) -> ir.Value:
            return ir.broadcast_f32(bld, bld.add(base, bld.mul(i, ir.I64(4))))

        def decay_of(i: ir.Value) -> list[ir.Value]:
            """Decay of row i of the state, for each vector of columns."""
            if decays == HEAD:
                return [head_decay] * n_vectors
            if decays == KEY:
                return [number(w, i)] * n_vectors
            row = bld.add(decay, bld.mul(i, row_bytes))
            rates = [ir.load(bld, ir.offset(bld, row, at), ir.F32X16) for at in columns]
            return [ir.exp(bld, bld.fmul(dt, rate)) for dt, rate in zip(dts, rates, strict=True)]

        read = [zero] * n_vectors
        if corrects != NONE:

            def body(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                row = bld.add(state, bld.mul(i, row_bytes))
                weight = number(a if corrects == LOW_RANK else k, i)
                if corrects == BETA and decays == KEY:
                    weight = bld.fmul(weight, number(w, i))
                return [
                    ir.fma(bld, weight, ir.load(bld, ir.offset(bld, row, at), ir.F32X16), total)
                    for at, total in zip(columns, totals, strict=True)
                ]

            read = ir.loop(bld, d_k, read, body)
        if corrects == BETA:
            factor = ir.broadcast_f32(bld, beta)
            if decays == HEAD:
                read = [bld.fmul(head_decay, x) for x in read]
            taken = [bld.fmul(factor, bld.fsub(x, y)) for x, y in zip(taken, read, strict=True)]

        def update(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            place = bld.mul(i, row_bytes)
            source, goal = bld.add(state, place), bld.add(target, place)
            key, query = number(k, i), number(r, i)
            boost = bld.fmul(number(bonus, i), key) if adds_bonus else None
            results = []
            for at, x, u, w_i, total in zip(columns, taken, read, decay_of(i), totals, strict=True):
                old = ir.load(bld, ir.offset(bld, source, at), ir.F32X16)
                new = ir.fma(bld, key, x, bld.fmul(w_i, old))
                if corrects == LOW_RANK:
                    new = ir.fma(bld, number(b_, i), u, new)
                ir.store(bld, ir.offset(bld, goal, at), new)
                seen = ir.fma(bld, boost, x, old) if adds_bonus else new
                results.append(ir.fma(bld, query, seen, total))
            return results

        totals = ir.loop(bld, d_k, [zero] * n_vectors, update)
        factor = ir.splat(bld, scale)
        for at, total in zip(columns, totals, strict=True):
            ir.store(bld, ir.offset(bld, out, at), bld.fmul(factor, total))
        return context.get_dummy_value()

    return types.void(n, decay_kind, correction, has_bonus, *[_i64] * 14, _f32), codegen


@functools.cache
def linear_state(form: StateForm) -> Kernel:
    """Kernel of a linear recurrence."""
    n_vectors, decay_kind, correction, bonus_kind = form.n_vectors, form.decay, form.correction, int(form.has_bonus)

    def count(a):  # type: ignore[no-untyped-def]
        return a.n_head * (a.d_v // (LANES * n_vectors))

    def advance(a, unit, first, last, state, target):  # type: ignore[no-untyped-def]
        n_tiles, row_bytes = a.d_v // (LANES * n_vectors), 4 * a.d_v
        head, column = unit // n_tiles, LANES * n_vectors * (unit % n_tiles)
        head_k = head % a.n_head_k if a.tiled else head // (a.n_head // a.n_head_k)
        place = head * a.d_k * row_bytes + 4 * column
        for row in range(first, last):
            w = a.w + row * a.w_stride
            if decay_kind == HEAD:
                w += 4 * head
            elif decay_kind == KEY:
                w += 4 * head * a.d_k
            else:
                w += 4 * column
            _step(
                n_vectors, decay_kind, correction, bonus_kind, state + place, target + place, row_bytes, a.d_k,
                a.r + row * a.r_stride + 4 * head_k * a.d_k, a.k + row * a.k_stride + 4 * head_k * a.d_k,
                a.v + row * a.v_stride + 4 * (head * a.d_v + column), w,
                a.beta + row * a.beta_stride + 4 * head, a.a + row * a.a_stride + 4 * head * a.d_k,
                a.b + row * a.b_stride + 4 * head * a.d_k, a.decay + 4 * column, a.bonus + 4 * head * a.d_k,
                a.out + row * a.out_stride + 4 * (head * a.d_v + column), a.scale,
            )  # fmt: skip
            state = target

    return state_kernel(
        "linear_state", LINEAR_STATE, count, advance, f"_{n_vectors}{decay_kind}{correction}{bonus_kind}"
    )
