"""Rows of the KV cache in kernels of plugins, bit for bit."""

import functools
from pathlib import Path

import attrs
import numpy as np
import pytest

from llamacli import ArrayFile, Graph, QuantMode, Value
from llamacli.engine import Span
from llamacli.engine.native import NativeEngine
from llamacli.gguf import Metadata
from llamacli.kernels.kv_types.types import KV_TYPES
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.ops.values import Param, Tensor
from llamacli.plugin import CACHE_FIELDS, CacheOp, KeyValues, Lowering, PluginError, Run, f32, record

N_VOCAB, WIDTH = 40, 48
TOKENS = np.random.default_rng(3).integers(0, N_VOCAB, 150).astype(np.int32)
FLOATS = ("f32", "f16", "bf16")

READ = record("out", "out_stride", *CACHE_FIELDS)
PLAIN = record("q", "q_stride", "out", "out_stride", *CACHE_FIELDS, scale=np.float32)


def chosen(first: int, own: int) -> int:
    """Cell whose rows a token reads; neighbours read cells of different pages."""
    return first + 7 * own % (own + 1 - first)


@attrs.frozen(eq=False)
class ReadRows(CacheOp):
    """Key and value of one cell, of each head."""

    n_head_kv: int

    def attend(self, run: Run, i: int, first: int, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        cell = chosen(first, run.start + i) - first
        return np.concatenate([keys[:, cell], values[:, cell]], axis=1).reshape(-1)

    def lower(self, to: Lowering) -> None:
        to.step(read_rows(), READ, **self.cache_params(to, self.n_head_kv), out=f32(self.out))


@functools.cache
def read_rows():
    from llamacli.plugin import cache_kernel, carray, pointer

    def attend(a, row, head, cells, key, value):
        cell, width = cells.first + 7 * cells.own % (cells.own + 1 - cells.first), a.head_dim + a.value_dim
        out = carray(pointer(a.out + row * a.out_stride + 4 * head * width), width, np.float32)
        for source, size, start in ((key(cells, cell), a.head_dim, 0), (value(cells, cell), a.value_dim, a.head_dim)):
            numbers = carray(pointer(source), size, np.float32)
            for i in range(size):
                out[start + i] = numbers[i]

    return cache_kernel("read_rows", READ, attend)


@attrs.frozen(eq=False)
class PlainAttention(CacheOp):
    """Attention as `g.attention` has it, cell by cell.

    Numbers are added up in the order of its kernel.
    """

    q: Value
    n_head: int
    scale: float

    def attend(self, run: Run, i: int, first: int, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        scores = self.scale * run[self.q][i].reshape(len(keys), -1, keys.shape[2]) @ keys.swapaxes(1, 2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights @ values / weights.sum(-1, keepdims=True)).reshape(-1)

    def lower(self, to: Lowering) -> None:
        params = self.cache_params(to, self.n_head, 64 + WIDTH)
        to.step(plain_attention(), PLAIN, **params, q=f32(self.q), out=f32(self.out), scale=self.scale)


@functools.cache
def plain_attention():
    from llamacli.plugin import cache_kernel, simd

    lowest = np.float32(-3.0e38)

    def attend(a, row, head, cells, key, value):
        q, out = a.q + row * a.q_stride + 4 * head * a.head_dim, a.out + row * a.out_stride + 4 * head * a.value_dim
        scores, sums, n_bytes = cells.memory, cells.memory + 256, 4 * a.value_dim
        row_max, row_sum, zero = lowest, np.float32(0), simd.splat(np.float32(0))
        for at in range(0, n_bytes, 64):
            simd.store(sums + at, zero)
        for tile in range(cells.first // 64 * 64, cells.last, 64):
            largest = simd.splat(lowest)
            for i in range(64):
                score = lowest
                if cells.first <= tile + i < cells.last:
                    k, total = key(cells, tile + i), zero
                    for d in range(0, 4 * a.head_dim, 4):
                        one = simd.splat(simd.read_f32(q + d) * a.scale)
                        total = simd.fma(one, simd.splat(simd.read_f32(k + d)), total)
                    score = simd.max_f32(total)
                simd.write_f32(scores + 4 * i, score)
            for at in range(scores, scores + 256, 64):
                largest = simd.maximum(simd.load(at), largest)
            new_max = max(row_max, simd.max_f32(largest))
            total = zero
            for page in range(0, 64, 16):
                at = scores + 4 * page
                p = simd.exp(simd.sub(simd.load(at), simd.splat(new_max)))
                p = simd.first_lanes(p, cells.last - tile - page, zero)
                p = simd.first_lanes(zero, cells.first - tile - page, p)
                simd.store(at, p)
                total = simd.add(total, p)
            if new_max > row_max:
                rescale = simd.exp(simd.splat(row_max - new_max))
                for at in range(sums, sums + n_bytes, 64):
                    simd.store(at, simd.mul(simd.load(at), rescale))
                row_sum *= simd.max_f32(rescale)
                row_max = new_max
            row_sum += simd.sum_f32(total)
            for i in range(max(tile, cells.first), min(tile + 64, cells.last)):
                v, weight = value(cells, i), simd.splat(simd.read_f32(scores + 4 * (i - tile)))
                for at in range(0, n_bytes, 64):
                    simd.store(sums + at, simd.fma(simd.load(v + at), weight, simd.load(sums + at)))
        inverse_sum = np.float32(1) / row_sum
        for at in range(0, n_bytes, 4):
            simd.write_f32(out + at, simd.read_f32(sums + at) * inverse_sum)

    return cache_kernel("plain_attention", PLAIN, attend)


class Cached:
    """Cache of TOKENS with two heads, and an op that reads it.

    `rows` are its result, `stored` the key and value of each head of the cell that `chosen` names.
    """

    def __init__(self, build, kv_type, n_batch=64, n_threads=1, *, head_dim, value_dim=None, latent=False, **options):
        random = np.random.default_rng(5)
        graph, arrays = Graph(), {}

        def matrix(name: str, *shape: int) -> Param:
            arrays[name] = random.normal(0, 0.3, shape).astype(np.float32)
            return Param(Tensor(name, shape))

        x = graph.embed(matrix("token_embd", N_VOCAB, WIDTH))
        k = graph.linear(x, matrix("k", 2 * head_dim, WIDTH))
        v = None if latent else graph.linear(x, matrix("v", 2 * (value_dim or head_dim), WIDTH))
        kv = graph.store(k, v, head_dim=head_dim, value_dim=value_dim, **options)
        graph.scale(build(graph, graph.linear(x, matrix("q", 4 * head_dim, WIDTH)), kv), 1.0)
        file = ArrayFile(Path("m"), Metadata({}), arrays)
        self.program = NativeEngine(n_threads).compile(graph, file, QuantMode.FP32)
        self.sequence = KVSequence(KVPool(KVLayout.of(self.program.states, kv_type)), len(TOKENS))
        self.window, self.chunk = options.get("window", 1000), options.get("chunk", 1000)
        parts = [self.evaluated(start, TOKENS[start : start + n_batch]) for start in range(0, len(TOKENS), n_batch)]
        self.rows, self.stored = (np.concatenate(part) for part in zip(*parts, strict=True))

    def evaluated(self, start: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.sequence.reserve(start, len(tokens))
        rows = self.program.forward(tokens, [Span(self.sequence, start, len(tokens))], [len(tokens)])
        stored = []
        for own in range(start, start + len(tokens)):
            first = max(0, own + 1 - self.window, own // self.chunk * self.chunk)
            stored.append(np.concatenate(self.sequence.read_cell(0, chosen(first, own)), axis=1).reshape(-1))
        self.sequence.commit(tokens.tolist())
        return rows, np.array(stored)


def read(g: Graph, q: Value, kv: KeyValues) -> Value:
    state = kv.state
    return g.record(ReadRows(g.value(state.n_head_kv * (state.head_dim + state.value_dim)), kv.layer, state.n_head_kv))


def plain(g: Graph, q: Value, kv: KeyValues) -> Value:
    return g.record(PlainAttention(g.value(4 * kv.state.value_dim), kv.layer, q, 4, 0.3))


def attention(g: Graph, q: Value, kv: KeyValues) -> Value:
    return g.attention(q, kv, scale=0.3)


@pytest.mark.parametrize("kv_type", [*KV_TYPES, ("q8_0", "f16"), ("f32", "q4_0")], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 32},
        {"head_dim": 40, "value_dim": 24},
        {"head_dim": 8, "window": 21},
        {"head_dim": 48, "value_dim": 20, "latent": True},
    ],
    ids=str,
)
def test_rows_are_those_of_the_sequence(kv_type, options: dict) -> None:
    cached = Cached(read, kv_type, **options)
    np.testing.assert_array_equal(cached.rows, cached.stored)


@pytest.mark.parametrize("kv_type", FLOATS)
@pytest.mark.parametrize(
    "options",
    [{"head_dim": 16}, {"head_dim": 16, "window": 37}, {"head_dim": 32, "value_dim": 48, "chunk": 50}],
    ids=str,
)
def test_plain_attention_equals_that_of_the_core(kv_type: str, options: dict) -> None:
    expected = Cached(attention, kv_type, **options).rows
    assert len(np.unique(expected)) > 1000
    for n_batch, n_threads in ((64, 1), (50, 3), (1, 1)):
        np.testing.assert_array_equal(Cached(plain, kv_type, n_batch, n_threads, **options).rows, expected)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_plain_attention_on_quantized_cells(kv_type: str) -> None:
    """Equal but for 16 bits of queries and weights."""
    expected, actual = (Cached(build, kv_type, head_dim=32).rows for build in (attention, plain))
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())


def test_heads_must_be_in_groups() -> None:
    def three(g: Graph, q: Value, kv: KeyValues) -> Value:
        return g.record(PlainAttention(g.value(3 * kv.state.value_dim), kv.layer, q, 3, 0.3))

    with pytest.raises(PluginError, match="PlainAttention: 3 heads and 2 of the cache do not fit together"):
        Cached(three, "f32", head_dim=16)
