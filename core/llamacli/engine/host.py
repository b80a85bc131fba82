"""NumPy execution of ops.

For the ops of the reference engine, and those of plugins that have no kernel.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any

import attrs
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
        numbers = [match[1] for tensor in op.tensors() if (match := re.search(r"\bblk\.(\d+)\.", tensor.name))]
        layer = f"in layer {numbers[-1]}" if numbers else layer
        described[op] = f"verb {type(op).__name__} of {_package(op)}, {layer}"
    return described


def is_plugin_op(op: Op) -> bool:
    """True if the op or a function of it is a plugin's."""
    return _package(op) != "llamacli"


def compute(op: Op, run: Run, description: str | None) -> Floats:
    """Compute an op in NumPy, float32 [n, width].

    An op of a plugin has a description, and its result is `checked`.
    """
    if description is None:
        return np.asarray(op.compute(run), np.float32)
    return checked(op.compute, run, op.out.width, description)


def checked(function: Callable[[Run], Any], run: Run, width: int, description: str) -> Floats:
    """Call a plugin's `compute` and check its result, float32 [n, width].

    Raises PluginError with the description if it fails, returns another shape or type, or a number that is not finite.
    """
    with plugin_errors(description):
        computed = np.asarray(function(run))
    if computed.dtype.kind not in "biuf":
        raise PluginError(f"{description}: compute returned an array of {computed.dtype}, expected real numbers")
    if computed.shape != (run.n, width):
        raise PluginError(f"{description}: compute returned shape {computed.shape}, expected {(run.n, width)}")
    with np.errstate(over="ignore"):
        result = computed.astype(np.float32)
    if not np.isfinite(result).all():
        row, column = np.argwhere(~np.isfinite(result))[0]
        raise PluginError(f"{description}: compute returned {result[row, column]} in row {row}, column {column}")
    return result


def _package(op: Op) -> str:
    given = [getattr(op, field.name) for field in attrs.fields(type(op))]
    sources = [type(op), *(value for value in given if callable(value) and not isinstance(value, enum.Enum))]
    packages = [str(source.__module__).partition(".")[0] for source in sources]
    return next((package for package in packages if package != "llamacli"), "llamacli")
