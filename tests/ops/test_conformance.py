"""Kernels of every op against its NumPy reference.

By the examples that the op itself gives.
"""

from collections.abc import Iterator

import attrs
import numpy as np
import pytest

import llamacli_l2
from llamacli.engine.examples import op_classes
from llamacli.ops.add import Add
from llamacli.ops.base import MakeParam, Recorder
from llamacli.ops.lanewise import Lanewise
from llamacli.ops.rope import Rotate
from llamacli.ops.run import Run
from llamacli.ops.scale import Scale
from llamacli.ops.values import Value
from llamacli.testing.conformance import ConformanceError, check_op
from llamacli_l2.l2_norm import L2Norm

WITHOUT = {
    "Lanewise",
    "StateOp",
    "CacheOp",
    "Embed",
    "Store",
    "PreviousHidden",
    "Decoder",
    "Patches",
    "MergeRows",
    "AxisPositions",
    "ClassToken",
    "GridPositions",
    "Received",
    "Sent",
}
"""Base classes, ops that the examples of all others need, and those of inputs that examples do not have."""

OPS = [op for op in op_classes() if op.__module__.startswith("llamacli.ops.") and op.__name__ not in WITHOUT]


@pytest.mark.parametrize("op", [*OPS, L2Norm, llamacli_l2.SlowL2Norm], ids=lambda op: op.__name__)
def test_kernels_agree_with_the_reference(op) -> None:
    check_op(op)


def test_ops_without_examples_are_named() -> None:
    with pytest.raises(ConformanceError, match="Lanewise has no examples"):
        check_op(Lanewise)


@attrs.frozen(eq=False)
class WrongScale(Scale):
    """A reference that differs from the kernel in one number."""

    def compute(self, run: Run) -> np.ndarray:
        out = super().compute(run)
        out[3:, 7] += 1
        return out

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield g.record(cls(g.value(x.width), x, 2.5))


def test_the_first_row_and_column_at_fault_are_named() -> None:
    with pytest.raises(ConformanceError, match=r"WrongScale, example 1: .* in row 3, column 7, expected"):
        check_op(WrongScale)


@attrs.frozen(eq=False)
class Shifted(Lanewise):
    """Formula that is not 0 at 0.

    On a width that is not a multiple of 32.
    """

    verb = "shifted"
    x: Value

    def formula(self, v, x):
        return v.exp(x) + 1.0

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield g.record(cls(g.value(x.width), x))


def test_formulas_leave_the_padding_zero() -> None:
    check_op(Shifted)


@attrs.frozen(eq=False)
class Smeared(Add):
    """Step wider than its value, so that it writes padding."""

    def lower(self, to) -> None:
        from llamacli.ops.lowering import HostRows, f32

        def run(rows: HostRows, at) -> None:
            at(f32(self.out))[rows.first : rows.stop] = at(f32(self.a))[rows.first : rows.stop] * 2 + 1

        to.host_step(run, [f32(self.a)], [f32(self.out)])

    def compute(self, run: Run) -> np.ndarray:
        return run[self.a] * 2 + 1

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield g.record(cls(g.value(x.width), x, x))


def test_kernels_that_write_to_the_padding_are_refused() -> None:
    with pytest.raises(ConformanceError, match=r"Smeared, example 1: .* padding of row 0, column 48"):
        check_op(Smeared)


def test_rope_is_among_the_ops() -> None:
    assert {Add, Rotate, Scale} <= set(OPS)
