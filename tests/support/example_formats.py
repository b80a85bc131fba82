"""Plugin with tensor types: three with kernels, one without.

docs/plugins.md shows a part of it.

`Q3_S`: 32 numbers, scale * (code - 4): a float16 scale, then codes of 3 bits, the first lowest.
`T_S`: 256 numbers, scale * (code - 1): codes of 2 bits, four of neighbouring groups of 64 a byte, then a float16 scale.
`Q4_A`: 128 numbers, scale * code + least: scale and least of float16, then nibbles, the first lowest.
`I8_S`: 16 numbers, scale * int8: a float16 scale, then the integers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from llamacli import hookimpl
from llamacli.quantization import QuantFormat

if TYPE_CHECKING:
    from llamacli.kernels.packing_formats import IntegerPacking

LLAMACLI_API = 1


class Added(IntEnum):
    Q3_S = 1003
    T_S = 1002
    Q4_A = 1004
    I8_S = 1008


def _scales(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def dequantize_q3(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 14)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(-1, 32, 3)
    codes = bits @ np.array([1, 2, 4], np.uint8)
    return (_scales(blocks[:, :2]) * (codes.astype(np.float32) - 4)).reshape(len(raw), -1)


def quantize_q3(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(-1, 32)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / 3.5).astype(np.float16)
    steps = np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0)
    codes = (np.clip(np.rint(steps), -4, 3) + 4).astype(np.uint8)
    bits = np.unpackbits(codes[..., None], axis=2, count=3, bitorder="little").reshape(-1, 96)
    blocks = np.hstack([scale.view(np.uint8), np.packbits(bits, axis=1, bitorder="little")])
    return blocks.reshape(*x.shape[:-1], -1)


def decode_q3(block, codes, fields) -> None:
    for i in range(4):
        word = block[2 + 3 * i] | block[3 + 3 * i] << 8 | block[4 + 3 * i] << 16
        for j in range(8):
            codes[8 * i + j] = word >> 3 * j & 7
    fields[0] = block[0] | block[1] << 8


def packing_q3() -> IntegerPacking:
    from llamacli.kernels.ggml_packings import F16
    from llamacli.kernels.packing_formats import IntegerPacking

    return IntegerPacking(
        file_bytes=14, groups=1, planes=(2, 1), fields={"scale": (F16, 1)}, decode=decode_q3,
        factors=lambda f: (f["scale"][0], None), terms=lambda f, group: [(None, None)], bias_bits=2,
    )  # fmt: skip


def dequantize_t(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 66)
    codes = np.stack([blocks[:, :64] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1, 256)
    return (_scales(blocks[:, 64:]) * (codes.astype(np.float32) - 1)).reshape(len(raw), -1)


def decode_t(block, codes, fields) -> None:
    for i in range(256):
        codes[i] = block[i % 64] >> 2 * (i // 64) & 3
    fields[0] = block[64] | block[65] << 8


def packing_t() -> IntegerPacking:
    from llamacli.kernels.ggml_packings import F16
    from llamacli.kernels.packing_formats import IntegerPacking

    return IntegerPacking(
        file_bytes=66, groups=8, planes=(2,), fields={"scale": (F16, 1)}, decode=decode_t,
        factors=lambda f: (f["scale"][0], None), terms=lambda f, group: [(None, None)], bias_bits=0,
    )  # fmt: skip


def dequantize_q4(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 68)
    codes = np.stack([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=2).reshape(-1, 128)
    return (_scales(blocks[:, :2]) * codes + _scales(blocks[:, 2:4])).reshape(len(raw), -1)


def quantize_q4(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(-1, 128)
    least = groups.min(axis=1, keepdims=True).astype(np.float16)
    scale = ((groups.max(axis=1, keepdims=True) - least) / 15 + 1e-6).astype(np.float16)
    codes = np.clip(np.rint((groups - least) / scale), 0, 15).astype(np.uint8)
    blocks = np.hstack([scale.view(np.uint8), least.view(np.uint8), codes[:, ::2] | codes[:, 1::2] << 4])
    return blocks.reshape(*x.shape[:-1], -1)


def decode_q4(block, codes, fields) -> None:
    for i in range(64):
        codes[2 * i], codes[2 * i + 1] = block[4 + i] & 15, block[4 + i] >> 4
    fields[0], fields[1] = block[0] | block[1] << 8, block[2] | block[3] << 8


def packing_q4() -> IntegerPacking:
    from llamacli.kernels.ggml_packings import F16
    from llamacli.kernels.packing_formats import IntegerPacking

    return IntegerPacking(
        file_bytes=68, groups=4, planes=(4,), fields={"scale": (F16, 1), "least": (F16, 1)}, decode=decode_q4,
        factors=lambda f: (f["scale"][0], f["least"][0]), terms=lambda f, group: [(None, None)],
    )  # fmt: skip


def dequantize_i8(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 18)
    return (_scales(blocks[:, :2]) * blocks[:, 2:].view(np.int8)).reshape(len(raw), -1)


def quantize_i8(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(-1, 16)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / 127 * 1.001 + 1e-7).astype(np.float16)
    codes = np.rint(groups / scale).astype(np.int8)
    return np.hstack([scale.view(np.uint8), codes.view(np.uint8)]).reshape(*x.shape[:-1], -1)


FORMATS = (
    QuantFormat(Added.Q3_S, 32, 14, dequantize_q3, quantize_q3, packing_q3),
    QuantFormat(Added.T_S, 256, 66, dequantize_t, packing=packing_t),
    QuantFormat(Added.Q4_A, 128, 68, dequantize_q4, quantize_q4, packing_q4),
    QuantFormat(Added.I8_S, 16, 18, dequantize_i8, quantize_i8),
)


@hookimpl
def register_quant_formats(register) -> None:
    for fmt in FORMATS:
        register(fmt)
