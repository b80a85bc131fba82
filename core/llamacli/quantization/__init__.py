"""Tensor formats of GGUF files: sizes, dequantisation to float32, and the quantisers used at load."""

from llamacli.quantization.formats import (
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
    "FORMATS",
    "QuantFormat",
    "TensorType",
    "block_size",
    "dequantize",
    "nbytes",
    "quantize",
    "type_size",
]
