"""Tensor types of GGUF files: sizes, dequantisation, block layouts, quantisation."""

from llamacli.quantization.blocks import BLOCK_FORMATS, BlockFormat, Blocks
from llamacli.quantization.tensor_types import (
    FORMATS,
    QuantFormat,
    TensorType,
    block_size,
    dequantize,
    nbytes,
    quantize,
    type_size,
)

__all__ = [
    "BLOCK_FORMATS",
    "FORMATS",
    "BlockFormat",
    "Blocks",
    "QuantFormat",
    "TensorType",
    "block_size",
    "dequantize",
    "nbytes",
    "quantize",
    "type_size",
]
