"""xIELU against its formula in float64."""

import numpy as np
import pytest

from llamacli.engine import Engine
from verbs import Run


@pytest.mark.parametrize("factor", [1.0, 100.0])
@pytest.mark.parametrize(("alpha_n", "alpha_p", "beta"), [(0.8, 0.4, 0.5), (-3.0, 25.0, -0.2)])
def test_xielu(alpha_n: float, alpha_p: float, beta: float, factor: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.xielu(g.scale(x, factor), alpha_n, alpha_p, beta, -1e-6))
    x = factor * run.x
    above = np.log1p(np.exp(alpha_p)) * x**2
    below = (np.expm1(np.minimum(x, -1e-6)) - x) * (beta + np.log1p(np.exp(alpha_n)))
    run.check(np.where(x > 0, above, below) + beta * x)
