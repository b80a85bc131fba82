"""Products of integer weights by AMX, against simulated tiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import example_formats
from llamacli.kernels import isa, prompt_tiles
from llamacli.kernels.layout import LINEAR
from llamacli.kernels.linear import tiled_linear
from llamacli.kernels.packing import pack
from llamacli.kernels.packing_formats import ROWS
from llamacli.kernels.registry import integer_kinds, packing_of
from llamacli.kernels.team import Team, run_kernel
from llamacli.ops.linear import nearest_bf16, tiled_product
from llamacli.quantization import FORMATS, TensorType, dequantize, nbytes
from suite import examples

pytestmark = pytest.mark.skipif(isa.isa() != "amx", reason="the instruction set in use has no tiles")

QUICK = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "Q2_K")
ADDED = [fmt for fmt in example_formats.FORMATS if fmt.packing]
EXACT = [TensorType[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_1", "IQ4_NL")]
"""Types whose decoding to float32 rounds at most once."""
KINDS = [
    pytest.param(kind, id=kind.name, marks=() if kind.name in QUICK else pytest.mark.slow)
    for kind in (*integer_kinds(), *(fmt.type for fmt in ADDED))
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


def random_rows(kind, n_rows: int, n_columns: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes of a type and their values, neither huge nor subnormal."""
    raw = random.integers(0, 256, (n_rows, nbytes(kind, (n_columns,))), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = dequantize(raw, kind).reshape(n_rows, -1, packing_of(kind).block)
        size = np.abs(values)
        usable = ((size < 100) & ((size == 0) | (size > 1e-30))).all(axis=-1)
    raw.reshape(n_rows, usable.shape[1], -1)[~usable] = 0
    return raw, dequantize(raw, kind)


def multiply(team: Team, kind, raw: np.ndarray, x: np.ndarray, **given: np.ndarray) -> np.ndarray:
    """Product of the kernel; x has numbers of bfloat16."""
    packing, (n, width) = packing_of(kind), x.shape
    packed = np.full((-(-len(raw) // ROWS), width // packing.block, packing.n_bytes), 99, np.uint8)
    pack(team, kind, raw, packed, width)
    pairs = (x.view(np.uint32) >> 16).astype(np.uint16)
    out = np.full((n, len(packed) * ROWS), 7, np.float32)
    zeros = np.zeros(len(packed) * ROWS, np.float32)
    run_kernel(
        team, tiled_linear(kind), LINEAR, n_rows=n, weight=packed, tile_bytes=packed[0].nbytes, n_tiles=len(packed),
        n_blocks=packed.shape[1], x=pairs, x_stride=pairs.strides[0], out=out, out_stride=out.strides[0],
        **{"bias": zeros, "residual": 0, "n_groups": 1, "starts": 0, **given},
    )  # fmt: skip
    return out


def decoded(team: Team, kind, raw: np.ndarray, width: int) -> np.ndarray:
    """Weights as tiles multiply them: products with each column's unit vector."""
    return multiply(team, kind, raw, np.eye(width, dtype=np.float32))[:, : len(raw)].T.copy()


def nearest_away(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties away from 0."""
    return ((x.astype(np.float32).view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@examples(8)
@given(data=st.data())
def test_products_have_the_bits_of_simulated_tiles(team, kind, data):
    """Any numbers of tokens, rows and columns."""
    block, random = packing_of(kind).block, np.random.default_rng(data.draw(st.integers(0, 99)))
    n, n_out = data.draw(st.sampled_from([1, 3, 16, 17, 32, 33, 49])), data.draw(st.sampled_from([1, 16, 40, 300]))
    width = max(block, data.draw(st.sampled_from([32, 256, 768])))
    raw, values = random_rows(kind, n_out, width, random)
    x = nearest_bf16(random.normal(size=(n, width)))
    weight = decoded(team, kind, raw, width)
    np.testing.assert_allclose(weight, values, rtol=2**-8, atol=1e-5 * np.abs(values).max())
    bias, residual = random.normal(size=(2, n, -(-n_out // ROWS) * ROWS)).astype(np.float32)
    out = multiply(team, kind, raw, x, bias=bias[0], residual=residual)
    np.testing.assert_array_equal(
        out[:, :n_out], (residual[:, :n_out] + (tiled_product(x, weight) + bias[0, :n_out])).astype(np.float32)
    )


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_weights_are_the_nearest_bfloat16(team, kind):
    raw, values = random_rows(kind, 40, 256, np.random.default_rng(3))
    np.testing.assert_array_equal(decoded(team, kind, raw, 256), nearest_away(values))


def test_a_token_does_not_depend_on_the_others(team):
    """Nor on its place, in more tokens than a chunk has."""
    random = np.random.default_rng(5)
    raw, _ = random_rows(TensorType.Q4_K, 24, 512, random)
    x = nearest_bf16(random.normal(size=(prompt_tiles.CHUNK + 35, 512)))
    whole = multiply(team, TensorType.Q4_K, raw, x)
    for first, last in ((0, 1), (15, 17), (500, 530), (len(x) - 1, len(x))):
        np.testing.assert_array_equal(multiply(team, TensorType.Q4_K, raw, x[first:last]), whole[first:last])


@pytest.mark.parametrize("by_rows", [True, False])
def test_several_matrices(team, by_rows):
    """Each for some rows, or for a part of each row."""
    random, n, width = np.random.default_rng(7), 70, 256
    raw, _ = random_rows(TensorType.Q8_0, 3 * 32, width, random)
    parts, starts = np.split(raw, 3), np.array([0, 0, 33, n])
    x = nearest_bf16(random.normal(size=(n, width if by_rows else 3 * width)))
    packing = packing_of(TensorType.Q8_0)
    packed = np.full((3, 2, width // packing.block, packing.n_bytes), 99, np.uint8)
    for part, target in zip(parts, packed, strict=True):
        pack(team, TensorType.Q8_0, part, target, width)
    pairs, out = (x.view(np.uint32) >> 16).astype(np.uint16), np.full((n, 32 if by_rows else 96), 7, np.float32)
    first_row = 0 if by_rows else 5
    run_kernel(
        team, tiled_linear(TensorType.Q8_0), LINEAR, n_rows=n, first_row=first_row, weight=packed,
        tile_bytes=packed[0, 0].nbytes, n_tiles=2, n_blocks=packed.shape[2], x=pairs, x_stride=pairs.strides[0],
        out=out, out_stride=out.strides[0], bias=np.zeros((3, 32), np.float32), bias_stride=128, residual=0,
        n_groups=3, starts=starts if by_rows else 0, x_group=0 if by_rows else 2 * width,
        out_group=0 if by_rows else 128,
    )  # fmt: skip
    for i, part in enumerate(parts):
        rows = slice(starts[i], starts[i + 1]) if by_rows else slice(first_row, n)
        columns = lanes = slice(None)
        if not by_rows:
            columns, lanes = slice(width * i, width * (i + 1)), slice(32 * i, 32 * i + 32)
        weight = decoded(team, TensorType.Q8_0, part, width)
        np.testing.assert_array_equal(out[rows, lanes], tiled_product(x[rows, columns], weight))
    assert (out[:first_row] == 7).all()
