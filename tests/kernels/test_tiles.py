"""Matrix products by AMX: bits of its tiles, and permission."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacli.kernels import isa
from llamacli.kernels.layout import BLOCK_BYTES, LINEAR
from llamacli.kernels.linear import linear
from llamacli.kernels.packing import pack
from llamacli.kernels.packing_formats import ROWS
from llamacli.kernels.registry import packing_of
from llamacli.kernels.team import Team, run_kernel
from llamacli.quantization import TensorType
from suite import examples

has_amx = pytest.mark.skipif(isa.isa() != "amx", reason="the instruction set in use has no tiles")


@pytest.fixture(scope="module")
def team():
    team = Team(1)
    yield team
    team.close()


def numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of at most 8 bits; float64 holds sums of products exactly."""
    return (random.integers(-255, 256, shape) * 2.0 ** random.integers(-9, -2, shape)).astype(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def halves(x: np.ndarray) -> list[np.ndarray]:
    """Larger and smaller parts of float16, each a bfloat16."""
    large = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return [large, x - large]


def simulated(parts: list[tuple[np.ndarray, np.ndarray]], n: int, n_out: int) -> np.ndarray:
    """Sums of products of tiles, as Intel's manual defines TDPBF16PS.

    `parts` are pairs of weights [n_out, n_blocks, 32] and activations [n, n_blocks, 32], multiplied in their order.
    """
    total = np.zeros((n, n_out), np.float32)
    for block in range(parts[0][0].shape[1]):
        for weight, x in parts:
            sums = np.zeros((2, n, n_out), np.float32)
            for column in range(32):
                product = x[:, None, block, column].astype(np.float64) * weight[None, :, block, column]
                sums[column % 2] = (sums[column % 2] + product).astype(np.float32)
            total += sums[0] + sums[1]
    return total


@has_amx
@pytest.mark.parametrize("kind", [TensorType.BF16, TensorType.F16], ids=lambda kind: kind.name)
@examples(12)
@given(data=st.data())
def test_products_have_the_bits_of_simulated_tiles(team, kind, data):
    """Any numbers of tokens, rows and blocks."""
    n, n_out = data.draw(st.sampled_from([1, 3, 16, 17, 40])), data.draw(st.integers(1, 90))
    n_blocks, random = data.draw(st.sampled_from([1, 2, 3, 33])), np.random.default_rng(data.draw(st.integers(0, 99)))
    weight, x = numbers(random, n_out, n_blocks, 32), numbers(random, n, n_blocks, 32)
    if kind == TensorType.F16:  # numbers of 11 bits
        weight, x = (
            (part * random.integers(1, 8, part.shape)).astype(np.float16).astype(np.float32) for part in (weight, x)
        )
        raw, given_x = weight.astype(np.float16), np.stack([bfloat16(part) for part in halves(x)], axis=2)
        parts = [(w, v) for w in halves(weight) for v in halves(x)]
    else:
        raw, given_x, parts = bfloat16(weight), bfloat16(x), [(weight, x)]
    packing = packing_of(kind)
    assert given_x[0].nbytes == n_blocks * BLOCK_BYTES[packing.activation]
    packed = np.full((-(-n_out // ROWS), n_blocks, packing.n_bytes), 99, np.uint8)
    pack(team, kind, raw.reshape(n_out, -1).view(np.uint8), packed, 32 * n_blocks)
    out, bias = np.full((n, len(packed) * ROWS), 7, np.float32), np.zeros(len(packed) * ROWS, np.float32)
    run_kernel(
        team, linear(kind), LINEAR, n_rows=n, weight=packed, tile_bytes=packed[0].nbytes, n_tiles=len(packed),
        n_blocks=n_blocks, x=given_x, x_stride=given_x.strides[0], out=out, out_stride=out.strides[0], bias=bias,
        residual=0, n_groups=1, starts=0,
    )  # fmt: skip
    np.testing.assert_array_equal(out[:, :n_out], simulated(parts, n, n_out))


@pytest.mark.skipif(sys.platform != "linux", reason="the permission is one of Linux")
@pytest.mark.parametrize("permitted", [True, False])
def test_tiles_are_used_where_the_system_permits_them(monkeypatch, permitted):
    monkeypatch.setattr(isa, "features", lambda: isa._NEEDS["amx"])
    monkeypatch.setattr(isa, "host", lambda: ("", "sapphirerapids", ""))
    monkeypatch.setattr(isa, "_tiles_permitted", lambda: permitted)
    assert isa.available() == ("generic", "avx2", "avx512bf16", "avx512", *(["amx"] if permitted else []))


@pytest.mark.parametrize(("cpu", "best"), [("znver5", "avx512bf16"), ("cooperlake", "avx512")])
def test_dot_products_of_bfloat16_are_used_where_they_are_fast(monkeypatch, cpu, best):
    monkeypatch.setattr(isa, "features", lambda: isa._NEEDS["avx512bf16"])
    monkeypatch.setattr(isa, "host", lambda: ("", cpu, ""))
    assert isa.available()[-1] == best
    assert {"avx512", "avx512bf16"} <= set(isa.available())
