"""KV cache write: keys and values of a batch."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from llamacli.kv.layout import KVSpec
from llamacli.ops.base import Op, Recorder, expect
from llamacli.ops.lowering import Lowering, Slot, f32, stride
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

    `out` has no numbers and is not read.
    """

    mixes_tokens = True

    k: Value
    v: Value
    layer: int

    def compute(self, run: Run) -> Array:
        """See Op."""
        state = run.states[self.layer]
        k, v = (run[x].astype(np.float32).reshape(-1, state.n_head_kv, state.head_dim) for x in (self.k, self.v))
        run.sequence.write(self.layer, run.start, k, v)
        return np.empty((run.n, 0))

    def lower(self, to: Lowering) -> None:
        """See Op."""
        from llamacli.kernels.attention import STORE, store_kv

        k, v, state = f32(self.k), f32(self.v), to.states[self.layer]
        to.step(
            store_kv,
            STORE,
            [k, v],
            [cache_slot(self.layer)],
            lambda at: {
                "k": at(k), "v": at(v), "stride": stride(at(k)), "layer": self.layer, "n_head_kv": state.n_head_kv,
                "head_dim": state.head_dim, **head_scratch(to, state.head_dim),
            },
        )  # fmt: skip


def store(g: Recorder, k: Value, v: Value, *, head_dim: int, window: int | None = None) -> KeyValues:
    """Cache keys and values for attention: one layer of the KV cache.

    With a `window`, a token attends to itself and the `window` - 1 tokens before it.

    Formula: `cache[position] = k, v`
    Shapes: k and v [n, n_head_kv * head_dim]; returns the handle that `attention` reads
    Limits: k and v are equally wide; window > 0
    Example: `kv = g.store(k, v, head_dim=config.head_dim, window=config.window)`
    """
    fits = k.width == v.width and head_dim > 0 and k.width % head_dim == 0
    expect("store", fits, f"k and v of widths {k.width} and {v.width} and head_dim {head_dim}")
    expect("store", window is None or window > 0, f"window {window} and a token that attends to itself")
    g.states.append(KVSpec(k.width // head_dim, head_dim, window))
    cached = KeyValues(len(g.states) - 1, g.states[-1])
    g.record(Store(g.value(0), k, v, cached.layer))
    return cached


def cache_slot(layer: int) -> Slot:
    """Slot of a layer's cells.

    With it among the slots of steps, attention waits for the stored keys and values.
    """
    return Slot(layer, "cache", 0)


def head_scratch(to: Lowering, head_dim: int) -> dict[str, Any]:
    """Parameters of the memory that each thread needs for one head."""
    from llamacli.kernels.attention import scratch_bytes

    size = scratch_bytes(head_dim)
    return {"scratch": to.scratch(size), "scratch_stride": size}
