"""Gates of one number a token."""

import numpy as np

from llamacli.engine import Engine
from verbs import WIDTH, Run


def test_sigmoid_gate(engine: Engine) -> None:
    run = Run(engine, lambda g, param, x: g.sigmoid_gate(x, g.linear(x, param("gate", WIDTH))))
    run.check(run.x / (1 + np.exp(-(run.x @ run["gate"])))[:, None])
