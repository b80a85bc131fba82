"""Buffers and barriers of a program's steps."""

from __future__ import annotations

import numbers
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np

from llamacli.errors import PluginError
from llamacli.kernels.layout import ACTIVATION, ACTIVATION_BLOCK, BLOCK_BYTES, FLOAT_FORMS, INTEGER_FORMS, PAIR_FORMS
from llamacli.ops.lowering import Array, Field, Slot, SlotColumns, Step, slots_of

_LINE = 64
"""Bytes of a cache line."""


def allocate(slot: Slot, n_batch: int) -> Array:
    """Allocate the buffer of a slot, for batches of `n_batch` rows.

    The padding of float rows is zero and stays so, since kernels write only zeros there.
    """
    n_rows, n_blocks = n_batch * max(1, slot.slots), -(-slot.width // ACTIVATION_BLOCK)
    # Padding of one vector a row against cache-set conflicts: rows 4096 bytes apart would share first-level sets.
    if slot.form in FLOAT_FORMS:
        width = n_blocks * ACTIVATION_BLOCK
        return np.zeros((n_rows, width + 16), np.float32)[:, :width]
    if slot.form in INTEGER_FORMS:
        return np.zeros((n_rows, n_blocks + 1), ACTIVATION)[:, :n_blocks]
    if slot.form in PAIR_FORMS:  # rows begin with a cache line, as tiles of AMX are loaded by lines
        row_bytes = n_blocks * BLOCK_BYTES[slot.form] + _LINE
        memory = np.zeros(n_rows * row_bytes + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        return memory[start : start + n_rows * row_bytes].reshape(n_rows, row_bytes)[:, :-_LINE]
    return np.zeros((n_rows, slot.width), slot.form)


def assign_buffers(steps: list[Step], n_batch: int, keep: Collection[Slot]) -> dict[Slot, Array]:
    """Assign a buffer to every slot, reusing free ones.

    Slots that are never alive at once share a buffer, but for slots to `keep`: values that a graph passes, and logits,
    which are bound to other memory in each run.
    """
    last_use = {slot: i for i, step in enumerate(steps) for slot in (*step.reads, *step.writes)}
    free: dict[tuple[str, int, int], list[Array]] = defaultdict(list)
    buffers: dict[Slot, Array] = {}
    for i, step in enumerate(steps):
        for slot in step.writes:
            if slot not in buffers and slot.form != "cache":
                buffers[slot] = (
                    free[slot.kind].pop() if free[slot.kind] and slot not in keep else allocate(slot, n_batch)
                )
        for slot in {*step.reads, *step.writes}:
            if last_use[slot] == i and slot in buffers and slot not in keep:
                free[slot.kind].append(buffers[slot])
    return buffers


def bind(step: Step, buffers: dict[Slot, Array]) -> list[Array]:
    """Fill the parameter record of a step.

    Returns the arrays whose addresses it holds, which must live as long as it. Raises PluginError for fields that are
    missing, unknown or of a wrong type, and for slots that no step writes.
    """
    step.params, names = np.zeros(1, step.record), step.record.names or ()
    if unknown := [name for name in step.fields if name not in names]:
        raise PluginError(f"a step's record has no field {', '.join(unknown)}; it has {', '.join(names)}")
    values = {name: _resolved(step.fields[name], buffers) for name in names if name in step.fields}
    first = next((name for name in values if slots_of(step.fields[name])), None)
    strides = {f"{name}_stride": name for name in values} | ({"stride": first} if first else {})
    derived = [name for name in names if name not in values and name in strides]
    values |= {name: _row_bytes(step.fields[strides[name]], buffers) for name in derived}
    if missing := [name for name in names if name not in values]:
        raise PluginError(f"parameters of a step are missing: {', '.join(missing)}")
    for name, value in values.items():
        is_integer_field = step.record[name].kind == "i"
        number = numbers.Integral if is_integer_field else numbers.Real
        if not isinstance(value, np.ndarray | number | np.bool_):
            kind = "an array, an integer" if is_integer_field else "a number"
            raise PluginError(f"parameter {name} of a step is {value!r}, expected {kind}")
        step.params[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    return [value for value in values.values() if isinstance(value, np.ndarray)]


def _resolved(value: Field, buffers: dict[Slot, Array]) -> Any:
    for slot in slots_of(value):
        if slot not in buffers:
            raise PluginError(f"a step uses a slot of form {slot.form!r} that neither it nor an earlier one writes")
    if isinstance(value, SlotColumns):
        return buffers[value.slot][:, value.first :]
    if isinstance(value, Slot):
        return buffers[value]
    if isinstance(value, list | tuple):
        return np.array([buffers[slot].ctypes.data for slot in value], np.int64)
    return 0 if value is None else value


def _row_bytes(value: Field, buffers: dict[Slot, Array]) -> int:
    """Bytes from one row to the next, 0 without rows."""
    slots = slots_of(value)
    array = buffers[slots[0]] if slots else value
    return array.strides[0] if isinstance(array, np.ndarray) and array.ndim > 1 else 0


def place_barriers(steps: list[Step], buffers: dict[Slot, Array]) -> None:
    """Mark the steps that need a barrier after them.

    There all threads must meet before the next step begins.
    """

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
