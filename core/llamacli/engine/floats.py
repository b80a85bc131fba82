"""Weights in float64, for ops that run in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamacli.engine.base import QuantMode, expect_finite
from llamacli.graph import Graph, Tensor
from llamacli.loaders import ModelFile
from llamacli.quantization import TensorType, dequantize, quantize

Array = npt.NDArray[np.float64]

REQUANTIZED = {QuantMode.Q8: TensorType.Q8_0, QuantMode.Q4: TensorType.Q4_0}
"""Tensor types that modes round matrices to."""


def load_floats(tensor: Tensor, file: ModelFile, mode: QuantMode) -> Array:
    """Load a tensor in float64 and its own shape, read-only.

    Modes q8 and q4 round it first. Raises ModelFormatError for numbers that are not finite.
    """
    weights = dequantize(file.data(tensor.name), file.tensors[tensor.name].type)
    if mode in REQUANTIZED:
        padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % 32)))
        weights = dequantize(quantize(padded, REQUANTIZED[mode]), REQUANTIZED[mode])[:, : weights.shape[1]]
    expect_finite(bool(np.isfinite(weights).all()), tensor.name, file)
    result = tensor.rows_of(weights.reshape(file.tensors[tensor.name].shape)).astype(np.float64)
    result.flags.writeable = False
    return result


def modes_of(graph: Graph, mode: QuantMode) -> dict[Tensor, QuantMode]:
    """Quantization mode of each tensor that the graph reads.

    Matrices have the model's, all others are kept exactly.
    """
    exact = graph.exact_tensors()
    matrices = {tensor for op in graph.ops for tensor in op.matrices() if tensor.name not in exact}
    tensors = {tensor for op in graph.ops for tensor in op.tensors()}
    return {tensor: mode if tensor in matrices else QuantMode.FP32 for tensor in tensors}
