"""Packed blocks, decoded by `gguf.quants`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf
from gguf import GGMLQuantizationType
from llamacli.quantization import BLOCK_FORMATS, BlockFormat, Blocks, block_size, type_size

FORMATS = [pytest.param(fmt, id=fmt.type.name) for fmt in BLOCK_FORMATS.values()]


def random_blocks(fmt: BlockFormat, n_blocks: int, seed: int) -> Blocks:
    random = np.random.default_rng(seed)
    halves = lambda *shape: random.normal(size=shape).astype(np.float16).astype(np.float32)  # noqa: E731
    scales = shifts = halves(n_blocks, 1)
    if fmt.scales:
        low, high = fmt.scales
        scales = random.integers(low, high + 1, (n_blocks, fmt.groups)).astype(np.float32)
        shifts = random.integers(0, high + 1, (n_blocks, fmt.groups)).astype(np.float32)
    return Blocks(
        codes=random.integers(0, fmt.high - fmt.low + 1, (n_blocks, fmt.groups, fmt.size)).astype(np.uint8),
        scales=scales,
        shifts=shifts if fmt.shifted else np.zeros_like(shifts),
        factors=halves(n_blocks) if fmt.scales else np.ones(n_blocks, np.float32),
        shift_factors=halves(n_blocks) if fmt.scales and fmt.shifted else np.ones(n_blocks, np.float32),
    )


def numbers(fmt: BlockFormat, b: Blocks) -> np.ndarray:
    """Numbers that blocks represent, by the module's formula."""
    codes = b.codes.astype(np.float64) + fmt.low
    scales = (b.factors[:, None] * b.scales)[..., None].astype(np.float64)
    shifts = (b.shift_factors[:, None] * b.shifts)[..., None].astype(np.float64)
    return (scales * codes - shifts).reshape(len(codes), -1)


@pytest.mark.parametrize("fmt", FORMATS)
@given(seed=st.integers(0, 2**32 - 1), n_blocks=st.integers(1, 5))
def test_gguf_decodes_packed_blocks(fmt: BlockFormat, seed: int, n_blocks: int) -> None:
    blocks = random_blocks(fmt, n_blocks, seed)
    packed = fmt.pack(blocks)
    assert (packed.dtype, packed.shape) == (np.uint8, (n_blocks, type_size(fmt.type)))
    read = gguf.quants.dequantize(packed, GGMLQuantizationType(fmt.type))
    np.testing.assert_allclose(read, numbers(fmt, blocks), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_packing_does_not_modify_its_input(fmt: BlockFormat) -> None:
    blocks, again = random_blocks(fmt, 3, 0), random_blocks(fmt, 3, 0)
    fmt.pack(blocks)
    np.testing.assert_array_equal(blocks.codes, again.codes)
    np.testing.assert_array_equal(blocks.scales, again.scales)


@pytest.mark.parametrize("fmt", FORMATS)
def test_group_sizes_add_up_to_the_block_size(fmt: BlockFormat) -> None:
    assert fmt.groups * fmt.size == block_size(fmt.type)
    assert 16 % fmt.groups == 0  # vectors of 16 lanes hold whole blocks
