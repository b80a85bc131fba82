"""Quantizers: their errors beside llama.cpp's, and their invariants."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import gguf
from gguf import GGMLQuantizationType
from llamacli.errors import InvalidRequestError
from llamacli.kernels.encoding import encode
from llamacli.kernels.team import Team
from llamacli.quantization import BLOCK_FORMATS, BlockFormat, TensorType, dequantize
from llamacli.testing import formulas
from oracle import importance_quantizers, quantizers
from suite import examples

FORMATS = [pytest.param(fmt, id=fmt.type.name) for fmt in BLOCK_FORMATS.values()]
PLAIN = [pytest.param(fmt, id=fmt.type.name) for fmt in BLOCK_FORMATS.values() if fmt.groups == 1]

MARGIN = {
    "Q4_0": 0.97, "Q4_1": 0.91, "Q5_0": 0.98, "Q5_1": 0.92, "Q8_0": 0.98,
    "Q2_K": 0.93, "Q3_K": 0.97, "Q4_K": 0.985, "Q5_K": 0.965, "Q6_K": 0.975,
}  # fmt: skip
"""Largest allowed quotient of our error and llama.cpp's, in the mean over random matrices."""


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    team = Team(1)
    yield team
    team.close()


def quantized(team: Team, fmt: BlockFormat, x: np.ndarray) -> np.ndarray:
    """Quantize and dequantize x, float32 [n, width]."""
    return dequantize(fmt.pack(encode(team, fmt, x)).reshape(len(x), -1), fmt.type)


def errors(team: Team, fmt: BlockFormat, matrices: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: quantizers.rmse(x, quantized(team, fmt, x)) for name, x in matrices.items()}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(quantizers.GOLDEN.read_text())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("source", quantizers.SOURCES)
def test_no_tensor_has_a_larger_error_than_with_llama_cpp(
    team: Team, fmt: BlockFormat, source: str, golden: dict[str, Any]
) -> None:
    path = quantizers.SOURCES[source]
    if path is not None and not path.is_file():
        pytest.skip(f"{path} is not there")
    assert golden[source]["sha256"] == quantizers.fingerprint(source), "another model: record its errors anew"
    theirs = golden[source][fmt.type.name]
    ours = errors(team, fmt, quantizers.matrices(source))
    assert ours.keys() == theirs.keys()
    # Numbers that a format holds exactly have no error but the last digit of a float.
    assert [name for name in ours if ours[name] > theirs[name] * (1 + 1e-6) + 1e-9] == []


@pytest.mark.parametrize("fmt", FORMATS)
def test_errors_keep_their_margin(team: Team, fmt: BlockFormat, golden: dict[str, Any]) -> None:
    theirs = golden["random"][fmt.type.name]
    ours = errors(team, fmt, quantizers.matrices("random"))
    assert np.mean([ours[name] / theirs[name] for name in ours]) < MARGIN[fmt.type.name]


@pytest.mark.parametrize("fmt", FORMATS)
def test_weighted_errors_are_below_those_of_llama_cpp(team: Team, fmt: BlockFormat) -> None:
    theirs = json.loads(importance_quantizers.GOLDEN.read_text())["weighted"][fmt.type.name]
    weights, ours = importance_quantizers.weights_of("weighted"), {}
    for name, x in importance_quantizers.samples().items():
        found = dequantize(fmt.pack(encode(team, fmt, x, weights)).reshape(len(x), -1), fmt.type)
        ours[name] = importance_quantizers.weighted_rmse(x, found, weights)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] > theirs[name] * 1.01] == []


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_comparison_notices_a_worse_quantizer(team: Team, fmt: BlockFormat, golden: dict[str, Any]) -> None:
    name, x = next(iter(quantizers.matrices("random").items()))
    worse = quantized(team, fmt, np.float32(1.1) * x) / np.float32(1.1)
    worse = worse + np.float32(0.5) * golden["random"][fmt.type.name][name]
    assert quantizers.rmse(x, worse) > golden["random"][fmt.type.name][name]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-65504, max_value=65504)
weights = st.floats(width=16, allow_nan=False, min_value=-1, max_value=1)


@pytest.mark.parametrize("fmt", FORMATS)
@given(data=st.data())
def test_finite_numbers_stay_finite(team: Team, fmt: BlockFormat, data: st.DataObject) -> None:
    x = data.draw(arrays(np.float32, (1, 256), elements=finite))
    blocks = encode(team, fmt, x)
    assert blocks.codes.max() <= fmt.high - fmt.low
    if fmt.scales:
        assert fmt.scales[0] <= blocks.scales.min() <= blocks.scales.max() <= fmt.scales[1]
        assert 0 <= blocks.shifts.min() <= blocks.shifts.max() <= fmt.scales[1]
    assert np.isfinite(quantized(team, fmt, x)).all()


@pytest.mark.parametrize("fmt", PLAIN)
@given(x=arrays(np.float32, (1, 256), elements=weights))
@example(x=np.zeros((1, 256), np.float32))
@example(x=np.full((1, 256), -0.37, np.float32))
@example(x=np.eye(1, 256, dtype=np.float32))
def test_error_of_each_block_is_at_most_that_of_the_uniform_grid(team: Team, fmt: BlockFormat, x: np.ndarray) -> None:
    """Compare with a uniform grid over each block."""
    kind = GGMLQuantizationType(fmt.type)
    plain = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    ours = quantized(team, fmt, x)
    for block in np.split(np.arange(256), 256 // fmt.size):
        largest = np.abs(x[:, block]).max()
        bound = quantizers.rmse(x[:, block], plain[:, block]) * 1.001 + largest * 2**-11 + 2**-24
        assert quantizers.rmse(x[:, block], ours[:, block]) <= bound


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 1e-30, 65504.0])
def test_equal_numbers_stay_equal(team: Team, fmt: BlockFormat, value: float) -> None:
    x = np.full((3, 512), value, np.float32)
    result = quantized(team, fmt, x)
    assert (result == result[0, 0]).all()
    np.testing.assert_allclose(result, x, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("fmt", [BLOCK_FORMATS[kind] for kind in (TensorType.Q8_0, TensorType.Q4_0, TensorType.Q5_0)])
def test_representable_numbers_are_exact(team: Team, fmt: BlockFormat) -> None:
    x = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    kind = GGMLQuantizationType(fmt.type)
    once = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    np.testing.assert_array_equal(quantized(team, fmt, once), once)


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_do_not_depend_on_threads_or_neighbours(team: Team, fmt: BlockFormat) -> None:
    x = np.random.default_rng(1).normal(size=(7, 256 * 3)).astype(np.float32)
    whole = fmt.pack(encode(team, fmt, x))
    other = Team(3)
    np.testing.assert_array_equal(fmt.pack(encode(other, fmt, x)), whole)
    other.close()
    rows = [fmt.pack(encode(team, fmt, row)) for row in x]
    np.testing.assert_array_equal(np.concatenate(rows), whole)
    assert len(encode(team, fmt, x[:0]).codes) == 0


def test_rows_of_partial_blocks_are_refused(team: Team) -> None:
    with pytest.raises(InvalidRequestError, match="300 numbers are not a multiple of Q4_K's block of 256"):
        encode(team, BLOCK_FORMATS[TensorType.Q4_K], np.zeros(300, np.float32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_and_shifts_are_those_that_files_hold(team: Team, fmt: BlockFormat) -> None:
    """Codes of numbers that are rounded afterwards would not be the nearest."""
    blocks = encode(team, fmt, np.random.default_rng(4).normal(size=(8, 256)).astype(np.float32))
    for numbers in (blocks.factors, blocks.scales, blocks.shift_factors, blocks.shifts):
        np.testing.assert_array_equal(numbers, numbers.astype(np.float16))


@pytest.mark.parametrize("fmt", FORMATS)
def test_powers_of_two_change_only_the_scales(team: Team, fmt: BlockFormat) -> None:
    x = np.random.default_rng(2).normal(size=(2, 512)).astype(np.float32)
    np.testing.assert_array_equal(quantized(team, fmt, 4 * x), 4 * quantized(team, fmt, x))


@pytest.mark.parametrize("fmt", FORMATS)
def test_product_with_quantized_weights_is_close(team: Team, fmt: BlockFormat) -> None:
    random = np.random.default_rng(3)
    weight, x = (random.normal(size=(16, 512)).astype(np.float32) for _ in range(2))
    bits = fmt.high - fmt.low + 1
    exact, found = formulas.linear(x, weight), formulas.linear(x, quantized(team, fmt, weight))
    assert formulas.nmse(exact, found) < 3 / bits**2


@pytest.mark.parametrize("fmt", FORMATS)
@examples(25)
@given(data=st.data())
def test_codes_of_random_shapes_are_the_nearest(team: Team, fmt: BlockFormat, data: st.DataObject) -> None:
    """Compare codes with those of NumPy for the same scales and shifts."""
    n_blocks = data.draw(st.integers(1, 40))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = random.normal(size=(n_blocks * fmt.groups, fmt.size)).astype(np.float32)
    x *= 10.0 ** random.integers(-6, 5, (len(x), 1))
    x[random.random(x.shape) < data.draw(st.sampled_from([0.0, 0.1, 1.0]))] = data.draw(
        st.sampled_from([0, -0.0, 1e-30])
    )
    x = np.clip(x, -65504, 65504).astype(np.float32)
    blocks = encode(team, fmt, x)
    scale = (blocks.factors[:, None] * blocks.scales).reshape(-1, 1)
    shift = (blocks.shift_factors[:, None] * blocks.shifts).reshape(-1, 1)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=np.abs(scale) > 1e-30)
    codes = np.clip(np.rint((x + shift) * inverse), fmt.low, fmt.high)
    np.testing.assert_array_equal(blocks.codes.reshape(x.shape), codes - fmt.low)
    result = dequantize(fmt.pack(blocks).reshape(1, -1), fmt.type).reshape(x.shape)
    np.testing.assert_allclose(result, scale * codes - shift, rtol=1e-3, atol=1e-3 * np.abs(x).max())
