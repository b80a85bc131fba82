"""Layouts of codebook formats: what is packed, `gguf.quants` reads."""

import numpy as np
import pytest

from llamacli.quantization import CODEBOOK_TYPES, Codebook, CodebookBlocks, TensorType, codebook, dequantize, nbytes
from llamacli.quantization.codebooks import Signs

KINDS = [pytest.param(kind, id=kind.name) for kind in CODEBOOK_TYPES]


def random_blocks(book: Codebook, n_numbers: int) -> CodebookBlocks:
    """Random contents of blocks, every field over its whole range."""
    random = np.random.default_rng(0)
    n_groups, n_vectors = n_numbers // book.size, book.size // book.dim
    n_entries = len(book.levels) if book.grid is None else len(book.grid)
    shifts = random.integers(0, len(book.shifts), (n_groups, n_vectors))
    if book.shift_span == book.size:
        shifts[:] = shifts[:, :1]
    signs = random.integers(0, 256, (n_groups, max(1, book.size // 8)))
    if book.signs is Signs.EVEN:
        signs ^= (np.bitwise_count(signs) & 1) << 7
    if book.multipliers:
        integers = book.multipliers.first + book.multipliers.step * np.arange(book.multipliers.count)
        scales = random.choice(integers, n_groups)
    elif book.scales is not None:
        scales = random.choice(book.scales[100:120], n_groups)
    else:
        scales = random.normal(size=n_groups).astype(np.float16)
    return CodebookBlocks(
        codes=random.integers(0, n_entries, (n_groups, n_vectors)).astype(np.uint16),
        shifts=shifts.astype(np.uint8),
        signs=signs.astype(np.uint8),
        scales=scales.astype(np.float32),
        factors=random.normal(size=n_groups // book.groups).astype(np.float16).astype(np.float32),
    )


def meaning(book: Codebook, b: CodebookBlocks) -> np.ndarray:
    """Numbers of blocks by the formula of the format."""
    if book.grid is None:
        levels = book.levels[b.codes]
    else:
        levels = (book.levels[book.grid[b.codes]] + np.array(book.shifts)[b.shifts][..., None]).reshape(
            len(b.scales), -1
        )
    signs = np.ones_like(levels)
    if book.signs is not Signs.LEVELS:
        signs = 1 - 2.0 * np.unpackbits(b.signs, axis=1, bitorder="little")
    unit = book.multipliers.unit if book.multipliers else 1.0
    factors = np.repeat(b.factors, book.groups) * unit if book.groups > 1 else np.ones(len(b.scales))
    return (levels * signs * (b.scales * factors)[:, None]).reshape(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_layout(kind: TensorType) -> None:
    book, n = codebook(kind), 20 * 256
    blocks = random_blocks(book, n)
    raw = book.pack(blocks)
    assert raw.dtype == np.uint8
    assert raw.size == nbytes(kind, (n,))
    np.testing.assert_allclose(dequantize(raw.reshape(1, -1), kind)[0], meaning(book, blocks), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_grids_have_every_entry_once(kind: TensorType) -> None:
    book = codebook(kind)
    assert (np.diff(book.levels) > 0).all()
    if book.grid is not None:
        assert len(np.unique(book.grid, axis=0)) == len(book.grid)
        assert len(book.grid) % 4 == 0  # the kernel searches four quarters


def test_scales_of_fp4() -> None:
    mx, nv = codebook(TensorType.MXFP4).scales, codebook(TensorType.NVFP4).scales
    assert mx is not None
    assert nv is not None
    assert (mx[128], mx[127], len(mx)) == (1.0, 0.5, 255)
    assert (nv[0], nv[1], nv[56], nv[126], len(nv)) == (0.0, 2.0**-10, 0.5, 224.0, 127)
    assert codebook(TensorType.NVFP4).largest == 2688


def test_other_types_have_no_codebook() -> None:
    with pytest.raises(KeyError):
        codebook(TensorType.Q4_K)
