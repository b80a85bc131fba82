"""Lowering: steps of a program, and the interface to append them.

A step names slots, not memory: an engine gives buffers to the slots once all steps are known, and puts a barrier where
a step reads what another thread wrote, or overwrites what another may still read.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels.kv_types.types import KVType
from llamacli.kv.layout import KVSpec, RecurrentSpec
from llamacli.ops.run import Run, Span
from llamacli.ops.values import Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel
    from llamacli.kernels.matrix import Matrix

Array = npt.NDArray[Any]
Resource = TypeVar("Resource")

NO_LIMIT = 1 << 40
"""More tokens than a context can have, where a kernel expects a number of them."""


@attrs.frozen
class Slot:
    """Name of a buffer: its owner, form and width.

    It holds a value in one form of activations, or a kernel's own scratch of a NumPy type. With `slots`, each row of
    the batch has that many, and all of them lie together from the buffer's start.
    """

    owner: object
    form: str
    width: int
    slots: int = 0

    @property
    def kind(self) -> tuple[str, int, int]:
        """Key of interchangeable buffers."""
        return self.form, self.width, self.slots

    def columns(self, first: int) -> SlotColumns:
        """Its columns from `first` on, as the field of a step."""
        return SlotColumns(self, first)


@attrs.frozen
class SlotColumns:
    """Columns of a slot from `first` on.

    Their rows are as far apart as the slot's.
    """

    slot: Slot
    first: int


Field = Slot | SlotColumns | Sequence[Slot] | Array | float | None
"""Value of a field of a step's record: a number; None, which is 0; or what the field is the address of: an array, the
buffer of a slot, columns of one, or an int64 array of the addresses of several slots."""


def slots_of(value: Field) -> list[Slot]:
    """Slots that the value of a field names."""
    if isinstance(value, SlotColumns):
        return [value.slot]
    return [value] if isinstance(value, Slot) else list(value) if isinstance(value, list | tuple) else []


@attrs.frozen(eq=False)
class HostRows:
    """Rows of a batch that a host step computes.

    They are `first` to `stop` - 1. `tokens`, int32 [stop - first], are theirs; `spans` share out all rows of the batch
    in order.
    """

    tokens: npt.NDArray[np.int32]
    first: int
    stop: int
    spans: Sequence[Span]

    def parts(self) -> Iterator[tuple[int, Span]]:
        """First row and part of the span of each sequence."""
        row = 0
        for span in self.spans:
            first, stop = max(row, self.first), min(row + span.n, self.stop)
            if first < stop:
                yield first, span if stop - first == span.n else span.part(first - row, stop - row)
            row += span.n


@attrs.define(eq=False)
class Step:
    """Step of a program: a kernel or a Python function.

    The function `host` runs between kernels.

    - `kernel` may depend on the types of the cache; `fields` are those of its `record`, see `Lowering.step`.
    - `follows`: an earlier step whose work is divided in the same way, so that each thread reads only what it wrote
      itself, and no barrier is needed between the two.
    - `work`: multiplications a row; `work_seen`: those for each token that the row attends to. They bound how long a
      run lasts before it returns to Python.
    - `work_unit`: elements of a row that threads are given at a time; steps with the same one can follow one another.
    """

    kernel: Kernel | Callable[[KVType], Kernel] | None
    record: np.dtype[np.void]
    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    fields: Mapping[str, Field] = attrs.field(factory=dict)
    follows: Step | None = None
    work: float = 0.0
    work_seen: float = 0.0
    work_unit: int = 0
    host: Callable[[HostRows, Callable[[Slot], Array]], None] | None = None
    barrier: bool = False
    params: Array = attrs.field(init=False)


def f32(value: Value) -> Slot:
    """Slot of a value in float32."""
    return Slot(value, "f32", value.width)


class Lowering(abc.ABC):
    """Services of an engine to the ops that it compiles.

    Weights as kernels read them, and the table of steps.
    """

    states: Sequence[KVSpec]
    """Shapes of the cached keys and values, by layer."""

    recurrent: Sequence[RecurrentSpec]
    """Shapes of the recurrent states."""

    zeros: Array
    """float32 zeros, at least as many as any row or bias has numbers."""

    is_tiled = False
    """True if products of prompts are those of tiles of AMX."""

    watches_products = False
    """True if the inputs of matrix products are watched, as importance matrices need it."""

    @abc.abstractmethod
    def watch_product(self, x: Slot, tensor: Tensor, starts: Slot | None) -> None:
        """Append a step that shows the input of a matrix product.

        Called where `watches_products` is true. `x` is in float32. With `starts`, its rows are sorted by group, see
        `llamacli.ops.linear.lower_linear`.
        """

    @abc.abstractmethod
    def matrix(self, tensor: Tensor) -> Matrix:
        """Tensor of `Op.matrices()` packed for matrix kernels; each is loaded once."""

    @abc.abstractmethod
    def vector(self, tensor: Tensor) -> Array:
        """Any other tensor in float32; each is loaded once.

        The last axis is padded with zeros to a multiple of 32.
        """

    @abc.abstractmethod
    def step(
        self,
        kernel: Kernel | Callable[[KVType], Kernel],
        record: np.dtype[np.void],
        *outdated: object,
        reads: Sequence[Slot] = (),
        writes: Sequence[str | Slot] = ("out",),
        follows: Step | None = None,
        work: float = 0.0,
        work_seen: float = 0.0,
        work_unit: int = 0,
        **fields: Field,
    ) -> Step:
        """Append a step that runs a kernel: `to.step(kernel, RECORD, x=x, out=out, width=x.width)`.

        Each field of `record` is given by its name, see `Field`, but for strides: `x_stride` is the number of bytes
        from one row to the next of what `x` is, 0 if that is no slot and no matrix; `stride` is that of the first field
        of the record that is a slot. The step writes the slots of the fields named in `writes` and reads those of all
        others. Slots that no field names are listed in `reads`, and in `writes` beside names. A step may write only
        these slots. See `Step` for the other arguments.
        """

    @abc.abstractmethod
    def host_step(
        self,
        function: Callable[[HostRows, Callable[[Slot], Array]], None],
        reads: Sequence[Slot],
        writes: Sequence[Slot],
    ) -> Step:
        """Append a step that runs a Python function: `function(rows, at)`.

        `at(slot)` is the buffer of a slot.
        """

    @abc.abstractmethod
    def host_op(self, compute: Callable[[Run], Array], inputs: Sequence[Value], out: Value) -> None:
        """Append a step that runs an op's `compute` in NumPy.

        Kernels stop meanwhile, which costs time.
        """

    @abc.abstractmethod
    def maker(self, slot: Slot) -> Step | None:
        """Last step so far that writes a slot."""

    @abc.abstractmethod
    def rounded(self, slot: Slot, form: str) -> Slot:
        """Slot of the same value rounded to another form.

        Rounded once for all steps that read it.
        """

    @abc.abstractmethod
    def scratch(self, n_bytes: int) -> Array:
        """Scratch memory of each thread, float32 [n_threads, n_bytes / 4].

        Steps that ask for the same size share it.
        """

    @abc.abstractmethod
    def memory(self, array: Array) -> Array:
        """Place an array in memory of the engine's.

        Tests surround it with forbidden pages.
        """

    @abc.abstractmethod
    def shared(self, key: object, make: Callable[[], Resource]) -> Resource:
        """Resource of a key, made when it is first needed.

        Such as a table that several steps read.
        """

    @abc.abstractmethod
    def before_run(self, prepare: Callable[[int], int]) -> None:
        """Call `prepare(n)` before a run that needs it.

        n is one more than the largest position in the run, but for positions that `before_jump` gives. The result, at
        least n, is the positions up to which no further call is needed.
        """

    @abc.abstractmethod
    def before_jump(self, prepare: Callable[[npt.NDArray[np.int32]], None]) -> None:
        """Call `prepare(positions)` before a run with unusual positions.

        They are int32 [m, 1 or 4]: several components that differ, or numbers beyond the context. The field `jump` of a
        row is its number among them plus 1, or 0.
        """
