"""Tensors that modes q8 and q4 round: factors of matrix products."""

import numpy as np
import pytest

from llamacli.engine import Engine
from verbs import WIDTH, Run


@pytest.mark.parametrize("mode", ["q8", "q4"])
def test_matrices_of_other_uses_are_kept_exactly(mode: str, engine: Engine) -> None:
    """Check norms of each head and learned positions.

    They have two dimensions, but are not factors of a matrix product.
    """

    def build(g, param, x):
        return g.rms_norm(g.positions(param("positions", 64, WIDTH)), param("norm", 4, 16), 1e-6, 16)

    rounded, exact = (Run(engine, build, mode=name, output=False).logits for name in (mode, "fp32"))
    np.testing.assert_array_equal(rounded, exact)


@pytest.mark.parametrize("mode", ["q8", "q4"])
def test_matrices_of_products_are_rounded(mode: str, engine: Engine) -> None:
    def build(g, param, x):
        return g.linear(g.positions(param("positions", 64, WIDTH)), param("w", WIDTH, WIDTH))

    rounded, exact = (Run(engine, build, mode=name, output=False).logits for name in (mode, "fp32"))
    assert (rounded != exact).any()
