"""Batched matrix product: a matrix a head, in every tensor type."""

from pathlib import Path

import numpy as np
import pytest

import gguf
from llamacli import Graph, QuantMode, Value
from llamacli.engine import Engine, default_engine
from llamacli.errors import PluginError
from llamacli.graph import Param, Tensor
from llamacli.loaders import open_model_file
from llamacli.testing import formulas
from llamacli.testing.models import random_tensor, write_gguf
from suite import slow_but
from verbs import TOKENS, WIDTH, Params, Run, span


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("n_head", "n_out"), [(1, 24), (2, 64), (2, 7), (4, 40), (16, 3), (64, 1)])
def test_batched_linear(n_head: int, n_out: int, bias: bool, engine: Engine) -> None:
    n_in = WIDTH // n_head
    run = Run(engine, lambda g, param, x: g.batched_linear(x, param("heads", n_head, n_out, n_in, bias=bias)))
    heads = run.x.reshape(len(run.x), n_head, n_in)
    expected = np.einsum("nhi,hoi->nho", heads, run["heads"])
    if bias:
        expected = expected + run["heads.bias"]
    run.check(expected.reshape(len(run.x), -1))


@pytest.mark.parametrize("mode", ["q8", "q4"])
def test_modes_round_heads_by_themselves(mode: str, engine: Engine) -> None:
    """Heads of 24 numbers do not share blocks of activations."""

    def build(g: Graph, param: Params, x: Value) -> Value:
        return g.batched_linear(g.linear(x, param("x", 72, WIDTH)), param("heads", 3, 40, 24))

    exact, rounded = (Run(engine, build, mode=name) for name in ("fp32", mode))
    assert 1e-7 < formulas.nmse(rounded.logits, exact.logits) < {"q8": 1e-3, "q4": 0.1}[mode]


QUICK = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"]


@pytest.mark.parametrize("kind", slow_but(QUICK, [*QUICK, "Q5_0", "Q2_K", "Q3_K", "Q5_K"]))
def test_tensor_types(kind: str, tmp_path: Path) -> None:
    n_head, n_out, n_in = 3, 48, 256
    shapes = {"token_embd.weight": (20, n_head * n_in), "heads.weight": (n_head, n_out, n_in)}
    tensors = {
        name: random_tensor("heads", name, shape, kind if name == "heads.weight" else "F32")
        for name, shape in shapes.items()
    }
    write_gguf(tmp_path / "m.gguf", "test", {}, tensors)
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", shapes["token_embd.weight"])))
    graph.batched_linear(x, Param(Tensor("heads.weight", shapes["heads.weight"])))
    program = default_engine().compile(graph, open_model_file(tmp_path / "m.gguf", []), QuantMode.AUTO)
    found = program.forward(np.array(TOKENS, np.int32), [span(program, len(TOKENS))], [len(TOKENS)])
    embeddings, heads = (gguf.quants.dequantize(*tensor).astype(np.float64) for tensor in tensors.values())
    expected = np.einsum("nhi,hoi->nho", embeddings[TOKENS].reshape(len(TOKENS), n_head, n_in), heads)
    assert formulas.nmse(found, expected.reshape(len(TOKENS), -1)) < (1e-12 if kind == "F32" else 1e-4)


def test_operands_that_do_not_fit() -> None:
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (20, 64))))
    for shape in ((4, 8, 20), (64, 64), (3, 8, 16)):
        with pytest.raises(PluginError, match="batched_linear"):
            graph.batched_linear(x, Param(Tensor("heads.weight", shape)))
