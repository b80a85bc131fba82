"""Constants of LLVM IR, each made once."""

import math

import pytest
from llvmlite import ir as llvm

from llamacli.kernels import ir

HALVES, BFLOATS, SHORTS = (llvm.VectorType(kind, 2) for kind in (ir.HALF, ir.BFLOAT, ir.I16))


@pytest.mark.parametrize(("kind", "value"), [(ir.I32X16, 3), (ir.F32X16, 0.0), (ir.F32X16, math.inf), (HALVES, 1.5)])
def test_constant_has_one_value_in_all_lanes(kind, value) -> None:
    made = ir.constant(kind, value)
    assert [lane.constant for lane in made.constant] == [value] * kind.count
    assert ir.constant(kind, value) is made


def test_constants_of_other_values_and_types_are_others() -> None:
    signs = [math.copysign(1, ir.constant(ir.F32X16, zero).constant[0].constant) for zero in (0.0, -0.0)]
    assert signs == [1, -1]
    texts = [str(ir.constant(kind, 1)) for kind in (HALVES, BFLOATS, SHORTS)]
    assert [text.split(" ")[2] for text in texts] == ["half>", "bfloat>", "i16>"]


def test_lane_numbers_are_kept_by_order() -> None:
    texts = [str(ir.lane_numbers(*lanes)) for lanes in ((1, 0), (0, 1))]
    assert texts == ["<2 x i32> <i32 1, i32 0>", "<2 x i32> <i32 0, i32 1>"]
    assert ir.lane_numbers(0, 1) is ir.lane_numbers(0, 1)
