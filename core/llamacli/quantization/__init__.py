"""Tensor types of GGUF files: sizes, dequantization, block layouts, quantization."""

from llamacli.quantization.blocks import BLOCK_FORMATS, BlockFormat, Blocks
from llamacli.quantization.codebooks import CODEBOOK_TYPES, Codebook, CodebookBlocks, Multipliers, codebook
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
    "BLOCK_FORMATS", "CODEBOOK_TYPES", "FORMATS", "BlockFormat", "Blocks", "Codebook", "CodebookBlocks", "Multipliers",
    "QuantFormat", "TensorType", "block_size", "codebook", "dequantize", "nbytes", "quantize", "type_size",
]  # fmt: skip
