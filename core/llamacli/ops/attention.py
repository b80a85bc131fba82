"""Attention over the KV cache.

Grouped queries, sliding windows and chunks, soft caps, sinks, ALiBi, attention in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from llamacli.ops.base import LARGEST, SMALLEST, MakeParam, Op, Recorder, expect, expect_number
from llamacli.ops.columns import columns
from llamacli.ops.lowering import NO_LIMIT, Lowering, f32, stride
from llamacli.ops.run import Run
from llamacli.ops.store import KeyValues, cache_slot, head_scratch, store
from llamacli.ops.values import Array, Param, Tensor, Value


def alibi_slopes(n_head: int, max_bias: float) -> Array:
    """ALiBi slope of each head (Press et al. 2022), [n_head].

    Powers of 2^(-max_bias / n) for the n heads of the largest power of two, then odd powers of its square root.
    """
    n = 1 << (n_head.bit_length() - 1)
    powers = [*range(1, n + 1), *(i + 0.5 for i in range(n_head - n))]
    return np.exp2(-max_bias / n * np.array(powers, np.float64))


@attrs.frozen(eq=False)
class Attention(Op):
    """Attention op over the cached tokens of `layer`.

    out = softmax(softcap(scale * q k^T) - slope * distance, causal, windowed) v. `sinks`, one number a head, are logits
    of one more position, whose value is zero. `alibi` is the largest exponent of the slopes. Unless `causal`, a token
    sees those behind it too, as many as before it.
    """

    mixes_tokens = True

    q: Value
    layer: int
    head_dim: int
    scale: float
    softcap: float | None
    sinks: Tensor | None
    alibi: float | None
    causal: bool

    @property
    def needs_whole_input(self) -> bool:
        """See Op."""
        return not self.causal

    @property
    def uses_distance(self) -> bool:
        """See Op."""
        return self.alibi is not None

    def compute(self, run: Run) -> Array:
        """See Op.

        Each query attends to the cells of its sequence up to its own.
        """
        state, n_past = run.states[self.layer], run.start + run.n
        keys, values = run.sequence.read(self.layer, n_past)
        n_before, n_after = self._reach(state.window)
        n_ahead = np.maximum(run.n_ahead, n_after).tolist()
        queries, out = run[self.q].reshape(run.n, len(keys), -1, self.head_dim), []
        for i, heads in enumerate(queries):
            own = run.start + i
            first = max(0, own - n_before, own // state.chunk * state.chunk if state.chunk else 0)
            seen = slice(first, min(n_past, own + 1 + n_ahead[i]))
            # BLAS sums in an order that depends on the layout, which must be the same however the batch was split.
            seen_keys = np.ascontiguousarray(keys[..., seen], np.float64)
            seen_values = np.ascontiguousarray(values[:, seen], np.float64)
            scores = np.matmul(heads, seen_keys) * self.scale
            if self.softcap is not None:
                scores = self.softcap * np.tanh(scores / self.softcap)
            if self.alibi is not None:
                slopes = alibi_slopes(self.q.width // self.head_dim, self.alibi).reshape(len(keys), -1, 1)
                scores = scores - slopes * np.abs(np.arange(seen.start, seen.stop) - own)
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

    def _reach(self, window: int | None) -> tuple[int, int]:
        """Tokens that a token sees before and behind itself."""
        if self.causal:
            return (window or NO_LIMIT) - 1, 0
        n = NO_LIMIT if window is None else window // 2
        return n, n

    def lower(self, to: Lowering) -> None:
        """See Op."""
        from llamacli.kernels.attention import ATTENTION, attention, latent_attention

        q, out, state = f32(self.q), f32(self.out), to.states[self.layer]
        sinks = to.vector(self.sinks) if self.sinks else 0
        n_head = q.width // self.head_dim
        slopes = 0 if self.alibi is None else to.memory(alibi_slopes(n_head, self.alibi).astype(np.float32))
        n_before, n_after = self._reach(state.window)
        to.step(
            latent_attention if state.values_in_keys else attention,
            ATTENTION,
            [q, cache_slot(self.layer)],
            [out],
            lambda at: {
                "q": at(q), "q_stride": stride(at(q)), "out": at(out), "out_stride": stride(at(out)),
                "group": n_head // state.n_head_kv, "n_head_kv": state.n_head_kv, "head_dim": self.head_dim,
                "value_dim": state.value_dim, "layer": self.layer, "sinks": sinks, "slopes": slopes,
                "window": n_before + 1, "chunk": state.chunk or NO_LIMIT, "n_after": n_after, "scale": self.scale,
                "softcap": self.softcap or 0.0, **head_scratch(to, state),
            },
            work_seen=float(q.width + out.width),
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        """See Op."""
        yield attention(g, x, store(g, x, x, head_dim=16), scale=0.3)
        cached = store(g, x, x, head_dim=16, window=3)
        yield attention(g, x, cached, scale=0.3, softcap=2.0, sinks=param("sinks", x.width // 16))
        half = columns(g, x, 0, x.width // 2)
        yield attention(g, x, store(g, half, x, head_dim=8, value_dim=16, chunk=7), scale=0.3, alibi=4.0)
        yield attention(g, x, store(g, half, None, head_dim=x.width // 2, value_dim=20), scale=0.3)
        yield attention(g, x, store(g, x, x, head_dim=16, window=6), scale=0.3, causal=False)


def attention(
    g: Recorder,
    q: Value,
    kv: KeyValues,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Param | None = None,
    alibi: float | None = None,
    causal: bool = True,
) -> Value:
    """Record attention with grouped queries (Ainslie et al. 2023).

    Heads of q share the fewer heads of k and v in groups. Several layers may read what one stored. `softcap` bounds the
    scores; `sinks`, (n_head,), join the softmax as the logits of a position without value (Xiao et al. 2023). `alibi`
    subtracts each head's slope times the distance of the positions from the scores (ALiBi, `max_alibi_bias`). With
    `causal=False` a token sees all tokens of its input, or with a window of w those at most w // 2 away: for embedding
    models, which evaluate a text at once.

    Formula: `out = softmax(softcap(scale * q @ k.T) - slope * |i - j|) @ v` over the tokens that are seen
    Shapes: q [n, n_head * head_dim], sinks (n_head,); out [n, n_head * value_dim]
    Limits: n_head is a multiple of n_head_kv; softcap > 0; alibi > 0; causal where keys have a chunk
    Example: `out = g.attention(q, kv, scale=1 / math.sqrt(config.head_dim))`
    """
    state = kv.state
    fits = q.width % (state.n_head_kv * state.head_dim) == 0
    expect("attention", fits, f"q of width {q.width} and {state.n_head_kv} heads of {state.head_dim}")
    expect_number("attention", "scale", scale, -LARGEST, LARGEST)
    if softcap is not None:
        expect_number("attention", "softcap", softcap, SMALLEST, LARGEST)
    if alibi is not None:
        expect_number("attention", "alibi", alibi, SMALLEST, LARGEST)
    expect("attention", causal or state.chunk is None, f"chunk {state.chunk} and attention in both directions")
    n_head = q.width // state.head_dim
    if sinks:
        expect("attention", sinks.weight.shape == (n_head,), f"{sinks.weight.name} and {n_head} heads")
    weight = sinks.weight if sinks else None
    out = g.value(n_head * state.value_dim)
    return g.record(Attention(out, q, kv.layer, state.head_dim, scale, softcap, weight, alibi, causal))
