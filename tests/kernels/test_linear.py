"""Packed formats of core and plugins: exact layout, products against NumPy."""

from enum import IntEnum
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import example_formats
import gguf
from example_formats import Added
from gguf import GGMLQuantizationType
from llamacli.kernels.activation_rounding import FORMS, ROUND, round_activations
from llamacli.kernels.embedding import look_up
from llamacli.kernels.layout import ACTIVATION, BLOCK_BYTES, FLOAT_FORMS, INTEGER_FORMS, LINEAR, PAIR_FORMS, START
from llamacli.kernels.linear import linear
from llamacli.kernels.packing import pack
from llamacli.kernels.packing_formats import ROWS
from llamacli.kernels.registry import packing_of, packings
from llamacli.kernels.team import Team, run_kernel
from llamacli.quantization import FORMATS, TensorType, block_size, dequantize, nbytes, type_size
from llamacli.testing import formulas
from suite import examples

ADDED = [fmt for fmt in example_formats.FORMATS if fmt.packing]

LEFT_TO_SLOW = (
    "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q8_K", "IQ4_XS", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "TQ1_0", "TQ2_0", "Q2_0",
)  # fmt: skip
"""Types like others of GGML that are tested quickly; each takes seconds to compile."""

KINDS = [
    pytest.param(kind, id=kind.name, marks=pytest.mark.slow if kind.name in LEFT_TO_SLOW else ())
    for kind in (*packings(), *(fmt.type for fmt in ADDED))
]


@pytest.fixture(scope="module", autouse=True)
def added_formats():
    FORMATS.update({fmt.type: fmt for fmt in ADDED})
    yield
    for fmt in ADDED:
        del FORMATS[fmt.type]


@pytest.fixture(scope="module", params=[1, 2])
def team(request):
    team = Team(request.param)
    yield team
    team.close()


def random_rows(kind: IntEnum, n_rows: int, n_columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes of a type and their values, without huge numbers."""
    block = packing_of(kind).block
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (n_rows, nbytes(kind, (n_columns,))), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = dequantize(raw, kind).reshape(n_rows, -1, block)
        usable = (np.abs(values) < 100).all(axis=-1)
    raw.reshape(n_rows, usable.shape[1], -1)[~usable] = 0
    return raw, dequantize(raw, kind)


def quantize_rows(x: np.ndarray, width: int, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Activations rounded to integers [n, blocks, 32] with scales [n, blocks].

    `width` numbers share a scale. As in ggml's Q8_0, the largest magnitude becomes 127 and the scale is rounded to
    float16; if `signed`, as in Q8_K, it becomes -127 and the scale stays float32.
    """
    units = x.astype(np.float32).reshape(len(x), -1, width)
    extreme = np.take_along_axis(units, np.abs(units).argmax(-1)[..., None], -1)
    target = np.float32(127)
    if signed:
        target = np.float32(-127)
    else:
        extreme = np.abs(extreme)
    usable = np.abs(extreme) > 1e-30
    inverse = np.divide(target, extreme, out=np.zeros_like(extreme), where=usable)
    if signed:
        scale = np.divide(np.float32(1), inverse, out=np.zeros_like(extreme), where=usable)
    else:
        scale = (extreme / target).astype(np.float16).astype(np.float32)
    q = np.rint(units * inverse).reshape(len(x), -1, 32)
    return q, np.repeat(scale[..., 0], width // 32, axis=1)


def packed_rows(team: Team, kind: IntEnum, raw: np.ndarray, n_columns: int) -> np.ndarray:
    packing = packing_of(kind)
    shape = (-(-len(raw) // ROWS), -(-n_columns // packing.block), packing.n_bytes)
    packed = np.full(shape, 99, np.uint8)
    pack(team, kind, raw, packed, n_columns)
    return packed


def multiply(team, kind, raw, n_out, x, *, bias=None, residual=None, first_row=0):
    """Product computed by the kernel, and the rounded activations that it used."""
    packing = packing_of(kind)
    n, width = x.shape
    packed = packed_rows(team, kind, raw, width)
    rows = np.pad(x, ((0, 0), (0, -width % 32)))
    used = x
    if packing.activation != "f32":
        rows = rounded(team, packing.activation, rows)
        used = floats(rows, packing.activation)[:, :width]
    out = np.full((n, packed.shape[0] * ROWS), 7, np.float32)
    biases = np.zeros(out.shape[1], np.float32)
    biases[:n_out] = 0 if bias is None else bias
    sums = None if residual is None else np.pad(residual, ((0, 0), (0, -n_out % ROWS)))
    run_kernel(
        team, linear(kind), LINEAR, n_rows=n, first_row=first_row, weight=packed, tile_bytes=packed[0].nbytes,
        n_tiles=len(packed), n_blocks=packed.shape[1], x=rows, x_stride=rows.strides[0], out=out,
        out_stride=out.strides[0], bias=biases, residual=0 if sums is None else sums, n_groups=1, starts=0,
    )  # fmt: skip
    return out[:, :n_out], used


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_rows", [pytest.param(48, marks=pytest.mark.slow), 35])
def test_unpacked_weights_equal_dequantized(team, kind, n_rows):
    raw, values = random_rows(kind, n_rows, 512, seed=1)
    packed = packed_rows(team, kind, raw, 512)
    rows = np.array([0, n_rows - 1, 17, 17, 3])
    np.testing.assert_array_equal(look_up(team, kind, packed, rows).view(np.uint32), values[rows].view(np.uint32))
    if n_rows % ROWS:
        assert not look_up(team, kind, packed, np.arange(n_rows, len(packed) * ROWS)).any()


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.F16, TensorType.BF16])
def test_float_weights_of_any_width(team, kind):
    raw, values = random_rows(kind, 16, 32, seed=4)
    size = raw.shape[1] // 32
    packed = packed_rows(team, kind, raw[:, : 10 * size], 10)
    unpacked = look_up(team, kind, packed, np.arange(16))
    np.testing.assert_array_equal(unpacked[:, :10], values[:, :10])
    assert not unpacked[:, 10:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 37, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 16))])
def test_product(team, kind, n):
    raw, weight = random_rows(kind, 52, 512, seed=n)
    x = np.random.default_rng(n).normal(size=(n, 512)).astype(np.float32)
    result, used = multiply(team, kind, raw, 52, x)
    assert formulas.nmse(result, formulas.linear(used, weight)) < 1e-10


HALF_ONE, ONE = np.float16(1).tobytes(), np.float32(1).tobytes()
HIGH, LOW = b"\xff", b"\0"

LARGEST = {
    "Q8_0": (HALF_ONE + b"\x80" * 32, HALF_ONE + b"\x7f" * 32),
    "Q4_0": (HALF_ONE + LOW * 16, HALF_ONE + HIGH * 16),
    "Q4_1": (HALF_ONE + LOW * 2 + HIGH * 16, HALF_ONE + LOW * 18),
    "IQ4_NL": (HALF_ONE + LOW * 16, HALF_ONE + HIGH * 16),
    "Q2_K": (HIGH * 80 + HALF_ONE + LOW * 2, HIGH * 16 + LOW * 64 + HALF_ONE * 2),
    "TQ2_0": (HIGH * 64 + HALF_ONE, LOW * 64 + HALF_ONE),
    "Q8_K": (ONE + b"\x80" * 256 + LOW * 32, ONE + b"\x7f" * 256 + LOW * 32),
}
"""Blocks of the largest codes and scales, and a factor of 1."""


@pytest.mark.parametrize("n", [1, 2, 12])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in LEFT_TO_SLOW else ()) for kind in LARGEST]
)
def test_sums_of_the_largest_integers_are_exact(team, kind, n):
    """The product of a block of scale 1 is rounded once."""
    raw, kind = np.array([list(block) for block in LARGEST[kind]], np.uint8), TensorType[kind]
    packing = packing_of(kind)
    columns = np.arange(packing.block)
    x = np.where(columns % n < n - 1, 1, -1).astype(np.float32) * np.ones((n, 1), np.float32)
    result, used = multiply(team, kind, raw, 2, x)
    scale = np.abs(used).max()
    integers = np.rint(used / scale * 127) @ dequantize(raw, kind).T
    rounded_scale = (np.float16 if packing.activation == "q8_0" else np.float32)(1 / 127)
    np.testing.assert_array_equal(result, (integers * np.float64(rounded_scale)).astype(np.float32))


def test_blocks_of_128_in_widths_that_256_does_not_divide(team):
    raw, weight = random_rows(Added.Q4_A, 20, 384, seed=6)
    x = np.random.default_rng(6).normal(size=(5, 384)).astype(np.float32) * np.geomspace(1, 1e3, 384, dtype=np.float32)
    result, used = multiply(team, Added.Q4_A, raw, 20, x)
    assert formulas.nmse(result, formulas.linear(used, weight)) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_neighbours(team, kind):
    raw, _ = random_rows(kind, 16, 256, seed=0)
    x = np.random.default_rng(0).normal(size=(23, 256)).astype(np.float32)
    together, _ = multiply(team, kind, raw, 16, x)
    for i in range(len(x)):
        alone, _ = multiply(team, kind, raw, 16, x[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.parametrize(
    "number",
    [lambda group: 7 - group, pytest.param(lambda group: group % 4, marks=pytest.mark.slow)],
    ids=["reversed", "repeated"],
)
def test_groups_use_fields_in_any_order(team, monkeypatch, request, number):
    """Code that loops over groups would read the next numbers."""
    kind = TensorType.Q4_K
    usual = packing_of(kind)
    changed = attrs.evolve(
        usual, name=request.node.callspec.id, terms=lambda f, group: usual.terms(f, number(group))
    )  # fmt: skip
    monkeypatch.setattr("llamacli.kernels.linear.packing_of", lambda kind: changed)
    raw, _ = random_rows(kind, 16, 256, seed=0)
    x = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    together, _ = multiply(team, kind, raw, 16, x)
    for i in range(len(x)):
        alone, _ = multiply(team, kind, raw, 16, x[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.F16, TensorType.BF16])
def test_rows_of_several_chunks_and_panels(team, kind):
    """A token alone has the bits that it has among others."""
    n, n_out, width = 277, 150, 1120
    raw, weight = random_rows(kind, n_out, width, seed=7)
    random = np.random.default_rng(7)
    x, residual = (random.normal(size=shape).astype(np.float32) for shape in ((n, width), (n, n_out)))
    bias = random.normal(size=n_out).astype(np.float32)
    together, used = multiply(team, kind, raw, n_out, x, bias=bias, residual=residual)
    assert formulas.nmse(together, formulas.linear(used, weight) + bias + residual) < 1e-10
    for i in (0, 15, 16, 143, 191, 192, 255, 256, n - 1):
        alone, _ = multiply(team, kind, raw, n_out, x[i : i + 1], bias=bias, residual=residual[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])


def test_every_scale_of_mxfp4(team):
    """Compare products of each scale, but for those near the largest float."""
    raw = np.random.default_rng(8).integers(0, 256, (253, 17), dtype=np.uint8)
    raw[:, 0] = np.arange(253)
    values = gguf.quants.dequantize(raw, GGMLQuantizationType.MXFP4)
    packed = packed_rows(team, TensorType.MXFP4, raw, 32)
    unpacked = look_up(team, TensorType.MXFP4, packed, np.arange(253))
    np.testing.assert_array_equal(unpacked.view(np.uint32), values.view(np.uint32))
    x = np.random.default_rng(9).normal(0, 1e6, (5, 32)).astype(np.float32)
    result, used = multiply(team, TensorType.MXFP4, raw[:220], 220, x)
    np.testing.assert_allclose(result, formulas.linear(used, values[:220]), rtol=1e-4)


def test_every_scale_of_nvfp4(team):
    raw = np.random.default_rng(8).integers(0, 256, (256, 36), dtype=np.uint8)
    raw[:, :4] = np.arange(256)[:, None] ^ [[0, 1, 127, 255]]
    values = gguf.quants.dequantize(raw, GGMLQuantizationType.NVFP4)
    packed = packed_rows(team, TensorType.NVFP4, raw, 64)
    unpacked = look_up(team, TensorType.NVFP4, packed, np.arange(256))
    np.testing.assert_array_equal(unpacked.view(np.uint32), values.view(np.uint32))
    x = np.random.default_rng(9).normal(size=(5, 64)).astype(np.float32)
    result, used = multiply(team, TensorType.NVFP4, raw, 256, x)
    expected = formulas.linear(used, values)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_every_index_of_a_grid(team, kind):
    """Random bytes of so many rows have each index."""
    raw, values = random_rows(TensorType[kind], 1040, 256, seed=5)
    packed = packed_rows(team, TensorType[kind], raw, 256)
    unpacked = look_up(team, TensorType[kind], packed, np.arange(1040))
    np.testing.assert_array_equal(unpacked.view(np.uint32), values.view(np.uint32))


BITS = {
    "Q8_K": 8.125, "NVFP4": 4.5, "IQ3_S": 4.1875, "IQ3_XXS": 4.1875, "IQ2_S": 3.3125, "IQ2_XS": 3.3125,
    "IQ2_XXS": 3.1875, "IQ1_M": 2.4375, "IQ1_S": 2.1875, "Q2_0": 2.25, "TQ2_0": 2.0625, "TQ1_0": 2.0625, "Q1_0": 1.125,
}  # fmt: skip
"""Bits a weight in memory, as docs/quantization.md lists them."""


@pytest.mark.parametrize("kind", BITS)
def test_packed_size(kind):
    packing = packing_of(TensorType[kind])
    assert 8 * packing.n_bytes / (ROWS * packing.block) == BITS[kind]
    page = (Path(__file__).resolve().parents[2] / "docs" / "quantization.md").read_text()
    file = 8 * type_size(TensorType[kind]) / block_size(TensorType[kind])
    assert f"| {kind} | {float(f'{file:.2f}')} | {float(f'{BITS[kind]:.2f}')} |" in page


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.Q8_0])
def test_bias_residual_and_first_row(team, kind):
    raw, weight = random_rows(kind, 20, 64, seed=2)
    random = np.random.default_rng(2)
    x, residual = random.normal(size=(6, 64)).astype(np.float32), random.normal(size=(6, 20)).astype(np.float32)
    bias = random.normal(size=20).astype(np.float32)
    result, used = multiply(team, kind, raw, 20, x, bias=bias, residual=residual, first_row=4)
    assert formulas.nmse(result[4:], (formulas.linear(used, weight) + bias + residual)[4:]) < 1e-10
    assert (result[:4] == 7).all()


QUICK = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "IQ1_M", "NVFP4", "Q1_0")


@examples(40)
@given(
    kind=st.sampled_from([TensorType[name] for name in QUICK]),
    n=st.integers(1, 70),
    n_out=st.integers(1, 40),
    n_blocks=st.integers(1, 5),
    magnitude=st.sampled_from([0.0, 1e-40, 1e-20, 1.0, 1e10]),
    seed=st.integers(0, 2**32 - 1),
)
def test_product_of_odd_shapes_and_magnitudes(team, kind, n, n_out, n_blocks, magnitude, seed):
    check_product(team, kind, n, n_out, n_blocks, magnitude, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TensorType[name] for name in LEFT_TO_SLOW], ids=lambda kind: kind.name)
@examples(10)
@given(n=st.integers(1, 40), n_out=st.integers(1, 40), n_blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_product_of_odd_shapes_of_small_types(team, kind, n, n_out, n_blocks, seed):
    check_product(team, kind, n, n_out, n_blocks, 1.0, seed)


def check_product(team, kind, n, n_out, n_blocks, magnitude, seed):
    width = n_blocks * max(32, packing_of(kind).block)
    raw, weight = random_rows(kind, n_out, width, seed)
    x = (np.random.default_rng(seed).normal(size=(n, width)) * magnitude).astype(np.float32)
    result, used = multiply(team, kind, raw, n_out, x)
    expected = formulas.linear(used, weight)
    floor = 1e-37  # products of subnormal numbers lose digits
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max() + floor)


def strided(rows: np.ndarray, before: int, after: int) -> np.ndarray:
    """Copy of rows with other bytes before and behind each."""
    memory = np.full((len(rows), before + rows[0].nbytes + after), 0x7F, np.uint8)
    memory[:, before : before + rows[0].nbytes] = rows.reshape(len(rows), -1).view(np.uint8)
    return memory[:, before:]


@pytest.mark.parametrize("kind", KINDS)
@examples(15)
@given(data=st.data())
def test_products_of_random_shapes_strides_and_groups(team, kind, data):
    """Several matrices, each for some rows or for a part of each."""
    draw, packing = data.draw, packing_of(kind)
    n, n_out, n_groups = draw(st.integers(1, 40)), draw(st.integers(1, 50)), draw(st.integers(1, 3))
    width, first_row = draw(st.integers(1, 3)) * max(32, packing.block), draw(st.integers(0, n - 1))
    by_rows, with_residual = draw(st.booleans()), draw(st.booleans())
    before, after = (4 * draw(st.integers(0, 20)) for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    raw, weight = random_rows(kind, n_groups * n_out, width, int(random.integers(1 << 30)))
    packed = np.stack([packed_rows(team, kind, part, width) for part in np.split(raw, n_groups)])
    weights, lanes = np.split(weight, n_groups), packed.shape[1] * ROWS
    n_parts = 1 if by_rows else n_groups
    x = random.normal(size=(n, n_parts * width)).astype(np.float32) * 10.0 ** random.integers(-3, 4, (n, 1))
    rows = used = x.astype(np.float32)
    if packing.activation != "f32":
        rows = rounded(team, packing.activation, rows)
        used = floats(rows, packing.activation)
    given_x, out = strided(rows, before, after), strided(np.full((n, n_parts * lanes), 7, np.float32), after, before)
    bias = random.normal(size=(n_groups, lanes + 16)).astype(np.float32)
    residual = random.normal(size=(n, n_parts * lanes)).astype(np.float32)
    sums = strided(residual, after, before)
    starts = np.sort(random.integers(0, n + 1, n_groups + 1))
    run_kernel(
        team, linear(kind), LINEAR, n_rows=n, first_row=first_row, weight=packed, tile_bytes=packed[0, 0].nbytes,
        n_tiles=packed.shape[1], n_blocks=packed.shape[2], x=given_x, x_stride=given_x.strides[0], out=out,
        out_stride=out.strides[0], bias=bias, bias_stride=bias.strides[0], residual=sums if with_residual else 0,
        n_groups=n_groups, starts=starts if by_rows else 0, x_group=0 if by_rows else rows[0].nbytes // n_groups,
        out_group=0 if by_rows else 4 * lanes,
    )  # fmt: skip
    expected = np.full((n, n_parts, lanes), 7.0)
    summed = np.zeros_like(expected)  # magnitudes, whose sum bounds the error
    for group in range(n_groups):
        part = slice(starts[group], starts[group + 1]) if by_rows else slice(first_row, n)
        column = 0 if by_rows else group
        columns = used.reshape(n, n_parts, -1)[part, column]
        expected[part, column] = bias[group, :lanes]
        expected[part, column, :n_out] += formulas.linear(columns, weights[group])
        summed[part, column, :n_out] = formulas.linear(np.abs(columns), np.abs(weights[group]))
        if with_residual:
            expected[part, column] += residual.reshape(n, n_parts, lanes)[part, column]
    result = np.ascontiguousarray(out[:, : 4 * n_parts * lanes]).view(np.float32).reshape(expected.shape)
    assert (np.abs(result - expected) <= 1e-5 * (summed + np.abs(expected) + 1)).all()
    assert (out[:, 4 * n_parts * lanes :] == 0x7F).all()


@pytest.mark.parametrize("kind", KINDS)
@examples(15)
@given(data=st.data())
def test_packed_rows_of_random_shapes(team, kind, data):
    """Rows that fill no whole tile; whatever bytes they have."""
    n_rows, block = data.draw(st.integers(1, 50)), packing_of(kind).block
    n_columns = block * data.draw(st.integers(1, 3))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    raw = random.integers(0, 256, (n_rows, nbytes(kind, (n_columns,))), dtype=np.uint8)
    if data.draw(st.booleans()):
        raw[random.random(raw.shape) < 0.7] = data.draw(st.sampled_from([0, 0x7C, 0x7F, 0xFF]))
    packed = np.full((-(-n_rows // ROWS), n_columns // block, packing_of(kind).n_bytes), 99, np.uint8)
    is_finite = pack(team, kind, raw, packed, n_columns)
    with np.errstate(all="ignore"):
        values, unpacked = dequantize(raw, kind), look_up(team, kind, packed, np.arange(len(packed) * ROWS))
    if kind not in (TensorType.MXFP4, TensorType.Q8_K):  # whose scales reach 2^127
        assert np.isfinite(values).all() or not is_finite
    np.testing.assert_array_equal(unpacked[:n_rows], values)
    assert not unpacked[n_rows:].any()


def rounded(team: Team, form: str, x: np.ndarray, by_row: int = 0) -> np.ndarray:
    out = blank(form, len(x), x.shape[1])
    run_kernel(
        team, round_activations(form), ROUND, n_rows=len(x), x=x, x_stride=x.strides[0], out=out,
        out_stride=out.strides[0], width=x.shape[1], by_row=by_row, slots=0,
    )  # fmt: skip
    return out


def blank(form: str, n: int, width: int) -> np.ndarray:
    """Memory for activations of a form, zeros."""
    if form in INTEGER_FORMS:
        return np.zeros((n, width // 32), ACTIVATION)
    return (
        np.zeros((n, width * BLOCK_BYTES[form] // 64), np.uint16) if form in PAIR_FORMS else np.zeros((n, width), "f")
    )


def floats(activations: np.ndarray, form: str) -> np.ndarray:
    if form in FLOAT_FORMS:
        return activations
    if form in PAIR_FORMS:
        parts = (activations.astype(np.uint32) << 16).view(np.float32)
        return parts.reshape(len(parts), -1, BLOCK_BYTES[form] // 64, 32).sum(axis=2).reshape(len(parts), -1)
    return (activations["q"] * activations["scale"][..., None]).reshape(len(activations), -1)


@pytest.mark.parametrize("by_row", [0, 1])
@pytest.mark.parametrize(("form", "width"), [("q8_0", 32), ("q8_K", 256)])
def test_activations_rounded_to_integers(team, form, width, by_row):
    x = np.random.default_rng(3).normal(size=(5, 768)).astype(np.float32)
    x[1], x[2, :256], x[3, 300] = 0, 1e-44, -9
    blocks = rounded(team, form, x, by_row)
    q, scale = quantize_rows(x, width, signed=form == "q8_K")
    np.testing.assert_array_equal(blocks["q"], q)
    np.testing.assert_array_equal(blocks["scale"], scale)
    np.testing.assert_array_equal(blocks["start"], START - 128 * blocks["q"].astype(int).sum(-1))
    np.testing.assert_array_equal(blocks["sum"], blocks["q"].astype(int).sum(-1))
    np.testing.assert_array_equal(blocks["start_half"], START - 128 * blocks["q"][..., :16].astype(int).sum(-1))


SPECIAL = np.float32([0, -0.0, 1e-45, -1e-40, 1e-30, 1, -127, 65504, 65520, -1e9, 3e38])


@pytest.mark.parametrize("form", FORMS)
@examples(25)
@given(data=st.data())
def test_activations_of_random_shapes_and_strides(team, form, data):
    """Rows of blocks; some of their numbers at the edges of formats."""
    unit, draw = FORMS[form].width, data.draw
    n, n_units, slots = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    first_row = draw(st.integers(0, n - 1))
    n_all = (n - first_row) * slots or n
    first = 0 if slots else first_row
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = (random.normal(size=(n_all, n_units * unit)) * 10.0 ** random.integers(-3, 4, (n_all, 1))).astype(np.float32)
    chosen = random.random(x.shape) < draw(st.sampled_from([0.0, 0.05, 1.0]))
    x[chosen] = random.choice(SPECIAL, chosen.sum())
    zeros = blank(form, n_all, x.shape[1])
    before, after = (4 * draw(st.integers(0, 20)) for _ in range(2))
    rows, out = strided(x, before, after), strided(zeros, after, before)
    run_kernel(
        team, round_activations(form), ROUND, n_rows=n, first_row=first_row, x=rows, x_stride=rows.strides[0], out=out,
        out_stride=out.strides[0], width=x.shape[1], by_row=draw(st.integers(0, 1)), slots=slots,
    )  # fmt: skip
    n_bytes = zeros[0].nbytes
    found = np.ascontiguousarray(out[:, :n_bytes]).view(zeros.dtype)
    assert (out[:, n_bytes:] == 0x7F).all()
    assert not np.ascontiguousarray(out[:first, :n_bytes]).any()
    if form in INTEGER_FORMS:
        with np.errstate(over="ignore"):
            q, scale = quantize_rows(x[first:], unit, signed=form == "q8_K")
        unbounded = np.abs(x[first:]).reshape(len(q), -1, unit).max(-1).repeat(unit // 32, axis=1) >= 127 * 65504
        np.testing.assert_array_equal(found["q"][first:], q)
        np.testing.assert_array_equal(found["scale"][first:][~unbounded], scale[~unbounded])
        assert np.isfinite(found["scale"]).all()
        np.testing.assert_array_equal(found["start"][first:], START - 128 * q.sum(-1))
        np.testing.assert_array_equal(found["sum"][first:], q.sum(-1))
        np.testing.assert_array_equal(found["start_half"][first:], START - 128 * q[..., :16].sum(-1))
    elif form in ("f16", "f16_split"):
        found = floats(found[first:], form)
        np.testing.assert_array_equal(found, np.clip(x[first:], -65504, 65504).astype(np.float16))
    else:
        kind, found = GGMLQuantizationType.BF16, floats(found[first:], form)
        np.testing.assert_array_equal(found, gguf.quants.dequantize(gguf.quants.quantize(x[first:], kind), kind))


def test_activations_rounded_to_short_floats(team):
    x = np.random.default_rng(4).normal(size=(3, 64)).astype(np.float32)
    x[0, :4] = 0, -0.0, 1 + 2**-9, 1 + 3 * 2**-9  # the last two lie between bfloat16 numbers: ties go to even
    np.testing.assert_array_equal(rounded(team, "f16", x), x.astype(np.float16).astype(np.float32))
    large = np.tile(np.array([[1e9, -1e9]], np.float32), (1, 16))
    np.testing.assert_array_equal(rounded(team, "f16", large), np.sign(large) * 65504)
    expected = gguf.quants.dequantize(gguf.quants.quantize(x, GGMLQuantizationType.BF16), GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(rounded(team, "bf16", x), expected)
