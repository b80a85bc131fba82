"""Ops without a kernel: execution in NumPy, cost, errors."""

import logging
from pathlib import Path

import numpy as np
import pytest

import llamacli_l2
import tiny_llama
from llamacli import ArrayFile, Config, Graph, Model, PluginError, QuantMode, load_model
from llamacli.engine import ReferenceEngine, Span, default_engine
from llamacli.engine.native import NativeEngine
from llamacli.generation.stream import eval_batch
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.plugins import ARCHITECTURES, EntryPoint, Plugins
from llamacli_l2.l2_norm import L2Norm

TOKENS = [(7 * i + 3) % 128 for i in range(40)]


@pytest.fixture(scope="module")
def outside() -> Plugins:
    return Plugins([EntryPoint(name, "llamacli_l2", ARCHITECTURES) for name in ("l2llama", "slowl2llama")])


KEYS = {
    "context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "vocab_size": 128,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def write(path: Path, architecture: str) -> Path:
    """Write a model of the outside plugin, with random tensors."""
    keys = {f"{architecture}.{key}": value for key, value in KEYS.items()}
    config = Config.from_gguf(Metadata({"general.architecture": architecture} | keys))
    table = llamacli_l2.L2Llama().tensors(config)
    shapes = {name: spec.shape for name, spec in table.items() if not spec.optional}
    return tiny_llama.write_model(path, architecture, keys, shapes, seed="l2")


@pytest.fixture
def load(tmp_path, outside):
    def load(architecture: str = "slowl2llama", mode: str = "fp32", engine=None) -> Model:
        path = write(tmp_path / f"{architecture}.gguf", architecture)
        return load_model(path, mode, plugins=outside, engine=engine or NativeEngine())

    return load


def logits(model: Model, tokens=TOKENS) -> np.ndarray:
    with model.create_session() as session:
        return session.eval(tokens, all_logits=True)


@pytest.mark.parametrize("mode", ["fp32", "q8"])
def test_with_and_without_a_kernel_the_model_is_the_same(load, mode) -> None:
    fast, slow = logits(load("l2llama", mode)), logits(load("slowl2llama", mode))
    assert np.abs(fast - slow).max() <= 2e-5 * np.abs(slow).max()
    reference = logits(load("slowl2llama", "fp32", ReferenceEngine()))
    assert np.abs(reference - logits(load("l2llama"))).max() <= 2e-5 * np.abs(reference).max()


def test_results_do_not_depend_on_batches(load) -> None:
    model = load()
    whole = logits(model)
    with model.create_session() as session:
        pieces = [session.eval(TOKENS[start : start + 7], all_logits=True) for start in range(0, 40, 7)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    sessions = [model.create_session() for _ in range(3)]
    eval_batch([(session, TOKENS[: 10 * (i + 1)]) for i, session in enumerate(sessions)])
    for i, session in enumerate(sessions):
        np.testing.assert_array_equal(session.logits, whole[10 * (i + 1) - 1])


def test_cost_is_logged_once_and_counted(load, caplog, request) -> None:
    if request.config.pluginmanager.hasplugin("llamacli.testing.guarded"):
        pytest.skip("guarded programs are compiled for each batch size")
    caplog.set_level(logging.WARNING, "llamacli.engine.native")
    model = load()
    with model.create_session() as session:
        session.eval(TOKENS)
        session.eval([5])
    messages = [record.getMessage() for record in caplog.records if "no kernel" in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith("verb SlowL2Norm of llamacli_l2: no kernel, so NumPy computes it: ")
    timings = model.program.timings
    assert timings.host.keys() == {f"verb SlowL2Norm of llamacli_l2, in layer {i}" for i in (0, 1)}
    assert 0 < sum(timings.host.values()) < timings.total
    assert not load("l2llama").program.timings.host


def broken(result, broken_now: list[bool]):
    """The op with another result."""

    def compute(self, run):
        if run.start >= 40 and broken_now:  # a prompt of 40 tokens goes well
            return result(L2Norm.compute(self, run))
        return L2Norm.compute(self, run)

    return compute


def with_nan(out: np.ndarray) -> np.ndarray:
    out[0, 5] = np.nan
    return out


def raising(out: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError("no such luck")


@pytest.mark.parametrize("engine", [ReferenceEngine, default_engine])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda out: out[:, :-1], r"compute returned shape \(1, 63\), expected \(1, 64\)"),
        (lambda out: out[0], r"compute returned shape \(64,\), expected \(1, 64\)"),
        (with_nan, r"compute returned nan in row 0, column 5"),
        (raising, r"ZeroDivisionError: no such luck"),
        (lambda out: "text", r"compute returned an array of <U4, expected real numbers"),
    ],
)
def test_broken_op_is_named_and_session_is_unchanged(load, monkeypatch, engine, result, message) -> None:
    broken_now = [True]
    monkeypatch.setattr(llamacli_l2.SlowL2Norm, "compute", broken(result, broken_now))
    model = load(engine=engine())
    with model.create_session() as session:
        session.eval(TOKENS)
        before, tokens = session.logits.copy(), session.tokens
        with pytest.raises(PluginError, match=rf"verb SlowL2Norm of llamacli_l2, in layer 0.*{message}"):
            session.eval([5])
        assert session.tokens == tokens
        np.testing.assert_array_equal(session.logits, before)
        broken_now.clear()
        session.eval([5])
        after = session.logits.copy()
    np.testing.assert_array_equal(logits(model, [*TOKENS, 5])[-1], after)


@pytest.mark.parametrize("last", [False, True])
def test_ops_behind_the_last_attention_of_several_sequences(last: bool) -> None:
    """Only wanted rows are computed there, and any between them."""
    random = np.random.default_rng(2)
    arrays = {"token_embd.weight": random.normal(0, 1, (20, 32)), "output.weight": random.normal(0, 1, (24, 32))}
    graph = Graph()
    x = graph.embed(Param(Tensor("token_embd.weight", (20, 32))))
    x = graph.attention(x, graph.store(x, x, head_dim=16), scale=0.3) + x
    x = llamacli_l2.slow_l2_norm(graph, x, 8, 1e-6)
    if not last:
        graph.linear(x, Param(Tensor("output.weight", (24, 32))))
    file = ArrayFile(Path("m"), Metadata({}), {name: array.astype(np.float32) for name, array in arrays.items()})
    program = NativeEngine(2).compile(graph, file, QuantMode.FP32)
    pool = KVPool(KVLayout.of(program.states, "f32"))

    def rows(lengths: list[int], *, all_logits: bool) -> np.ndarray:
        spans = [Span(KVSequence(pool, 32), 0, n) for n in lengths]
        for span in spans:
            span.sequence.reserve(0, span.n)
        tokens = np.concatenate([np.arange(n) + 3 for n in lengths]).astype(np.int32)
        return program.forward(tokens, spans, lengths if all_logits else [1] * len(lengths))

    whole = rows([9], all_logits=True)
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(rows([5, 9, 2], all_logits=False), whole[[4, 8, 1]])
    np.testing.assert_array_equal(rows([9], all_logits=False), whole[[8]])
    np.testing.assert_array_equal(rows([2, 3], all_logits=True), whole[[0, 1, 0, 1, 2]])
