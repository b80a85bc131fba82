"""NumPy execution of ops.

For the ops of the reference engine, and those of plugins that have no kernel.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from llamacli.errors import PluginError, plugin_errors
from llamacli.graph import Graph, Op
from llamacli.ops.run import Run

Floats = npt.NDArray[np.float32]


def describe_ops(graph: Graph) -> dict[Op, str]:
    """Describe each op in error messages: verb, plugin and layer.

    An op belongs to the block whose tensors were read last.
    """
    described, layer = {}, "before the first layer"
    for op in graph.ops:
        numbers = [match[1] for tensor in op.tensors() if (match := re.match(r"blk\.(\d+)\.", tensor.name))]
        layer = f"in layer {numbers[-1]}" if numbers else layer
        described[op] = f"verb {type(op).__name__} of {_package(op)}, {layer}"
    return described


def is_plugin_op(op: Op) -> bool:
    """True if the op's class is from outside the core."""
    return _package(op) != "llamacli"


def compute(op: Op, run: Run, description: str) -> Floats:
    """Compute an op in NumPy, float32 [n, width].

    Raises PluginError naming verb, plugin and layer if a plugin's op fails, returns another shape or computes a number
    that is not finite.
    """
    if not is_plugin_op(op):
        return np.asarray(op.compute(run), np.float32)
    with plugin_errors(description):
        result = np.asarray(op.compute(run), np.float32)
    if result.shape != (run.n, op.out.width):
        raise PluginError(f"{description}: compute returned shape {result.shape}, expected {(run.n, op.out.width)}")
    if not np.isfinite(result).all():
        row, column = np.argwhere(~np.isfinite(result))[0]
        raise PluginError(f"{description}: compute returned {result[row, column]} in row {row}, column {column}")
    return result


def _package(op: Op) -> str:
    return type(op).__module__.partition(".")[0]
