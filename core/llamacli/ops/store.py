"""KV cache write: keys and values of a batch."""

from __future__ import annotations

import attrs
import numpy as np

from llamacli.kv.layout import KVSpec
from llamacli.ops.base import Op, Recorder, expect
from llamacli.ops.lowering import Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Value


@attrs.frozen(eq=False)
class KeyValues:
    """Handle of a layer's cached keys and values.

    `store` returns it and `attention` reads it.
    """

    layer: int
    state: KVSpec


@attrs.frozen(eq=False)
class Store(Op):
    """KV cache write op: k and v to the cache of `layer`.

    Without `v`, values are the first `value_dim` numbers of keys. `out` has no numbers and is not read.
    """

    mixes_tokens = True

    k: Value
    v: Value | None
    layer: int
    value_dim: int

    def compute(self, run: Run) -> Array:
        state = run.states[self.layer]
        k, v = (
            run[x or self.k].astype(np.float32).reshape(run.n, state.n_head_kv, -1)  # without v, only k is written
            for x in (self.k, self.v)
        )
        run.sequence.write(self.layer, run.start, k, v)
        return np.empty((run.n, 0))

    def lower(self, to: Lowering) -> None:
        from llamacli.kernels.attention import STORE, store_kv

        k, v, state = f32(self.k), f32(self.v) if self.v else None, to.states[self.layer]
        to.step(
            store_kv, STORE, writes=[cache_slot(self.layer)], k=k, v=v, layer=self.layer, n_head_kv=state.n_head_kv,
            head_dim=state.head_dim, value_dim=state.value_dim, scratch=head_scratch(to, state),
        )  # fmt: skip


def store(
    g: Recorder,
    k: Value,
    v: Value | None,
    *,
    head_dim: int,
    value_dim: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    into: KeyValues | None = None,
) -> KeyValues:
    """Cache keys and values for attention: one layer of the KV cache.

    Keys have `head_dim` numbers a head and values `value_dim`, the same by default. Without `v`, the value of a head
    is the first `value_dim` numbers of its key, and takes no memory: multi-head latent attention (Liu et al. 2024).
    With a `window`, a token attends to itself and the `window` - 1 tokens before it; with a `chunk`, to none before the
    last position that is a multiple of `chunk` (chunked attention). `into` is the handle of an earlier `store`, whose
    cells are written then: those of an encoder's text and of the decoder's tokens can share a layer of the cache.

    Formula: `cache[position] = k, v`
    Shapes: k [n, n_head_kv * head_dim], v [n, n_head_kv * value_dim]; returns the handle that `attention` reads
    Limits: value_dim <= head_dim without v; window > 0; chunk > 0; `into` has the same shape
    Example: `kv = g.store(k, v, head_dim=config.head_dim, window=config.window)`
    """
    expect("store", head_dim > 0 and k.width % head_dim == 0, f"k of width {k.width} and head_dim {head_dim}")
    n_head_kv, width = k.width // head_dim, head_dim if value_dim is None else value_dim
    if v is None:
        expect("store", 0 < width <= head_dim, f"values of {width} numbers and keys of {head_dim}")
    else:
        expect("store", width > 0 and v.width == n_head_kv * width, f"v of width {v.width} and {n_head_kv} x {width}")
    expect("store", window is None or window > 0, f"window {window} and a token that attends to itself")
    expect("store", chunk is None or chunk > 0, f"chunk {chunk} and a token that attends to itself")
    state = KVSpec(n_head_kv, head_dim, window, width, v is None, chunk)
    cached = into or KeyValues(len(g.states), state)
    expect("store", cached.state == state, f"{state} and {cached.state}")
    if into is None:
        g.states.append(state)
    g.record(Store(g.value(0), k, v, cached.layer, width))
    return cached


def cache_slot(layer: int) -> Slot:
    """Slot of a layer's cells.

    With it among the slots of steps, attention waits for the stored keys and values.
    """
    return Slot(layer, "cache", 0)


def head_scratch(to: Lowering, state: KVSpec, *, in_tiles: bool = False) -> Array:
    """Memory that each thread needs for one head, a row a thread."""
    from llamacli.kernels.attention import scratch_bytes

    return to.scratch(scratch_bytes(state.head_dim, state.value_dim, in_tiles=in_tiles))
