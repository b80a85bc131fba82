"""Tensor types compared with gguf: ids, sizes and numbers, bit-equal."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import _type_traits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.quantization import (
    FORMATS,
    QuantFormat,
    TensorType,
    block_size,
    dequantize,
    nbytes,
    quantize,
    type_size,
)
from suite import examples

GGUF_TYPES = sorted({*_type_traits, GGMLQuantizationType.F32, GGMLQuantizationType.F16})
QUANTIZABLE = [fmt.type for fmt in FORMATS.values() if fmt.quantize]


def test_ids_names_and_sizes_match_gguf() -> None:
    ours = {
        fmt.name: (int(type_id), fmt.block_size, fmt.type_size) for type_id in TensorType if (fmt := FORMATS[type_id])
    }
    theirs = {t.name: (int(t), *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    theirs["Q8_1"] = (9, 32, 36)  # gguf says 40 bytes; ggml's block is two halves and 32 bytes
    theirs["Q2_0"] = (42, 64, 18)  # known to ggml, not to gguf yet
    assert ours == theirs
    assert set(FORMATS) >= set(TensorType)


def test_all_types_that_gguf_dequantizes() -> None:
    assert [t.name for t in GGUF_TYPES if FORMATS[t].dequantize is None] == []


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def reference(raw: np.ndarray, t: GGMLQuantizationType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, t)


@pytest.mark.parametrize("t", GGUF_TYPES, ids=lambda t: t.name)
@examples(40)
@given(data=st.data())
def test_random_bytes_dequantize_bit_equal(t: GGMLQuantizationType, data: st.DataObject) -> None:
    n_rows, n_blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    raw = data.draw(arrays(np.uint8, (n_rows, n_blocks * type_size(t))))
    assert_same_bits(dequantize(raw, t), reference(raw, t))


@pytest.mark.parametrize("t", GGUF_TYPES, ids=lambda t: t.name)
def test_many_rows_dequantize_bit_equal(t: GGMLQuantizationType) -> None:
    """Random blocks with NaN, infinite and subnormal scales, in several chunks."""
    raw = np.random.default_rng(int(t)).integers(0, 256, (70, 40 * type_size(t)), np.uint8)
    raw.flags.writeable = False
    result = dequantize(raw, t)
    assert_same_bits(result, reference(raw, t))
    assert result.shape == (70, 40 * block_size(t))


def test_every_scale_of_mxfp4_times_every_code() -> None:
    """The two smallest scales are subnormal; the largest products overflow float32."""
    scales = np.arange(256, dtype=np.uint8)[:, None]
    codes = np.tile(np.arange(16, dtype=np.uint8) * 17, (256, 1))
    raw = np.concatenate([scales, codes], axis=1)
    result = dequantize(raw, TensorType.MXFP4)
    assert_same_bits(result, reference(raw, GGMLQuantizationType.MXFP4))
    assert (result[0, 1], result[1, 1], result[128, 7]) == (2.0**-128, 2.0**-127, 12)
    assert np.isinf(result[255, [1, 2]]).tolist() == [False, True]


@pytest.mark.parametrize(
    ("t", "dtype"),
    [
        (TensorType.F64, "<f8"),
        (TensorType.I8, "<i1"),
        (TensorType.I16, "<i2"),
        (TensorType.I32, "<i4"),
        (TensorType.I64, "<i8"),
    ],
)
def test_plain_numbers_become_float32(t: TensorType, dtype: str) -> None:
    values = np.array([[0, 1, -1], [127, -128, 3]], dtype)
    np.testing.assert_array_equal(dequantize(values.view(np.uint8), t), values.astype(np.float32))


def test_types_that_gguf_does_not_dequantize() -> None:
    """Numbers as llama.cpp's `dequantize_row_*` gives them."""
    scale = np.array([0.5], "<f2").view(np.uint8)
    bits = np.array([0b00000101, *[0xFF] * 15], np.uint8)
    found = dequantize(np.concatenate([scale, bits])[None], TensorType.Q1_0)
    assert found.tolist() == [[0.5, -0.5, 0.5, *[-0.5] * 5, *[0.5] * 120]]
    pairs = np.array([0b11100100, *[0b01010101] * 15], np.uint8)
    found = dequantize(np.concatenate([scale, pairs])[None], TensorType.Q2_0)
    assert found.tolist() == [[-0.5, 0, 0.5, 1, *[0] * 60]]
    codes, sums = np.arange(-128, 128, dtype=np.int8), np.zeros(16, "<i2")
    blocks = [
        np.concatenate([np.array([d], "<f4").view(np.uint8), codes.view(np.uint8), sums.view(np.uint8)])
        for d in (0.1, -3)
    ]
    found = dequantize(np.concatenate(blocks)[None], TensorType.Q8_K)
    expected = np.concatenate([np.float32(0.1) * codes.astype(np.float32), np.float32(-3) * codes.astype(np.float32)])
    assert_same_bits(found, expected[None])


@pytest.mark.parametrize("t", QUANTIZABLE, ids=lambda t: t.name)
@examples(40)
@given(data=st.data())
def test_quantized_bit_equal_to_gguf(t: TensorType, data: st.DataObject) -> None:
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-65504, max_value=65504)
    x = data.draw(arrays(np.float32, (2, 2 * block_size(t)), elements=finite))
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(x, GGMLQuantizationType(t)).view(np.uint8)
    np.testing.assert_array_equal(quantize(x, t), expected)


def test_weights_can_be_requantized() -> None:
    assert {TensorType.Q8_0, TensorType.Q4_0} <= set(QUANTIZABLE)


@pytest.mark.parametrize(("t", "tolerance"), [(TensorType.Q8_0, 0.5 / 127), (TensorType.Q4_0, 1 / 8)])
def test_quantizing_loses_at_most_a_step(t: TensorType, tolerance: float) -> None:
    """Half a step for Q8_0, one step for Q4_0, plus scale rounding.

    Q4_0 lacks the code at one end of its range.
    """
    x = np.random.default_rng(0).standard_normal((8, 256), dtype=np.float32)
    largest = np.abs(x.reshape(8, -1, 32)).max(axis=-1).repeat(32, axis=-1)
    assert np.all(np.abs(dequantize(quantize(x, t), t) - x) <= largest * (tolerance + 2**-11))


@pytest.mark.parametrize("t", FORMATS, ids=lambda t: t.name)
def test_sizes_of_rows_without_blocks_and_blocks_without_rows(t: TensorType) -> None:
    fmt = FORMATS[t]
    assert nbytes(t, (5, 3, 2 * fmt.block_size)) == 30 * fmt.type_size
    assert nbytes(t, (2**40, 2**40 * fmt.block_size)) == 2**80 * fmt.type_size
    assert nbytes(t, (0, fmt.block_size)) == nbytes(t, (3, 0)) == 0
    if fmt.dequantize:
        assert dequantize(np.empty((0, fmt.type_size), np.uint8), t).shape == (0, fmt.block_size)
        assert dequantize(np.empty((3, 0), np.uint8), t).shape == (3, 0)
    if fmt.quantize:
        assert quantize(np.empty((0, fmt.block_size), np.float32), t).shape == (0, fmt.type_size)


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ModelFormatError, match=r"rows of 48 numbers.*Q8_0.*32"):
        nbytes(TensorType.Q8_0, (2, 48))
    with pytest.raises(ModelFormatError, match=r"rows of 35 bytes.*Q8_0.*34"):
        dequantize(np.zeros((2, 35), np.uint8), TensorType.Q8_0)
    with pytest.raises(ModelFormatError, match=r"rows of 48 numbers.*Q8_0.*32"):
        quantize(np.zeros((2, 48), np.float32), TensorType.Q8_0)


def test_unsupported_conversions_are_refused() -> None:
    with pytest.raises(ModelFormatError, match="unknown tensor type 99"):
        block_size(99)
    with pytest.raises(ModelFormatError, match="Q8_1 cannot be dequantized"):
        dequantize(np.zeros((1, 36), np.uint8), TensorType.Q8_1)
    with pytest.raises(InvalidRequestError, match="cannot quantize to Q4_K"):
        quantize(np.zeros((1, 256), np.float32), TensorType.Q4_K)
    with pytest.raises(InvalidRequestError, match=r"uint8 \[n_rows, row_bytes\], not uint8 \[34\]"):
        dequantize(np.zeros(34, np.uint8), TensorType.Q8_0)
    with pytest.raises(InvalidRequestError, match="not float32"):
        dequantize(np.zeros((1, 34), np.float32), TensorType.Q8_0)


def test_added_format_works_in_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    class Extra(IntEnum):
        SIGNS = 200

    def signs(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        return np.unpackbits(raw, axis=1, bitorder="little").astype(np.float32) * 2 - 1

    fmt = QuantFormat(Extra.SIGNS, block_size=8, type_size=1, dequantize=signs)
    monkeypatch.setitem(FORMATS, Extra.SIGNS, fmt)
    assert nbytes(200, (2, 16)) == 4
    assert dequantize(np.array([[0x0F]], np.uint8), 200).tolist() == [[1] * 4 + [-1] * 4]
    with pytest.raises(InvalidRequestError, match="SIGNS"):
        quantize(np.zeros((1, 8), np.float32), 200)
