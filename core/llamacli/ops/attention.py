"""Causal attention over the KV cache.

Grouped queries, sliding windows, soft caps, sinks.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from llamacli.ops.base import MakeParam, Op, Recorder, expect
from llamacli.ops.lowering import NO_LIMIT, Lowering, f32, stride
from llamacli.ops.run import Run
from llamacli.ops.store import KeyValues, cache_slot, head_scratch, store
from llamacli.ops.values import Array, Param, Tensor, Value


@attrs.frozen(eq=False)
class Attention(Op):
    """Attention op over the cached tokens of `layer`.

    out = softmax(softcap(scale * q k^T), causal, windowed) v. `sinks`, one number a head, are logits of one more
    position, whose value is zero.
    """

    mixes_tokens = True

    q: Value
    layer: int
    head_dim: int
    scale: float
    softcap: float | None
    sinks: Tensor | None

    def compute(self, run: Run) -> Array:
        """See Op.

        Each query attends to the cells of its sequence up to its own.
        """
        keys, values = run.sequence.read(self.layer, run.start + run.n)
        window = run.states[self.layer].window
        queries, out = run[self.q].reshape(run.n, len(keys), -1, self.head_dim), []
        for i, heads in enumerate(queries):
            end = run.start + i + 1
            seen = slice(max(0, end - window) if window else 0, end)
            # BLAS sums in an order that depends on the layout, which must be the same however the batch was split.
            seen_keys = np.ascontiguousarray(keys[..., seen], np.float64)
            seen_values = np.ascontiguousarray(values[:, seen], np.float64)
            scores = np.matmul(heads, seen_keys) * self.scale
            if self.softcap is not None:
                scores = self.softcap * np.tanh(scores / self.softcap)
            row_max = scores.max(-1, keepdims=True)
            if self.sinks is not None:
                sinks = run[self.sinks].reshape(len(keys), -1, 1)
                row_max = np.maximum(row_max, sinks)
            scores = np.exp(scores - row_max)
            total = scores.sum(-1, keepdims=True)
            if self.sinks is not None:
                total += np.exp(sinks - row_max)
            out.append(np.matmul(scores / total, seen_values).reshape(-1))
        return np.array(out).reshape(run.n, self.out.width)

    def lower(self, to: Lowering) -> None:
        """See Op."""
        from llamacli.kernels.attention import ATTENTION, attention

        q, out, state = f32(self.q), f32(self.out), to.states[self.layer]
        sinks = to.vector(self.sinks) if self.sinks else 0
        n_head = q.width // self.head_dim
        to.step(
            attention,
            ATTENTION,
            [q, cache_slot(self.layer)],
            [out],
            lambda at: {
                "q": at(q), "out": at(out), "stride": stride(at(q)), "group": n_head // state.n_head_kv,
                "n_head_kv": state.n_head_kv, "head_dim": self.head_dim, "layer": self.layer, "sinks": sinks,
                "window": state.window or NO_LIMIT, "scale": self.scale, "softcap": self.softcap or 0.0,
                **head_scratch(to, self.head_dim),
            },
            work_seen=2.0 * q.width,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        """See Op."""
        yield attention(g, x, store(g, x, x, head_dim=16), scale=0.3)
        cached = store(g, x, x, head_dim=16, window=3)
        yield attention(g, x, cached, scale=0.3, softcap=2.0, sinks=param("sinks", x.width // 16))


def attention(
    g: Recorder, q: Value, kv: KeyValues, *, scale: float, softcap: float | None = None, sinks: Param | None = None
) -> Value:
    """Record causal attention with grouped queries (Ainslie et al. 2023).

    Heads of q share the fewer heads of k and v in groups. Several layers may read what one stored. `softcap` bounds the
    scores; `sinks`, (n_head,), join the softmax as the logits of a position without value (Xiao et al. 2023).

    Formula: `out = softmax(softcap(scale * q @ k.T)) @ v` over the cached tokens up to the query's own
    Shapes: q [n, n_head * head_dim], sinks (n_head,); out as q
    Limits: n_head is a multiple of n_head_kv; softcap > 0
    Example: `out = g.attention(q, kv, scale=1 / math.sqrt(config.head_dim))`
    """
    state = kv.state
    fits = q.width % (state.n_head_kv * state.head_dim) == 0
    expect("attention", fits, f"q of width {q.width} and {state.n_head_kv} heads of {state.head_dim}")
    expect("attention", softcap is None or softcap > 0, f"softcap {softcap} and a bound")
    if sinks:
        n_head = q.width // state.head_dim
        expect("attention", sinks.weight.shape == (n_head,), f"{sinks.weight.name} and {n_head} heads")
    weight = sinks.weight if sinks else None
    return g.record(Attention(g.value(q.width), q, kv.layer, state.head_dim, scale, softcap, weight))
