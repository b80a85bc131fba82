"""Tensor formats of GGUF files: sizes, dequantisation to float32, layouts of blocks, and quantisers used at load."""

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
