"""Shared parts of norms: checks, weights of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llamacli.kernels.layout import LANES, record
from llamacli.ops.base import expect
from llamacli.ops.lowering import Lowering, f32
from llamacli.ops.run import Run
from llamacli.ops.values import Array, Param, Tensor, Value

if TYPE_CHECKING:
    from llamacli.kernels.jit import Kernel

NORM = record(
    "x", "weight", "weight_stride", "bias", "bias_stride", "out", "stride", "n_heads", "head_dim", eps=np.float32
)
"""`weight` and `bias`, which may be 0, with the bytes from one head's to the next, 0 where heads share them."""


def check_norm(
    verb: str, x: Value, norm: Param | Tensor | None, head_dim: int | None
) -> tuple[int, Tensor | None, Tensor | None]:
    """Check the shapes of a norm's parameters.

    Returns the width of a head, weight and bias. Raises PluginError naming the parameter that does not fit.
    """
    weight, bias = (norm.weight, norm.bias) if isinstance(norm, Param) else (norm, None)
    head_dim = x.width if head_dim is None else head_dim
    expect(verb, head_dim > 0 and x.width % head_dim == 0, f"head_dim {head_dim} and width {x.width}")
    for tensor in filter(None, (weight, bias)):
        fits = tensor.shape in ((head_dim,), (x.width // head_dim, head_dim))
        expect(verb, fits, f"{tensor.name} {tensor.shape} on width {head_dim}")
    return head_dim, weight, bias


def per_head(normed: Array, run: Run, weight: Tensor | None, bias: Tensor | None) -> Array:
    """Apply weight and bias to heads, float64 [n, n_heads, head_dim]."""
    normed = normed * run[weight] if weight else normed
    return normed + run[bias] if bias else normed


def _ones(head_dim: int) -> Array:
    """Weights of ones, for a norm that has none.

    Zero beyond the head, where padding must stay zero.
    """
    return np.pad(np.ones(head_dim, np.float32), (0, LANES))


def lower_norm(
    to: Lowering,
    kernel: Kernel,
    source: Value,
    result: Value,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    head_dim: int,
) -> None:
    """Append the kernel step of a norm.

    A head is a unit of work.
    """
    x, out, biases = f32(source), f32(result), to.vector(bias) if bias else None
    weights = to.vector(weight) if weight else to.shared(("ones", head_dim), lambda: to.memory(_ones(head_dim)))
    to.step(
        kernel, NORM, x=x, out=out, n_heads=x.width // head_dim, head_dim=head_dim, eps=eps, weight=weights,
        bias=biases, work_unit=head_dim,
    )  # fmt: skip
