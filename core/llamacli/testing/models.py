"""Tiny random models as GGUF files.

Every number is decided by a seed and the tensor's name. The frozen generator `RandomState` is used on purpose: its
numbers never change from one NumPy to the next, so that recorded results of such files stay valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import gguf
from gguf import GGMLQuantizationType as Type
from llamacli.quantization import dequantize
from llamacli.testing.vocabularies import vocabulary, vocabulary_size

SIGMA = 0.1
"""Standard deviation of the weights."""


def write_model(
    path: str | Path,
    architecture: str,
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    tokenizer: str = "test",
    seed: str,
    type: str = "F32",  # noqa: A002 - GGUF's word
    expert_type: str | None = None,
    dequantized: bool = False,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write a GGUF file of random tensors; return its path.

    `keys` are full metadata keys; `shapes` gives the shape of each tensor in NumPy's order, rows first. `tokenizer` is
    as in `vocabularies.vocabulary`. `type` is the tensor type of matrices (rows must be multiples of the type's block),
    `expert_type` that of names with `_exps.`, if it is another; `dequantized` stores the same numbers as float32.

    For broken files: `metadata` are keys to add or, with None, to leave out; `tensors` are arrays, float32, int32 or
    int64, to add or to put in the place of others; `without` are names of tensors to leave out.
    """
    common: dict[str, Any] = {
        "general.name": f"tiny {seed}",
        f"{architecture}.vocab_size": vocabulary_size(tokenizer),
        **vocabulary(tokenizer),
    }
    content = {
        name: random_tensor(seed, name, shape, (expert_type or type) if "_exps." in name else type)
        for name, shape in shapes.items()
    }
    if dequantized:
        content = {name: (_floats(*tensor), Type.F32) for name, tensor in content.items()}
    for name, array in (tensors or {}).items():
        integers = {np.dtype(np.int32): Type.I32, np.dtype(np.int64): Type.I64}
        kind = integers.get(array.dtype, Type.F32)
        content[name] = (array if kind is not Type.F32 else array.astype(np.float32), kind)
    content = {name: tensor for name, tensor in content.items() if name not in without}
    write_gguf(path, architecture, common | dict(keys) | dict(metadata or {}), content)
    return Path(path)


def random_tensor(seed: str, name: str, shape: tuple[int, ...], matrix_type: str) -> tuple[np.ndarray, Type]:
    """A random tensor as it is stored, and its type.

    Matrices are of `matrix_type`; vectors, routers, convolutions, token shifts and what is not named `.weight` are
    float32. Norms lie around 1, all else around 0, with deviation SIGMA; rates of decay (`ssm_a`) around -1.
    """
    random = np.random.RandomState(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little"))
    if name == "rope_freqs.weight":  # fast pairs as they are, slow ones 8 times slower
        return np.clip(np.linspace(-2, 10, shape[0]), 1, 8).astype(np.float32), Type.F32
    if name.endswith(("norm.weight", "norm")):
        return (1 + SIGMA * random.standard_normal(shape)).astype(np.float32), Type.F32
    if name.endswith("ssm_a"):
        return -np.exp(0.5 * random.standard_normal(shape)).astype(np.float32), Type.F32
    kept = ("ffn_gate_inp", "conv1d", "conv.weight", "_lerp_", "_rel_b")
    if len(shape) == 1 or any(part in name for part in kept) or not name.endswith(".weight"):
        return (SIGMA * random.standard_normal(shape)).astype(np.float32), Type.F32
    stored = Type[matrix_type]
    if stored in _BYTE_SCALES:
        return _random_bytes(random, shape, stored), stored
    if stored in _SCALES:
        return _random_blocks(random, shape, stored), stored
    return gguf.quants.quantize((SIGMA * random.standard_normal(shape)).astype(np.float32), stored), stored


_SCALES: dict[Type, tuple[int, int | None, float]] = {
    Type.Q2_K: (80, 82, 1.5),
    Type.Q3_K: (108, None, 0),
    Type.Q4_K: (0, 2, 7.5),
    Type.Q5_K: (0, 2, 15.5),
    Type.Q6_K: (208, None, 0),
    **dict.fromkeys(
        (Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.Q1_0), (0, None, 0)
    ),
    Type.IQ1_M: (48, None, 0),
}
"""Types that `gguf` cannot write: offsets in a block of the float16 scale and minimum, and the quotient of the two that
leaves weights with a mean near 0."""


def _random_blocks(random: np.random.RandomState, shape: tuple[int, ...], stored: Type) -> np.ndarray:
    """Blocks of random bits; one scale gives weights of deviation SIGMA."""
    block_size, type_size = gguf.GGML_QUANT_SIZES[stored]
    rows = (*shape[:-1], shape[-1] // block_size)
    blocks = random.randint(0, 256, (*rows, type_size)).astype(np.uint8)
    at, at_minimum, quotient = _SCALES[stored]

    def set_scale(scale: float) -> np.ndarray:
        for offset, value in ((at, scale), (at_minimum, scale * quotient)):
            if offset is None:
                continue
            if stored is Type.IQ1_M:  # the upper four bits of four words
                parts = np.float16(value).view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
                blocks[..., 49:56:2] = blocks[..., 49:56:2] & 15 | parts.astype(np.uint8) << 4
            else:
                blocks[..., offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        return blocks.reshape(*shape[:-1], -1)

    return set_scale(SIGMA / float(_floats(set_scale(1), stored).std()))


def _floats(array: np.ndarray, stored: Type) -> np.ndarray:
    """Tensor in float32; of types that `gguf` knows, as it dequantizes them."""
    if stored is not Type.Q1_0:
        return gguf.quants.dequantize(array, stored)
    return dequantize(array.reshape(-1, array.shape[-1]), stored).reshape(*array.shape[:-1], -1)


_BYTE_SCALES = {Type.MXFP4: (1, (0, 1, *range(119, 124))), Type.NVFP4: (4, range(8, 15))}
"""Types whose blocks begin with scales of a byte: how many, and values most of which lie around SIGMA."""


def _random_bytes(random: np.random.RandomState, shape: tuple[int, ...], stored: Type) -> np.ndarray:
    """Blocks of random bits and scales of `_BYTE_SCALES`."""
    (block_size, type_size), (n_scales, scales) = gguf.GGML_QUANT_SIZES[stored], _BYTE_SCALES[stored]
    blocks = random.randint(0, 256, (*shape[:-1], shape[-1] // block_size, type_size)).astype(np.uint8)
    blocks[..., :n_scales] = random.choice(scales, (*blocks.shape[:-1], n_scales))
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: str | Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, Type]]
) -> None:
    """Write a GGUF file from metadata and tensors.

    The types of keys follow from their values; keys whose value is None are left out. Each tensor is an array as it is
    stored, with its type.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if value is not None:
            add[type(value)](key, value)
    for name, (array, stored) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
