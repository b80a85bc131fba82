"""Graphs of encoder-decoder models: cells of both parts, cross attention, positions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from llamacli import ArrayFile, Graph, PluginError, QuantMode, Value
from llamacli.architecture import Architecture, Config, trace
from llamacli.engine import Engine, Program, Span
from llamacli.gguf import Metadata
from llamacli.graph import Param, Tensor
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.tensor_table import TensorTable, Weights
from llamacli.testing import formulas

N_VOCAB, WIDTH, HEAD = 20, 64, 16
RANDOM = np.random.default_rng(7)
ARRAYS = {name: RANDOM.normal(0, 0.3, (N_VOCAB, WIDTH)).astype(np.float32) for name in ("table", "positions")}
ARRAYS |= {name: RANDOM.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32) for name in ("k", "v", "q", "own", "out")}
TEXTS = [[3, 11, 0, 19, 7, 7, 2, 16, 5, 1, 9, 14, 18, 4, 12, 8, 6], [10], [5, 1, 9, 14] * 9]
TOKENS = [4, 18, 0, 2, 13, 6, 6, 19, 5]


def param(name: str) -> Param:
    return Param(Tensor(name, ARRAYS[name].shape))


def record(g: Graph, *, windows: int | None = None) -> Value:
    text = g.embed(param("table"))
    cells = g.store(g.linear(text, param("k")), g.linear(text, param("v")), head_dim=HEAD)
    g.decoder()
    x = g.embed(param("table")) + g.positions(param("positions"))
    own = g.store(g.linear(x, param("own")), x, head_dim=HEAD, into=cells if windows is None else None, window=windows)
    x = g.attention(g.linear(x, param("q")), own, scale=0.3)
    x = x + g.attention(x, cells, scale=0.2, cross=True)
    return g.linear(x, param("out"))


def expected(text: list[int], tokens: list[int], windows: int | None = None) -> np.ndarray:
    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1, HEAD)

    encoded = ARRAYS["table"][text].astype(np.float64)
    k, v = (heads(formulas.linear(encoded, ARRAYS[name])) for name in ("k", "v"))
    x = ARRAYS["table"][tokens].astype(np.float64) + ARRAYS["positions"][: len(tokens)]
    q, keys = (heads(formulas.linear(x, ARRAYS[name])) for name in ("q", "own"))
    x = formulas.attention(q, keys, heads(x), 0.3, window=windows).reshape(len(x), -1)
    rows = [formulas.attention(heads(row[None]), k, v, 0.2).reshape(-1) for row in x]  # each behind the whole text
    return formulas.linear(x + np.array(rows), ARRAYS["out"])


@pytest.fixture
def compile_graph(engine: Engine) -> Callable[..., Program]:
    def compile_graph(**options: Any) -> Program:
        record(graph := Graph(), **options)
        return engine.compile(graph, ArrayFile(Path("m"), Metadata({}), ARRAYS), QuantMode.FP32)

    return compile_graph


def encoded(program: Program, texts: list[list[int]]) -> list[KVSequence]:
    """Sequences with the cells of their texts, and room for TOKENS."""
    pool = KVPool(KVLayout.of(program.states, "f32"))
    sequences = [KVSequence(pool, len(text) + len(TOKENS)) for text in texts]
    spans = [Span(one, 0, len(text), n_encoded=len(text)) for one, text in zip(sequences, texts, strict=True)]
    for one in spans:
        one.sequence.reserve(0, one.n + len(TOKENS))
    assert len(program.forward(np.concatenate(texts).astype(np.int32), spans, [0] * len(spans))) == 0
    return sequences


@pytest.mark.parametrize("windows", [None, 3])
def test_the_decoder_reads_the_text_and_its_own_tokens(windows: int | None, compile_graph: Any) -> None:
    program = compile_graph(windows=windows)
    assert program.has_encoder
    sequences, n = encoded(program, TEXTS), len(TOKENS)
    spans = [Span(one, len(text), n, n_encoded=len(text)) for one, text in zip(sequences, TEXTS, strict=True)]
    whole = program.forward(np.array(TOKENS * len(TEXTS), np.int32), spans, [n] * len(TEXTS))
    for i, text in enumerate(TEXTS):
        assert formulas.nmse(whole[i * n : (i + 1) * n], expected(text, TOKENS, windows)) < 1e-12
    again = encoded(program, TEXTS)
    for i, token in enumerate(TOKENS):
        spans = [Span(one, len(text) + i, 1, n_encoded=len(text)) for one, text in zip(again, TEXTS, strict=True)]
        rows = program.forward(np.array([token] * len(TEXTS), np.int32), spans, [1] * len(TEXTS))
        np.testing.assert_array_equal(rows, whole[i::n])


def test_a_boundary_needs_an_encoder() -> None:
    g = Graph()
    g.embed(param("table"))
    with pytest.raises(PluginError, match="decoder: a decoder and an encoder that stores nothing"):
        g.decoder()
    record(g)
    with pytest.raises(PluginError, match="decoder: one decoder and another"):
        g.decoder()


def test_windows_and_cross_attention() -> None:
    g = Graph()
    x = g.embed(param("table"))
    cells = g.store(x, x, head_dim=HEAD, window=4)
    with pytest.raises(PluginError, match="attention: window 4, chunk None and cross attention"):
        g.attention(x, cells, scale=1.0, cross=True)


class Written(Architecture):
    """Architecture whose forward pass a test gives."""

    name = "written"

    def __init__(self, forward: Callable[[Graph], Value]):
        self._forward = forward

    def configure(self, metadata: Metadata) -> Config:
        raise NotImplementedError

    def tensors(self, config: Config) -> TensorTable:
        raise NotImplementedError

    def forward(self, g: Graph, config: Config, weights: Weights) -> Value:
        return self._forward(g)


CONFIG = Config(
    architecture="written", n_vocab=WIDTH, context_length=64, n_embd=WIDTH, n_layer=1, n_head=4, n_head_kv=4,
    head_dim=HEAD, n_ff=1, decoder_start=0,
)  # fmt: skip


def reads_a_value_of_the_encoder(g: Graph) -> Value:
    text = g.embed(param("table"))
    cells = g.store(text, text, head_dim=HEAD)
    g.decoder()
    return g.linear(g.attention(text, cells, scale=1.0, cross=True), param("out"))


def has_a_recurrent_state(g: Graph) -> Value:
    g.recurrent_state("state", 4)
    return record(g)


@pytest.mark.parametrize(
    ("forward", "config", "message"),
    [
        (reads_a_value_of_the_encoder, CONFIG, "the decoder reads a value of the encoder, not its store"),
        (has_a_recurrent_state, CONFIG, "an encoder needs decoder_start, and no recurrent state"),
        (record, attrs.evolve(CONFIG, decoder_start=None), "an encoder needs decoder_start"),
    ],
)
def test_forward_passes_that_cannot_be(forward: Callable[[Graph], Value], config: Config, message: str) -> None:
    with pytest.raises(PluginError, match=f"forward of 'written'.*{message}"):
        trace(Written(forward), config, Weights({}, []))


def test_the_decoder_alone_decides_if_a_graph_takes_its_input_whole() -> None:
    g = Graph()
    x = g.embed(param("table"))
    cells = g.store(x, x, head_dim=HEAD)
    x = g.attention(x, cells, scale=1.0, causal=False)
    g.store(x, x, head_dim=HEAD, into=cells)
    assert g.needs_whole_input
    g.decoder()
    g.linear(g.attention(g.embed(param("table")), cells, scale=1.0, cross=True), param("out"))
    assert not g.needs_whole_input
    assert g.n_encoder == 5
