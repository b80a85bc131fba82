"""Errors in the steps of plugins' ops, named at load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from llamacli import ArrayFile, Graph, PluginError, QuantMode, Value
from llamacli.engine.native import NativeEngine
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.ops.base import Op
from llamacli.ops.columns import COLUMNS, columns_kernel
from llamacli.ops.lanewise import Lanewise
from llamacli.ops.lowering import Lowering, Slot, f32
from llamacli.ops.run import Run
from verbs import N_VOCAB, WIDTH, Params
from verbs import Run as Graphed


@attrs.frozen(eq=False)
class Copy(Op):
    """A copy, by whatever steps a test gives."""

    x: Value
    lowers: Callable[[Any, Lowering], None]

    def compute(self, run: Run) -> np.ndarray:
        return run[self.x]

    def lower(self, to: Lowering) -> None:
        self.lowers(self, to)


def copying(**changes: object) -> Callable[[Copy, Lowering], None]:
    """Lower to a copy of columns with other fields."""

    def lower(op: Copy, to: Lowering) -> None:
        to.step(columns_kernel(), COLUMNS, **({"x": f32(op.x), "out": f32(op.out), "width": WIDTH} | changes))

    return lower


def compile_copy(lowers: Callable[[Copy, Lowering], None]) -> None:
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (N_VOCAB, WIDTH))))
    graph.scale(graph.record(Copy(graph.value(WIDTH), x, lowers)), 1.0)
    arrays = {"token_embd.weight": np.ones((N_VOCAB, WIDTH), np.float32)}
    NativeEngine(1).compile(graph, ArrayFile(Path("m"), Metadata({}), arrays), QuantMode.FP32)


def unlisted(op: Copy, to: Lowering) -> None:
    to.step(columns_kernel(), COLUMNS, x=Slot(op, "f32", WIDTH), out=f32(op.out), width=1)


def without_width(op: Copy, to: Lowering) -> None:
    to.step(columns_kernel(), COLUMNS, x=f32(op.x), out=f32(op.out))


def positional(op: Copy, to: Lowering) -> None:
    to.step(columns_kernel(), COLUMNS, [f32(op.x)], [f32(op.out)], lambda at: {})


def raising(op: Copy, to: Lowering) -> None:
    raise KeyError("boo")


def no_kernel(op: Copy, to: Lowering) -> None:
    to.step(lambda kv_type: None, COLUMNS, x=f32(op.x), out=f32(op.out), width=WIDTH)


def test_a_right_step_compiles() -> None:
    compile_copy(copying())


@pytest.mark.parametrize(
    ("lowers", "message"),
    [
        (without_width, "parameters of a step are missing: width"),
        (copying(writes=["y"]), "a step writes y, of which it is given no field"),
        (positional, "since 2, `to.step(kernel, RECORD, x=x, out=out, width=...)` takes the fields of the record"),
        (copying(zzz=1), "a step's record has no field zzz; it has x, x_stride, out, out_stride, width"),
        (copying(width=2.5), "parameter width of a step is 2.5, expected an array, an integer"),
        (copying(width="wide"), "parameter width of a step is 'wide', expected an array, an integer"),
        (unlisted, "a step uses a slot of form 'f32' that neither it nor an earlier one writes"),
        (raising, "verb Copy of tests, before the first layer failed: KeyError: 'boo'"),
        (no_kernel, "verb Copy of tests, before the first layer failed: "),
    ],
)
def test_wrong_steps_are_named(lowers: Callable[[Copy, Lowering], None], message: str) -> None:
    with pytest.raises(PluginError) as raised:
        compile_copy(lowers)
    assert message in str(raised.value)


def test_a_lowering_may_compute_part_of_an_op_in_numpy() -> None:
    @attrs.frozen(eq=False)
    class Parted(Op):
        """2 x + 1: twice x in NumPy, then a kernel."""

        x: Value

        def compute(self, run: Run) -> np.ndarray:
            return 2 * run[self.x] + 1

        def lower(self, to: Lowering) -> None:
            from llamacli.ops.lanewise import lower_lanewise

            twice = Value(self.x.graph, self.x.width)
            to.host_op(lambda run: 2 * run[self.x], [self.x], twice)
            lower_lanewise(to, "plus_one", lambda v, x: x + 1.0, [f32(twice)], f32(self.out))

    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.record(Parted(g.value(x.width), x))

    run = Graphed(NativeEngine(1), build)
    run.check(2 * run.x + 1)


@attrs.frozen(eq=False)
class Mix(Lanewise):
    """(x + plus or x - minus) * n, n read from the op."""

    verb = "mix"
    x: Value
    plus: Value | None
    minus: Value | None
    n: float

    def formula(self, v: Any, x: Any, y: Any, n: Any) -> Any:
        return (x + y if self.plus else x - y) * self.n


def test_formulas_that_depend_on_fields_have_kernels_of_their_own() -> None:
    def build(g: Graph, param: Params, x: Value) -> Value:
        y = g.scale(x, 0.25)
        added = g.record(Mix(g.value(x.width), x, y, None, 2.0))
        return g.record(Mix(g.value(x.width), added, None, y, 3.0))

    run = Graphed(NativeEngine(1), build)
    run.check(3 * (2 * (run.x + run.x / 4) - run.x / 4))
