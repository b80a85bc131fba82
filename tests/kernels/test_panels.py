"""Matrix products of floats in panels, for several instruction sets."""

import numpy as np
import pytest

from llamacli.kernels import ir, isa, panels
from llamacli.kernels.jit import Kernel
from llamacli.kernels.layout import LINEAR
from llamacli.kernels.packing_formats import ROWS
from llamacli.kernels.register_tiles import tile_of
from llamacli.kernels.registry import packings_for
from llamacli.kernels.team import Team, run_kernel
from llamacli.quantization import TensorType
from llamacli.testing import formulas


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("avx2", "F16"), ("avx512", "BF16"), ("avx512bf16", "BF16")])
def test_product_in_panels(monkeypatch, name, kind):
    """Tokens of several chunks, and each of some alone."""
    if name not in isa.available():
        pytest.skip(f"this CPU has no {name}")
    packing, team, n_out, width, n = packings_for(name)[TensorType[kind]], Team(1), 150, 600, panels.CHUNK + 21
    random = np.random.default_rng(5)
    weight, x = (random.integers(-255, 256, shape).astype(np.float32) / 64 for shape in ((n_out, width), (n, width)))
    raw = weight.astype(np.float16) if kind == "F16" else (weight.view(np.uint32) >> 16).astype(np.uint16)
    rows = (x.view(np.uint32) >> 16).astype(np.uint16) if packing.activation == "bf16_pairs" else x
    packed = np.zeros((-(-n_out // ROWS), width // packing.block, packing.n_bytes), np.uint8)
    bias = random.normal(size=len(packed) * ROWS).astype(np.float32)
    with monkeypatch.context() as patched:
        for module in (ir, panels):
            patched.setattr(module, "isa", lambda: name)
        kernel = Kernel(panels.panel_product(packing, tile_of(packing)), f"_{kind}_{name}")
        kernel.compile()
    columns = raw.reshape(n_out, -1, packing.adjacent)  # packed here, as packing kernels are for the default alone
    filled = np.zeros((len(packed) * ROWS, *columns.shape[1:]), np.uint16)
    filled[:n_out] = columns.view(np.uint16)
    packed.view(np.uint16)[:] = (
        filled.reshape(len(packed), ROWS, -1, packing.adjacent).swapaxes(1, 2).reshape(packed.view(np.uint16).shape)
    )
    results = []
    for part in (range(n), *(range(i, i + 1) for i in (0, 11, 12, 107, 108, n - 1))):
        out = np.full((n, len(packed) * ROWS), 7, np.float32)
        run_kernel(
            team, kernel, LINEAR, first_row=part.start, n_rows=part.stop, weight=packed, tile_bytes=packed[0].nbytes,
            n_tiles=len(packed), n_blocks=packed.shape[1], x=rows, x_stride=rows.strides[0], out=out,
            out_stride=out.strides[0], bias=bias, residual=0, n_groups=1, starts=0,
        )  # fmt: skip
        results.append(out[part])
        np.testing.assert_array_equal(out[part], results[0][part])
    assert formulas.nmse(results[0][:, :n_out], formulas.linear(x, weight) + bias[:n_out]) < 1e-10
    team.close()
