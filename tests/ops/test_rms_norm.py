"""Root-mean-square norm, of the width and of heads."""

import pytest

from llamacli.engine import Engine
from llamacli.testing import formulas
from verbs import WIDTH, Run


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps: float, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.rms_norm(x, param("norm", WIDTH), eps))
    run.check(formulas.rms_norm(run.x, run["norm"], eps))


@pytest.mark.parametrize("head_dim", [8, 16, 32])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_of_heads(head_dim: int, weighted: bool, engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.rms_norm(x, param("norm", head_dim) if weighted else None, 1e-6, head_dim))
    heads = run.x.reshape(len(run.x), -1, head_dim)
    run.check(formulas.rms_norm(heads, run["norm"] if weighted else 1.0, 1e-6).reshape(run.x.shape))
