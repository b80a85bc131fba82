"""Attention over the KV cache.

Grouped queries, sliding windows and chunks, soft caps, sinks, ALiBi, relative position bias, attention in both
directions, cross attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels.kv_types.types import PAGE
from llamacli.ops.base import LARGEST, SMALLEST, MakeParam, Op, Recorder, expect, expect_number
from llamacli.ops.columns import columns
from llamacli.ops.linear import nearest_bf16
from llamacli.ops.lowering import NO_LIMIT, HostRows, Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.select import Selection, selected_attention
from llamacli.ops.store import KeyValues, cache_slot, head_scratch, store
from llamacli.ops.values import Array, Param, Tensor, Value
from llamacli.util.memory import anonymous


def alibi_slopes(n_head: int, max_bias: float) -> Array:
    """ALiBi slope of each head (Press et al. 2022), [n_head].

    Powers of 2^(-max_bias / n) for the n heads of the largest power of two, then odd powers of its square root.
    """
    n = 1 << (n_head.bit_length() - 1)
    powers = [*range(1, n + 1), *(i + 0.5 for i in range(n_head - n))]
    return np.exp2(-max_bias / n * np.array(powers, np.float64))


Integers = npt.NDArray[np.intp]


def relative_buckets(distances: Integers, n_buckets: int, max_distance: int, *, causal: bool) -> Integers:
    """Bucket of relative positions, key less query (T5, Raffel et al. 2020).

    Half of the buckets are single distances, the others grow with the logarithm up to `max_distance`, from where on
    the last one is for all. Unless `causal`, the second half of them all is for keys behind the query.
    """
    n, away = (n_buckets, np.maximum(-distances, 0)) if causal else (n_buckets // 2, np.abs(distances))
    exact = n // 2
    # llama.cpp takes the logarithm in float32, which decides at the edges of buckets.
    logarithms = np.log((np.maximum(away, exact) / exact).astype(np.float32)) * np.float32(n - exact)
    far = np.floor((exact + logarithms / math.log(max_distance / exact)).astype(np.float32)).astype(np.intp)
    return np.where(away < exact, away, np.minimum(far, n - 1)) + (0 if causal else n * (distances > 0))


@attrs.frozen(eq=False)
class Attention(Op):
    """Attention op over the cached tokens of `layer`.

    out = softmax(softcap(scale * q k^T) - slope * distance + bias, causal, windowed) v. `sinks`, one number a head, are
    logits of one more position, whose value is zero. `alibi` is the largest exponent of the slopes. `bias`, (n_buckets,
    n_head), is looked up by `relative_buckets`. Unless `causal`, a token sees those behind it too, as many as before
    it. With `cross`, it sees the encoder's text; with `spans`, only its bidirectional span.
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
    bias: Tensor | None = None
    max_distance: int = 0
    cross: bool = False
    spans: bool = False

    @property
    def needs_whole_input(self) -> bool:
        return not self.causal or self.spans

    @property
    def uses_distance(self) -> bool:
        return self.alibi is not None or self.bias is not None

    def compute(self, run: Run) -> Array:
        # Each query attends to the cells of its sequence up to its own.
        state, n_past = run.states[self.layer], run.start + run.n
        keys, values = run.sequence.read(self.layer, n_past)
        n_before, n_after = self._reach(state.window)
        queries, out = run[self.q].reshape(run.n, len(keys), -1, self.head_dim) * self.scale, []
        rounded = _nearest_bf16 if run.is_tiled and not state.values_in_keys else np.array
        for i, heads in enumerate(rounded(queries)):
            own = run.start + i
            seen = slice(0, run.span.n_encoded) if self.cross else run.seen(i, n_before, n_after, state.chunk)
            if self.spans:
                seen = slice(int(run.span.firsts[i]), seen.stop)
            # BLAS sums in an order that depends on the layout, which must be the same however the batch was split.
            seen_keys = np.ascontiguousarray(rounded(keys[..., seen]), np.float64)
            seen_values = np.ascontiguousarray(rounded(values[:, seen]), np.float64)
            scores = np.matmul(heads, seen_keys)
            if self.softcap is not None:
                scores = self.softcap * np.tanh(scores / self.softcap)
            if self.alibi is not None:
                slopes = alibi_slopes(self.q.width // self.head_dim, self.alibi).reshape(len(keys), -1, 1)
                scores = scores - slopes * np.abs(np.arange(seen.start, seen.stop) - own)
            if self.bias is not None:
                biases = self._biases(run[self.bias], np.arange(seen.start, seen.stop) - own)
                scores = scores + biases.reshape(len(keys), -1, seen.stop - seen.start)
            row_max = scores.max(-1, keepdims=True)
            if self.sinks is not None:
                sinks = run[self.sinks].reshape(len(keys), -1, 1)
                row_max = np.maximum(row_max, sinks)
            scores = np.exp(scores - row_max)
            total = scores.sum(-1, keepdims=True)
            if self.sinks is not None:
                total += np.exp(sinks - row_max)
            out.append((np.matmul(rounded(scores), seen_values) / total).reshape(-1))
        return np.array(out).reshape(run.n, self.out.width)

    def _biases(self, table: npt.NDArray[Any], distances: Integers) -> npt.NDArray[Any]:
        """Relative position bias, [n_head, len(distances)]."""
        return table[relative_buckets(distances, len(table), self.max_distance, causal=self.causal)].T

    def _reach(self, window: int | None) -> tuple[int, int]:
        """Tokens that a token sees before and behind itself."""
        if self.causal:
            return (window or NO_LIMIT) - 1, 0
        n = NO_LIMIT if window is None else window // 2
        return n, n

    def lower(self, to: Lowering) -> None:
        from llamacli.kernels.attention import ATTENTION, attention, latent_attention, partial_bytes, tiled_attention

        q, out, state = f32(self.q), f32(self.out), to.states[self.layer]
        sinks = to.vector(self.sinks) if self.sinks else None
        n_head = q.width // self.head_dim
        slopes = None if self.alibi is None else to.memory(alibi_slopes(n_head, self.alibi).astype(np.float32))
        n_before, n_after = self._reach(state.window)
        bias, firsts = None, None
        if self.spans:
            firsts = Slot("first cells of spans", "int64", 1)
            if to.maker(firsts) is None:
                to.host_step(functools.partial(_fill_firsts, firsts), [], [firsts])
        if self.bias is not None:
            edge = self.max_distance + PAGE  # a page of distances beyond, of the same bucket
            table = to.vector(self.bias).reshape(self.bias.shape[0], -1)[:, :n_head]
            bias = to.memory(np.ascontiguousarray(self._biases(table, np.arange(-edge, edge)), np.float32))
        in_tiles = to.is_tiled and not state.values_in_keys
        kernel = tiled_attention if in_tiles else latent_attention if state.values_in_keys else attention
        scratch = head_scratch(to, state, in_tiles=in_tiles)
        n_bytes = partial_bytes(state.head_dim if state.values_in_keys else state.value_dim, len(scratch))
        partials = to.shared(("sums of chunks", n_bytes), lambda: anonymous(n_bytes))
        to.step(
            kernel, ATTENTION, reads=[cache_slot(self.layer)],
            q=q, out=out, group=n_head // state.n_head_kv, n_head_kv=state.n_head_kv, head_dim=self.head_dim,
            value_dim=state.value_dim, layer=self.layer, sinks=sinks, slopes=slopes, window=n_before + 1,
            chunk=state.chunk or NO_LIMIT, n_after=n_after, scale=self.scale, softcap=self.softcap, bias=bias,
            max_distance=self.max_distance, cross=self.cross, firsts=firsts, scratch=scratch, partials=partials,
            partial_bytes=n_bytes, work_seen=float(q.width + out.width),
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield attention(g, x, store(g, x, x, head_dim=16), scale=0.3)
        cached = store(g, x, x, head_dim=16, window=3)
        yield attention(g, x, cached, scale=0.3, softcap=2.0, sinks=param("sinks", x.width // 16))
        half = columns(g, x, 0, x.width // 2)
        yield attention(g, x, store(g, half, x, head_dim=8, value_dim=16, chunk=7), scale=0.3, alibi=4.0)
        yield attention(g, x, store(g, half, None, head_dim=x.width // 2, value_dim=20), scale=0.3)
        yield attention(g, x, store(g, x, x, head_dim=16, window=6), scale=0.3, causal=False)
        for causal in (True, False):
            bias = param(f"bias_{causal}", 8, x.width // 16)
            yield attention(g, x, store(g, x, x, head_dim=16), scale=0.3, bias=bias, max_distance=12, causal=causal)
        yield attention(g, x, store(g, x, x, head_dim=16), scale=0.3, spans=True)


def _nearest_bf16(x: npt.NDArray[Any]) -> Array:
    return nearest_bf16(x).astype(np.float64)


def _fill_firsts(slot: Slot, rows: HostRows, at: Callable[[Slot], npt.NDArray[Any]]) -> None:
    for first, span in rows.parts():
        at(slot)[first : first + span.n, 0] = span.firsts


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
    bias: Param | None = None,
    max_distance: int = 128,
    cross: bool = False,
    spans: bool = False,
    cells: Selection | None = None,
) -> Value:
    """Record attention with grouped queries (Ainslie et al. 2023).

    Heads of q share the fewer heads of k and v in groups. Several layers may read what one stored. `softcap` bounds the
    scores; `sinks`, (n_head,), join the softmax as the logits of a position without value (Xiao et al. 2023). `alibi`
    subtracts each head's slope times the distance of the positions from the scores (ALiBi, `max_alibi_bias`). With
    `causal=False` a token sees all tokens of its input, or with a window of w those at most w // 2 away: for embedding
    models, which evaluate a text at once. `bias` adds a number to scores by head and bucket of distance (relative
    position bias of T5, Raffel et al. 2020; `relative_attention_max_distance`). With `cross`, tokens of the decoder see
    the encoder's text, whose keys and values a `store` before `decoder` has cached. With `spans`, a token sees only the
    bidirectional span of the inputs that it is in, such as the window of a patch in a media encoder, or itself. With
    `cells`, a token sees the cells alone that `select` has chosen: for all heads, or for each head of keys.

    Formula: `out = softmax(softcap(scale * q @ k.T) - slope * |i - j| + bias[bucket(j - i)]) @ v` over what is seen
    Shapes: q [n, n_head * head_dim], sinks (n_head,), bias (n_buckets, n_head); out [n, n_head * value_dim]
    Limits: n_head is a multiple of n_head_kv; softcap > 0; alibi > 0; causal where keys have a chunk; 4 <= n_buckets;
        `cells` goes with `scale` and `sinks` alone
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
    if bias:
        name, shape = bias.weight.name, bias.weight.shape
        fits = len(shape) == 2 and shape[1] == n_head and shape[0] >= 4
        expect("attention", fits, f"{name} {shape} and {n_head} heads")
        expect("attention", max_distance > shape[0] // 2, f"{name} {shape} and distances up to {max_distance}")
    if cells:
        others = (softcap, alibi, bias, cross or None, spans or None)
        plain = causal and all(option is None for option in others)
        expect("attention", plain, "chosen cells and an option other than scale and sinks")
        return selected_attention(g, q, kv, scale, cells, sinks)
    bounds = f"window {state.window}, chunk {state.chunk}"
    expect("attention", not cross or state.window is state.chunk is None, f"{bounds} and cross attention")
    weight, table = (param.weight if param else None for param in (sinks, bias))
    out = g.value(n_head * state.value_dim)
    return g.record(
        Attention(
            out, q, kv.layer, state.head_dim, scale, softcap, weight, alibi, causal, table, max_distance, cross, spans
        )
    )
