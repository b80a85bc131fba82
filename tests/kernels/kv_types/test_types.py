import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_helpers import ONE, new_sequence, random_cells
from llamacli import InvalidRequestError
from llamacli.kv import KV_TYPES, PAGE, KVLayout, KVSpec
from llamacli.testing import formulas

BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8, "q4_0": 4, "q4_1": 4, "iq4_nl": 4, "q5_0": 5, "q5_1": 5}
QUANTIZED = ["q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
types = st.sampled_from(list(KV_TYPES))
specs = st.builds(KVSpec, st.integers(1, 3), st.sampled_from([1, 8, 16, 24, 48, 64]))


@given(st.lists(specs, min_size=1, max_size=3), st.integers(1, 60), types, types)
@example([KVSpec(1, 1)], 52, "f32", "q5_0")
def test_read_returns_what_was_written(layers: list[KVSpec], n: int, k_type: str, v_type: str) -> None:
    sequence = new_sequence(layers, 64, (k_type, v_type))
    sequence.reserve(0, n)
    written = [random_cells(n, spec, seed) for seed, spec in enumerate(layers)]
    for layer, (k, v) in enumerate(written):
        sequence.write(layer, 0, k, v)
    for layer, (k, v) in enumerate(written):
        keys, values = sequence.read(layer, n)
        assert_close(keys.transpose(2, 0, 1), k, k_type, is_key=True)
        assert_close(values.transpose(1, 0, 2), v, v_type, is_key=False)


def assert_close(stored: np.ndarray, x: np.ndarray, kv_type: str, *, is_key: bool) -> None:
    """Assert the error bounds of each type.

    Floats are rounded to nearest; rotated values are within half a step, or one step for types with a zero point.
    """
    if kv_type in ("f32", "f16"):
        np.testing.assert_array_equal(stored, x.astype({"f32": np.float32, "f16": np.float16}[kv_type]))
    elif kv_type == "bf16":
        assert (stored.view(np.uint32) & 0xFFFF == 0).all()
        assert (np.abs(stored - x) <= np.abs(x) * 2**-8).all()
    elif is_key:  # delta coding of random keys up to doubles the variance
        assert formulas.nmse(stored, x) < {8: 2e-4, 5: 1.2e-2, 4: 5e-2}[BITS[kv_type]]
    else:
        rotated, expected = rotate(stored), rotate(x)
        for start in range(0, x.shape[-1], 32):
            block, got = expected[..., start : start + 32], rotated[..., start : start + 32]
            peak = np.abs(block).max(-1)
            step = np.maximum(block.max(-1), 0) - np.minimum(block.min(-1), 0)
            most = {"q8_0": peak / 254, "iq4_nl": peak * 12 / 127}.get(kv_type, step / (2 ** BITS[kv_type] - 1))
            # The scale has fewer bits than a float16, and subnormal ones fewer still.
            slack = 3e-4 * np.square(peak) + (32 * 2**-20) ** 2
            assert (np.square(got - block).mean(-1) <= 1.02 * np.square(most) + slack).all()


@pytest.mark.parametrize("kv_type", QUANTIZED)
@pytest.mark.parametrize("head_dim", [16, 64, 96])
def test_values_have_a_smaller_error_than_ggmls_rounding(kv_type: str, head_dim: int) -> None:
    spec = KVSpec(4, head_dim)
    k, v = random_cells(60, spec)
    v[..., 3] *= 20  # an outlier, which would determine the scale of its block
    sequence = new_sequence([spec], 60, ("f32", kv_type))
    sequence.reserve(0, 60)
    sequence.write(0, 0, k, v)
    blocks = v.reshape(60, -1, min(32, head_dim))
    error = formulas.nmse(sequence.read(0, 60)[1].transpose(1, 0, 2), v)
    assert error < 0.8 * formulas.nmse(ggml_rounded(blocks, kv_type), blocks)


def rotate(x: np.ndarray) -> np.ndarray:
    """Hadamard rotation in float64."""
    matrix = np.ones((1, 1))
    while x.shape[-1] % (2 * len(matrix)) == 0:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    size = len(matrix)
    return (x.reshape(*x.shape[:-1], -1, size) @ (matrix / np.sqrt(size))).reshape(x.shape)


def ggml_rounded(block: np.ndarray, kv_type: str) -> np.ndarray:
    """Quantize and dequantize blocks as GGML does, with a float64 scale."""
    low, high = block.min(-1, keepdims=True), block.max(-1, keepdims=True)
    peak, last = np.where(-low > high, low, high), 2 ** BITS[kv_type] - 1
    if kv_type == "iq4_nl":
        table = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
        scale = peak / -127 + 1e-300
        return table[np.abs(block[..., None] / scale[..., None] - table).argmin(-1)] * scale
    if kv_type.endswith("_1"):
        scale = (high - low) / last + 1e-300
        return np.rint((block - low) / scale) * scale + low
    scale = peak / {8: -127, 5: -16, 4: -8}[BITS[kv_type]] + 1e-300
    return np.clip(np.rint(block / scale), -(last // 2) - 1, last // 2) * scale


@pytest.mark.parametrize("kv_type", QUANTIZED)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_common_part_of_keys_costs_no_precision(kv_type: str, head_dim: int) -> None:
    spec = KVSpec(2, head_dim)
    k, v = random_cells(64, spec)
    common = np.random.default_rng(1).normal(0, 30, (1, 2, head_dim)).astype(np.float32)
    errors = []
    for keys in (k, k + common):
        sequence = new_sequence([spec], 64, (kv_type, "f32"))
        sequence.reserve(0, 64)
        sequence.write(0, 0, keys, v)
        error = np.square(sequence.read(0, 64)[0].transpose(2, 0, 1) - keys)
        errors.append(error[np.arange(64) % PAGE > 1].mean())  # the first keys of a page have no mean to subtract
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("kv_type", QUANTIZED)
def test_writing_a_page_in_parts_gives_the_same_bits(kv_type: str) -> None:
    spec = KVSpec(2, 48)
    k, v = random_cells(40, spec)
    whole = new_sequence([spec], 64, kv_type)
    whole.reserve(0, 40)
    whole.write(0, 0, k, v)
    for step in (1, 3, 7):
        parts = new_sequence([spec], 64, kv_type)
        parts.reserve(0, 40)
        parts.write(0, 5, v[5:30], k[5:30])  # overwritten below
        for start in range(0, 40, step):
            parts.write(0, start, k[start : start + step], v[start : start + step])
        for mine, theirs in zip(parts.read(0, 40), whole.read(0, 40), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_non_finite_numbers_stay_non_finite(kv_type: str, number: float) -> None:
    k, v = random_cells(3)
    k[1, 0, 2] = v[1, 1, 3] = number
    sequence = new_sequence([ONE], 16, kv_type)
    sequence.reserve(0, 3)
    sequence.write(0, 0, k, v)
    keys, values = sequence.read(0, 3)
    assert not np.isfinite(keys[0, :, 1]).all()
    assert not np.isfinite(values[1, 1]).all()
    assert np.isfinite(keys[..., 0]).all()
    assert np.isfinite(values[0]).all()


@pytest.mark.parametrize("kv_type", ["F32", "q9_0", "", None, 7, ("f16",), ("f16", "q9"), ("f16", "f16", "f16")])
def test_unknown_kv_type_is_refused(kv_type: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not one of f32, f16"):
        KVLayout.of([ONE], kv_type)
