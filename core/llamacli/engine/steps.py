"""The steps of a program as data: what each reads and writes, and where that lies.

A step names slots, not memory. Buffers are given to the names once all steps are known, each for as long as it is
needed; barriers are put where a step needs what another thread wrote, or overwrites what another may still read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli import graph as g
from llamacli.kernels.jit import Kernel
from llamacli.kernels.packing_formats import ACTIVATION, ACTIVATION_BLOCK, FLOAT_FORMS, INTEGER_FORMS
from llamacli.kv import N_BATCH, KVType

Array = npt.NDArray[Any]


@attrs.frozen
class Slot:
    """A name for a buffer: a value in one form of activations, or a kernel's own scratch of a NumPy type.

    With `slots`, each row of the batch has that many, and all of them lie together from the buffer's start.
    """

    owner: object
    form: str
    width: int
    slots: int = 0

    @property
    def kind(self) -> tuple[str, int, int]:
        """Buffers of the same kind can stand in for one another."""
        return self.form, self.width, self.slots

    def allocate(self) -> Array:
        """A buffer; the padding of float rows is zero and stays so, for no kernel writes anything else there."""
        n_rows, n_blocks = N_BATCH * max(1, self.slots), -(-self.width // ACTIVATION_BLOCK)
        # Rows lie a little further apart than they need to: at distances of 4096 bytes they would fight for the same
        # lines of the first-level cache.
        if self.form in FLOAT_FORMS:
            width = n_blocks * ACTIVATION_BLOCK
            return np.zeros((n_rows, width + 16), np.float32)[:, :width]
        if self.form in INTEGER_FORMS:
            return np.zeros((n_rows, n_blocks + 1), ACTIVATION)[:, :n_blocks]
        return np.zeros((n_rows, self.width), self.form)


Bind = Callable[[Callable[[Slot], Array]], dict[str, Any]]


@attrs.define(eq=False)
class Step:
    """One entry of the table. `bind` gives its parameters once buffers are known; `kernel` may depend on the cache.

    `follows` is the step before it whose work is divided in the same way: what that one wrote, the same thread reads.
    `work` is multiplications a row, `work_seen` those for each token that the row sees; `work_unit` is how many
    elements of a row threads are given at a time.
    """

    kernel: Kernel | Callable[[KVType], Kernel]
    record: np.dtype[np.void]
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    bind: Bind
    follows: Step | None = None
    work: float = 0.0
    work_seen: float = 0.0
    work_unit: int = 0
    barrier: bool = False
    params: Array = attrs.field(init=False)


def f32(value: g.Value) -> Slot:
    """The slot of a value's own numbers."""
    return Slot(value, "f32", value.width)


def stride(buffer: Array) -> int:
    """Bytes from one row to the next."""
    return int(buffer.strides[0])


def assign_buffers(steps: list[Step], given: list[Slot], keep: Slot) -> dict[Slot, Array]:
    """A buffer for every slot, shared by slots that are never alive at once. `given` are alive from the start.

    `keep` is bound anew for each run: its buffer only says how its rows are laid out.
    """
    last_use = {slot: i for i, step in enumerate(steps) for slot in (*step.reads, *step.writes)}
    free: dict[tuple[str, int, int], list[Array]] = defaultdict(list)
    buffers = {slot: slot.allocate() for slot in given}
    for i, step in enumerate(steps):
        for slot in step.writes:
            if slot not in buffers and slot.form != "cache":
                buffers[slot] = free[slot.kind].pop() if free[slot.kind] and slot != keep else slot.allocate()
        for slot in {*step.reads, *step.writes}:
            if last_use[slot] == i and slot in buffers and slot != keep:
                free[slot.kind].append(buffers[slot])
    return buffers


def bind(step: Step, buffers: dict[Slot, Array]) -> list[Array]:
    """Fill the step's record; returns the arrays whose addresses it holds, which must live as long as it."""
    step.params = np.zeros(1, step.record)
    values = step.bind(lambda slot: buffers[slot])
    for name, value in values.items():
        step.params[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    return [value for value in values.values() if isinstance(value, np.ndarray)]


def place_barriers(steps: list[Step], buffers: dict[Slot, Array]) -> None:
    """Mark the steps behind which all threads must meet before the next one begins."""

    def identity(slot: Slot) -> object:
        return id(buffers[slot]) if slot in buffers else slot

    written: dict[object, Step] = {}
    read: set[object] = set()
    for before, step in zip([None, *steps], steps, strict=False):
        needs = {identity(slot) for slot in step.reads}
        makes = {identity(slot) for slot in step.writes}
        waits = any(written[buffer] is not step.follows for buffer in needs & written.keys())
        if before is not None and (waits or makes & (read | written.keys())):
            before.barrier = True
            written, read = {}, set()
        read |= needs
        written |= dict.fromkeys(makes, step)
