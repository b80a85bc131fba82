"""Importance matrices, compared with squares of the ops' values in NumPy."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from llamacli import InvalidRequestError, load_model
from llamacli.engine.native import NativeEngine
from llamacli.gguf import open_gguf
from llamacli.graph import Tensor
from llamacli.ops.linear import Linear
from llamacli.ops.moe import MoE
from llamacli.tools.importance import Collector, collect, importance_matrix, number_of_chunks
from llamacli.tools.op_values import Recorded
from oracle import importance as oracle

GOLDEN = json.loads(oracle.PATH.read_text())
TOKENS = np.random.RandomState(3).randint(3, 128, 100).tolist()
N_CTX = 32


def measured(path: Path, plugins, tokens=TOKENS, *, mode: str = "fp32", output: bool = False, max_chunks=None):
    """The importance matrix of a file."""
    collector = Collector(output=output)
    with load_model(path, mode, plugins=plugins, engine=NativeEngine(2, collector)) as model:
        *_, n_chunks = collect(model, tokens, n_ctx=N_CTX, max_chunks=max_chunks)
    with open_gguf(path) as file:
        return importance_matrix(
            path.with_suffix(".imatrix"), collector, file.tensors, dataset="t", n_chunks=n_chunks, n_ctx=N_CTX
        )


def expected(path: Path, plugins, n_chunks: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums of squares and counts by tensor, from values in NumPy."""
    recorded = Recorded.of(path, plugins)
    sums: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for chunk in range(n_chunks):
        ids = TOKENS[chunk * N_CTX : (chunk + 1) * N_CTX]
        values = {value.op.number: value.rows.astype(np.float64) for value in recorded.values(ids)}
        numbers = {op.out: i for i, op in enumerate(recorded.graph.ops)}

        def add(name: str, group: int, n_groups: int, x: np.ndarray) -> None:
            total, counts = sums.setdefault(name, (np.zeros((n_groups, x.shape[1])), np.zeros(n_groups)))
            total[group] += (x**2).sum(axis=0)
            counts[group] += len(x)

        for op in recorded.graph.ops:
            if isinstance(op, Linear) and not op.weight.first_row:
                add(op.weight.name, 0, 1, values[numbers[op.x]])
            elif isinstance(op, MoE):
                x, router, n_expert = values[numbers[op.x]], values[numbers[op.router]], op.up.weight.shape[0]
                chosen = [op.routing.choose(logits, None)[0] for logits in router]
                for e in range(n_expert):
                    rows = x[[e in row for row in chosen]]
                    gate, up = (rows @ recorded.file.tensor(part.weight.name)[e].T for part in (op.gate, op.up))
                    hidden = gate / (1 + np.exp(-gate)) * up
                    for part, inputs in ((op.gate, rows), (op.up, rows), (op.down, hidden)):
                        add(part.weight.name, e, n_expert, inputs)
    return {name: found for name, found in sums.items() if name.startswith("blk.")}


@pytest.mark.parametrize("variant", ["gqa", "moe_4_1"])
def test_sums_match_numpy(tiny_gguf, plugins, variant: str) -> None:
    path = tiny_gguf(variant)
    matrix, theirs = measured(path, plugins), expected(path, plugins, len(TOKENS) // N_CTX)
    assert matrix.entries.keys() == theirs.keys()
    for name, (sums, counts) in theirs.items():
        np.testing.assert_array_equal(matrix.entries[name].counts, counts)
        np.testing.assert_allclose(matrix.entries[name].sums, sums, rtol=1e-4, atol=1e-8, err_msg=name)
    assert (matrix.chunk_count, matrix.chunk_size, matrix.datasets) == (3, N_CTX, ["t"])
    with open_gguf(path) as file:
        for name in matrix.entries:
            weights = matrix.weights(file.tensors[name])
            assert weights is not None
            assert weights.shape == (math.prod(file.tensors[name].shape[:-2]), file.tensors[name].shape[-1])


def test_output_matrix_is_measured_on_request(tiny_gguf, plugins) -> None:
    path = tiny_gguf()
    assert "output.weight" not in measured(path, plugins, max_chunks=1).entries
    entry = measured(path, plugins, max_chunks=1, output=True).entries["output.weight"]
    assert entry.counts.tolist() == [N_CTX]


def test_chunks_begin_with_bos(tiny_gguf, plugins) -> None:
    path = tiny_gguf(tokenizer="spm")
    with load_model(path, "fp32", plugins=plugins) as model:
        bos = model.tokenizer.bos_id
    replaced = [bos if i % N_CTX == 0 else token for i, token in enumerate(TOKENS)]
    given, ours = measured(path, plugins), measured(path, plugins, replaced)
    for name, entry in ours.entries.items():
        np.testing.assert_array_equal(given.entries[name].sums, entry.sums)


def test_rounded_activations_hardly_matter(tiny_gguf, plugins) -> None:
    path = tiny_gguf("q8_0")
    exact, rounded = (measured(path, plugins, mode=mode) for mode in ("fp32", "auto"))
    for name, entry in exact.entries.items():
        np.testing.assert_allclose(rounded.entries[name].means, entry.means, rtol=0.1, atol=0.05 * entry.means.mean())


def test_parts_of_a_fused_tensor_count_once() -> None:
    collector, x = Collector(), np.ones((4, 8), np.float32)
    for first in (0, 6):
        collector(Tensor("blk.0.attn_qkv.weight", (6, 8), first), x, None)
    found = collector.entries({"blk.0.attn_qkv.weight": type("Info", (), {"shape": (12, 8)})})
    assert found["blk.0.attn_qkv.weight"].counts.tolist() == [4]
    assert found["blk.0.attn_qkv.weight"].sums.tolist() == [[4.0] * 8]


def test_heads_have_their_own_sums_without_padding() -> None:
    collector, x = Collector(), np.zeros((3, 2, 32), np.float32)
    x[:, 0, :5], x[:, 1, :5] = 1, 2
    collector(Tensor("blk.0.attn_k_b.weight", (2, 7, 5)), x.reshape(3, 64), None)
    found = collector.entries({"blk.0.attn_k_b.weight": type("Info", (), {"shape": (2, 7, 5)})})
    assert found["blk.0.attn_k_b.weight"].sums.tolist() == [[3.0] * 5 + [12.0] * 5]
    assert found["blk.0.attn_k_b.weight"].counts.tolist() == [3]


def test_short_texts_and_contexts_are_refused(tiny_gguf, plugins) -> None:
    with load_model(tiny_gguf(), "fp32", plugins=plugins) as model:
        with pytest.raises(InvalidRequestError, match="the text has 100 tokens, and a chunk has 128"):
            collect(model, TOKENS, n_ctx=128)
        with pytest.raises(InvalidRequestError, match="n_ctx must be an integer of at least 16, not 8"):
            collect(model, TOKENS, n_ctx=8)
    assert number_of_chunks(TOKENS, 32) == 3
    assert number_of_chunks(TOKENS, 32, 2) == 2


def test_inputs_that_are_not_finite_are_named() -> None:
    collector = Collector()
    collector(Tensor("blk.0.ffn_up.weight", (6, 8)), np.full((1, 8), np.inf, np.float32), None)
    infos = {"blk.0.ffn_up.weight": type("Info", (), {"shape": (6, 8)})}
    with pytest.raises(InvalidRequestError, match=r"inputs of 'blk.0.ffn_up.weight' are not finite"):
        importance_matrix(Path("x"), collector, infos, dataset="t", n_chunks=1, n_ctx=16)


@pytest.mark.parametrize("variant", oracle.VARIANTS)
def test_sums_match_llama_cpp(tiny_gguf, plugins, variant: str) -> None:
    found = measured(tiny_gguf(variant), plugins, oracle.TOKENS).entries
    for name, golden in GOLDEN[variant].items():
        assert found[name].counts.tolist() == golden["counts"]
        theirs = np.array(golden["squares"])
        np.testing.assert_allclose(oracle.summary(found[name].sums), theirs, rtol=2e-3, atol=1e-6, err_msg=name)
