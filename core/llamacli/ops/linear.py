"""Linear layer: out = x @ weight.T + bias, plus a residual."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.kernels.layout import ACTIVATION_BLOCK, BLOCK_BYTES, LINEAR
from llamacli.ops.add import Add, add
from llamacli.ops.base import MakeParam, Op, Recorder, expect, param_of
from llamacli.ops.lowering import Lowering, Slot, f32
from llamacli.ops.run import Run
from llamacli.ops.scale import scale
from llamacli.ops.values import Adapt, Array, LowRank, LowRanks, Param, Tensor, Value


@attrs.frozen(eq=False)
class Linear(Op):
    """Linear op: out = x @ weight.T + bias + residual.

    A weight of one dimension is one row. The weight has low-rank changes.
    """

    x: Value
    weight: Tensor
    bias: Tensor | None
    residual: Value | None = None
    changes: LowRanks = ()

    def matrices(self) -> list[Tensor]:
        # A weight of one row is a vector, which modes q8 and q4 do not round.
        weights = [self.weight] if len(self.weight.shape) > 1 else []
        return weights + [tensor for change in self.changes for tensor in (change.a, change.b)]

    def adapted(self, adapt: Adapt) -> Linear:
        return attrs.evolve(self, changes=self.changes + adapt(self.weight))

    def compute(self, run: Run) -> Array:
        out = product(run[self.x], run[self.weight].reshape(self.out.width, -1), is_tiled=run.is_tiled)
        for change in self.changes:
            out = out + low_rank_product(run[self.x], run[change.a], run[change.b], run.scale_of(change))
        out = out + run[self.bias] if self.bias else out
        return out + run[self.residual] if self.residual else out

    def lower(self, to: Lowering) -> None:
        residual = f32(self.residual) if self.residual else None
        lower_linear(to, f32(self.x), self.weight, f32(self.out), self.bias, residual)
        for change in self.changes:
            lower_low_rank(to, f32(self.x), change, f32(self.out))

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield linear(g, x, param("square", x.width, x.width, bias=True))
        yield linear(g, x, param("narrow", 24, x.width)) + linear(g, x, param("other", 24, x.width))
        weight, a, b = (param(name, *shape).weight for name, shape in (
            ("adapted", (40, x.width)), ("a", (3, x.width)), ("b", (40, 3)),
        ))  # fmt: skip
        yield g.record(Linear(g.value(40), x, weight, None, changes=(LowRank(a, b, 0.5), LowRank(a, b, 0.25))))


def linear(g: Recorder, x: Value, param: Param, *, scale_last: bool = False) -> Value:
    """Record a matrix product with its bias and scale.

    The scale is one number; both are applied where the file has them. The scale multiplies the products, and with
    `scale_last` the bias too, as llama.cpp has it in feed-forward layers. A weight of one dimension is one row.

    Formula: `out = x @ weight.T * scale + bias`
    Shapes: x [n, n_in], weight (n_out, n_in), bias (n_out,); out [n, n_out]
    Limits: none on the sizes; modes q8 and q4 round the weight
    Example: `q = g.linear(x, block.attn_q)`
    """
    param = param_of("linear", param)
    n_out, n_in = (1, *param.weight.shape)[-2:]
    is_matrix = len(param.weight.shape) <= 2
    expect("linear", is_matrix and n_in == x.width, f"{param.weight.name} {param.weight.shape} on width {x.width}")
    if param.bias:
        expect("linear", param.bias.shape == (n_out,), f"{param.bias.name} {param.bias.shape} and {n_out} rows")
    if param.scale is None or math.prod(param.scale.shape) > 1:  # a family that uses a longer one applies it itself
        return g.record(Linear(g.value(n_out), x, param.weight, param.bias))
    first, last = (param.bias, None) if scale_last else (None, param.bias)
    out = scale(g, g.record(Linear(g.value(n_out), x, param.weight, first)), Param(param.scale))
    return add(g, out, Param(last)) if last else out


def product(x: Array, weight: Array, *, is_tiled: bool = False) -> Array:
    """Matrix product x @ weight.T, row by row.

    x is [n, n_in], weight [n_out, n_in]. BLAS sums in another order for each shape, so rows are multiplied singly. With
    `is_tiled` it is that of tiles of AMX.
    """
    if is_tiled:
        return tiled_product(nearest_bf16(x), nearest_bf16(weight)).astype(np.float64)
    return np.array([np.dot(weight, row) for row in x]).reshape(len(x), len(weight))


def nearest_bf16(x: Array) -> npt.NDArray[np.float32]:
    """The nearest bfloat16 of numbers, ties to even, as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + (bits >> 16 & 1) + 0x7FFF) & 0xFFFF0000).view(np.float32)


def tiled_product(x: npt.NDArray[np.float32], weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Matrix product x @ weight.T of bfloat16, as tiles of AMX make it.

    x is [n, n_in], weight [n_out, n_in]. Of 32 columns, the products of even ones and those of odd ones are summed in
    turn, from 0; both sums are added, then that is added to the sum of the columns before. Intel's manual defines
    TDPBF16PS so. Numbers that are subnormal, which it takes as 0, are not handled.
    """
    total = np.zeros((len(x), len(weight)), np.float32)
    for block in range(0, x.shape[1], ACTIVATION_BLOCK):
        sums = np.zeros((2, *total.shape), np.float32)
        for column in range(block, min(block + ACTIVATION_BLOCK, x.shape[1])):
            products = x[:, column, None].astype(np.float64) * weight[None, :, column]
            sums[column % 2] = (sums[column % 2] + products).astype(np.float32)
        total += sums[0] + sums[1]
    return total


def low_rank_product(x: Array, a: Array, b: Array, scale: float) -> Array:
    """Product with a low-rank matrix: scale * (x @ a.T) @ b.T."""
    return scale * product(product(x, a), b)


def lower_linear(
    to: Lowering,
    x: Slot,
    tensor: Tensor,
    out: Slot,
    bias: Tensor | None = None,
    residual: Slot | None = None,
    starts: Slot | None = None,
) -> None:
    """Append the kernel step of a matrix product.

    Before it, x is rounded as the weight's type needs. With `starts`, int64 [n_groups + 1], the tensor is one matrix a
    group: rows starts[i] to starts[i + 1] - 1 of x are multiplied by matrix i. A tensor of several matrices without
    `starts` has one for each head of x and out, which must be whole blocks of activations wide.
    """
    from llamacli.kernels.linear import product_of

    if to.watches_products:
        to.watch_product(x, tensor, starts)
    matrix = to.matrix(tensor)
    biases = to.vector(bias) if bias else to.zeros
    source = to.rounded(x, matrix.packing.activation)
    n_groups, n_tiles, n_blocks, _ = matrix.packed.shape
    n_heads = n_groups if starts is None else 1
    head_blocks = x.width // n_heads // ACTIVATION_BLOCK
    to.step(
        product_of(matrix.packing), LINEAR, weight=matrix.packed, tile_bytes=matrix.packed[0, 0].nbytes,
        n_tiles=n_tiles, n_blocks=n_blocks, x=source, out=out, bias=biases, residual=residual, n_groups=n_groups,
        starts=starts,
        x_group=0 if starts else head_blocks * BLOCK_BYTES[source.form],
        out_group=0 if starts else 4 * (out.width // n_heads),
        work=float(matrix.shape[0] * matrix.shape[1] * max(1, x.slots) * n_heads),
    )  # fmt: skip


def lower_low_rank(
    to: Lowering, x: Slot, change: LowRank, out: Slot, starts: Slot | None = None, rows: Slot | None = None
) -> None:
    """Append the steps of a low-rank change.

    They add its product with x to `out`. `starts` is as for `lower_linear`; with it, `rows` has the row of each slot.
    Matrices that have their `a` in common compute the product with it once.
    """
    narrow = Slot((x, change.a), "f32", change.a.shape[-2], x.slots)
    if to.maker(narrow) is None:
        lower_linear(to, x, change.a, narrow, starts=starts)
    lower_scaled(to, narrow, change, out, starts, rows)


def lower_scaled(
    to: Lowering, narrow: Slot, change: LowRank, out: Slot, starts: Slot | None = None, rows: Slot | None = None
) -> None:
    """Append the steps that add ratio * scale * narrow @ b.T to `out`."""
    lower_linear(to, lower_scale(to, narrow, change, rows), change.b, out, residual=out, starts=starts)


def lower_scale(to: Lowering, narrow: Slot, change: LowRank, rows: Slot | None = None) -> Slot:
    """Append the step that multiplies by ratio * scale, once; its slot."""
    from llamacli.kernels.low_rank import SCALE_ADAPTER, scale_adapter

    scaled = attrs.evolve(narrow, owner=(narrow.owner, change.ratio, change.adapter))
    if to.maker(scaled) is None:
        to.step(
            scale_adapter, SCALE_ADAPTER, x=narrow, out=scaled, width=narrow.width, adapter=change.adapter,
            slots=narrow.slots, rows=rows, ratio=change.ratio,
        )  # fmt: skip
    return scaled


def fuse_residuals(ops: Sequence[Op]) -> list[Op]:
    """Fuse additions into the linear layers of one of their terms.

    Only where nothing else reads that term.
    """
    n_uses: dict[Value, int] = {}
    for op in ops:
        for value in op.inputs():
            n_uses[value] = n_uses.get(value, 0) + 1
    made = {op.out: i for i, op in enumerate(ops)}
    fused: dict[Op, Op | None] = {}
    for op in ops:
        if not isinstance(op, Add) or not isinstance(op.b, Value):
            continue
        for term, other in ((op.b, op.a), (op.a, op.b)):
            maker = ops[made[term]]
            # The other term must be there by the time the product is computed.
            if isinstance(maker, Linear) and n_uses[term] == 1 and made[other] < made[term] and maker not in fused:
                fused |= {op: None, maker: attrs.evolve(maker, out=op.out, residual=other)}
                break
    return [op for op in (fused.get(op, op) for op in ops) if op is not None]
