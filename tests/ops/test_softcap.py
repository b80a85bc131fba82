"""Soft bounds."""

import numpy as np

from llamacli.engine import Engine
from verbs import Run


def test_softcap(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.softcap(x, 0.4))
    run.check(0.4 * np.tanh(run.x / 0.4))
