"""Hyper-connections: gates of residual streams, and manifold-constrained ones (mHC).

Residual streams lie side by side. A branch reads their weighted sum; its result is added to each. In mHC, the streams
are mixed by a matrix that is doubly stochastic: its rows and columns sum to 1 (DeepSeek-AI 2025, arXiv:2512.24880).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import attrs
import numpy as np

from llamacli.plugin import (
    RUN,
    Array,
    Graph,
    Lanewise,
    Lowering,
    MakeParam,
    Metadata,
    Op,
    Param,
    Params,
    Recorder,
    Run,
    Tensor,
    TensorTable,
    Value,
    Vocabulary,
    expect,
    f32,
    record,
)

if TYPE_CHECKING:
    from llamacli.plugin import Kernel

WEIGH = record("x", "x_stride", "out", "out_stride", "base", "scale", "n", "n_times", eps=np.float32)
MIX = record("x", "x_stride", "weights", "weights_stride", "out", "out_stride", "n_in", "n_out", "width")


@attrs.frozen(eq=False)
class StreamWeights(Op):
    """Weights of n streams, made of x * scale + base.

    Of its n (n + 2) numbers, n pass through sigmoid, n through 2 * sigmoid, and (n, n) through Sinkhorn's iterations.

    `out` has the n weights of the sum, then for each stream the weight of the branch and those of the n streams.
    """

    x: Value
    base: Tensor
    scale: Tensor
    n: int
    n_times: int
    eps: float

    def compute(self, run: Run) -> Array:
        n, eps = self.n, self.eps
        x = run[self.x] * np.repeat(run[self.scale], [n, n, n * n]) + run[self.base]
        gates, mixed = 1 / (1 + np.exp(-x[:, : 2 * n])), x[:, 2 * n :].reshape(-1, n, n)
        mixed = np.exp(mixed - mixed.max(axis=2, keepdims=True))
        mixed = mixed / mixed.sum(axis=2, keepdims=True) + eps
        mixed /= mixed.sum(axis=1, keepdims=True) + eps
        for _ in range(self.n_times - 1):
            mixed /= mixed.sum(axis=2, keepdims=True) + eps
            mixed /= mixed.sum(axis=1, keepdims=True) + eps
        rows = np.concatenate([2 * gates[:, n:, None], mixed.swapaxes(1, 2)], axis=2)
        return np.hstack([gates[:, :n] + eps, rows.reshape(len(x), -1)])

    def lower(self, to: Lowering) -> None:
        to.step(
            weigh_kernel(), WEIGH, x=f32(self.x), out=f32(self.out), base=to.vector(self.base),
            scale=to.vector(self.scale), n=self.n, n_times=self.n_times, eps=self.eps,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        for n, n_times in ((2, 1), (4, 3)):
            names = (("fn", (n * (n + 2), x.width)), ("base", (n * (n + 2),)), ("scale", (3,)))
            fn, base, scale = (param(f"{name}_{n}", *shape) for name, shape in names)
            yield stream_weights(g, g.linear(x, fn), base, scale, n, n_times, 1e-3)  # type: ignore[attr-defined]


@functools.cache
def weigh_kernel() -> Kernel:
    """Compiled kernel; a row is a unit of work."""
    from llamacli.plugin import Kernel, carray, pointer, share

    def weigh_streams(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, WEIGH)[0], carray(pointer(run), 1, RUN)[0]
        n, one = a.n, np.float32(1)
        base, scale = carray(pointer(a.base), n * (n + 2), np.float32), carray(pointer(a.scale), 3, np.float32)
        first, last = share(r.n_rows - r.first_row, thread, n_threads)
        for row in range(r.first_row + first, r.first_row + last):
            x = carray(pointer(a.x + row * a.x_stride), n * (n + 2), np.float32)
            out = carray(pointer(a.out + row * a.out_stride), n * (n + 2), np.float32)
            for i in range(n):
                out[i] = one / (one + np.exp(-(x[i] * scale[0] + base[i]))) + a.eps
                gate = one / (one + np.exp(-(x[n + i] * scale[1] + base[n + i])))
                out[n + i * (n + 1)] = np.float32(2) * gate
            # Weight of stream s in stream t: number n + t * (n + 1) + 1 + s.
            for s in range(n):
                top = np.float32(-np.inf)
                for t in range(n):
                    at = 2 * n + s * n + t
                    top = max(top, x[at] * scale[2] + base[at])
                total = np.float32(0)
                for t in range(n):
                    at = 2 * n + s * n + t
                    weight = np.exp(x[at] * scale[2] + base[at] - top)
                    out[n + t * (n + 1) + 1 + s] = weight
                    total += weight
                for t in range(n):
                    at = n + t * (n + 1) + 1 + s
                    out[at] = out[at] / total + a.eps
            for i in range(2 * a.n_times - 1):  # columns first, which lie one behind the other, then rows
                step, apart = (n + 1, 1) if i % 2 else (1, n + 1)
                for line in range(n):
                    begin, total = n + 1 + line * apart, a.eps
                    for j in range(n):
                        total += out[begin + j * step]
                    for j in range(n):
                        out[begin + j * step] /= total

    return Kernel(weigh_streams)


@attrs.frozen(eq=False)
class MixStreams(Op):
    """out[i] = sum(weights[i, j] * x[j]) over heads of `width` numbers."""

    x: Value
    weights: Value
    width: int

    def compute(self, run: Run) -> Array:
        heads = run[self.x].reshape(run.n, -1, self.width)
        weights = run[self.weights].reshape(run.n, -1, heads.shape[1])
        return np.einsum("nij,njd->nid", weights, heads).reshape(run.n, -1)

    def lower(self, to: Lowering) -> None:
        n_in, n_out = self.x.width // self.width, self.out.width // self.width
        to.step(
            mix_kernel(), MIX, x=f32(self.x), weights=f32(self.weights), out=f32(self.out), n_in=n_in, n_out=n_out,
            width=self.width,
        )  # fmt: skip

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        for n_out in (1, 3):
            weights = g.linear(x, param(f"weights_{n_out}", 2 * n_out, x.width))  # type: ignore[attr-defined]
            yield mix_streams(g, x, weights, x.width // 2)


@functools.cache
def mix_kernel() -> Kernel:
    """Compiled kernel; a head of the result is a unit of work."""
    from llamacli.plugin import Kernel, carray, pointer, share

    def mix_streams(args: int, run: int, thread: int, n_threads: int) -> None:
        a, r = carray(pointer(args), 1, MIX)[0], carray(pointer(run), 1, RUN)[0]
        first, last = share((r.n_rows - r.first_row) * a.n_out, thread, n_threads)
        for unit in range(first, last):
            row, head = r.first_row + unit // a.n_out, unit % a.n_out
            x = carray(pointer(a.x + row * a.x_stride), a.n_in * a.width, np.float32)
            weights = carray(pointer(a.weights + row * a.weights_stride), a.n_out * a.n_in, np.float32)
            out = carray(pointer(a.out + row * a.out_stride + 4 * head * a.width), a.width, np.float32)
            for d in range(a.width):
                out[d] = weights[head * a.n_in] * x[d]
            for j in range(1, a.n_in):
                weight = weights[head * a.n_in + j]
                for d in range(a.width):
                    out[d] += weight * x[j * a.width + d]

    return Kernel(mix_streams)


def stream_weights(g: Recorder, x: Value, base: Param, scale: Param, n: int, n_times: int, eps: float) -> Value:
    """Weights of the sum of n streams, and behind a branch."""
    fits = x.width == n * (n + 2) == base.weight.shape[0] and scale.weight.shape == (3,) and n_times > 0
    expect("stream_weights", fits, f"{n} streams, {n_times} times, on width {x.width}")
    return g.record(StreamWeights(g.value(x.width), x, base.weight, scale.weight, n, n_times, eps))


def mix_streams(g: Recorder, x: Value, weights: Value, width: int) -> Value:
    """Weighted sums of heads of x: a matrix a token."""
    n_out, rest = divmod(weights.width * width, x.width)
    expect("mix_streams", not rest and x.width % width == 0, f"{weights.width} weights and width {x.width} by {width}")
    return g.record(MixStreams(g.value(n_out * width), x, weights, width))


@attrs.frozen(eq=False)
class StreamGate(Lanewise):
    """out = magnitude * sigmoid(x) + eps."""

    x: Value
    magnitude: float
    eps: float

    def formula(self, v: Vocabulary, x: Any, magnitude: Any, eps: Any) -> Any:
        return magnitude * v.sigmoid(x) + eps

    @classmethod
    def examples(cls, g: Recorder, x: Value, param: MakeParam) -> Iterator[Value]:
        yield stream_gate(g, x, 2.0, 1e-6)


def stream_gate(g: Recorder, x: Value, magnitude: float, eps: float) -> Value:
    """Gate of a residual stream."""
    return g.record(StreamGate(g.value(x.width), x, magnitude, eps))


def add_gates(table: TensorTable, name: str, n_streams: int, n_embd: int, n: int = 1) -> None:
    """Add the tensors of n gates of each stream."""
    table.add(f"{name}_fn", n * n_streams, n_streams * n_embd)
    table.add(f"{name}_base", n * n_streams)
    table.add(f"{name}_scale", n)


def gate_inputs(g: Graph, params: Params, name: str, streams: Value, n_streams: int, norm_eps: float) -> Value:
    """Inputs of the gates of streams that lie side by side."""
    fn, base, scale = (getattr(params, f"{name}_{part}") for part in ("fn", "base", "scale"))
    mixed = g.linear(g.rms_norm(streams, None, norm_eps), fn)
    return g.add(g.mul(mixed, scale, n_streams), base)


@attrs.frozen
class Streams:
    """`n` residual streams; Sinkhorn's normalisation is done `n_times`."""

    n: int
    n_times: int
    eps: float

    @classmethod
    def from_gguf(cls, metadata: Metadata, architecture: str) -> Self:
        """Read the keys `{architecture}.hyper_connection.*`; there are 4 streams."""
        key = f"{architecture}.hyper_connection"
        return cls(
            metadata.get_int(f"{key}.count", minimum=4, maximum=4),
            metadata.get_int(f"{key}.sinkhorn_iterations", minimum=1, maximum=1 << 10),
            metadata.get_float(f"{key}.epsilon", minimum=0.0),
        )

    def add_tensors(self, block: TensorTable, n_embd: int) -> None:
        """Add the tensors of both branches of a block."""
        n = self.n * (self.n + 2)
        for name in ("hc_attn", "hc_ffn"):
            block.add(f"{name}_fn", n, self.n * n_embd)
            block.add(f"{name}_base", n)
            block.add(f"{name}_scale", 3)

    def layers(
        self,
        g: Graph,
        blocks: Sequence[Params],
        x: Value,
        norm_eps: float,
        attention: Callable[[int, Params, Value], Value],
        feed_forward: Callable[[int, Params, Value], Value],
    ) -> Value:
        """Streams behind all blocks, whose branches read normalised inputs."""
        streams = g.repeat(x, x.width, self.n, tiled=True)
        for i, block in enumerate(blocks):
            for name, branch in (("attn", attention), ("ffn", feed_forward)):
                x, weights = self.read(g, block, name, streams, norm_eps)
                y = branch(i, block, g.rms_norm(x, getattr(block, f"{name}_norm"), norm_eps))
                streams = self.write(g, y, streams, weights)
        return streams

    def read(self, g: Graph, block: Params, name: str, streams: Value, norm_eps: float) -> tuple[Value, Value]:
        """Input of a branch, and the weights of `write`."""
        fn, base, scale = (getattr(block, f"hc_{name}_{part}") for part in ("fn", "base", "scale"))
        mixed = g.linear(g.rms_norm(streams, None, norm_eps), fn)
        weights = stream_weights(g, mixed, base, scale, self.n, self.n_times, self.eps)
        x = mix_streams(g, streams, g.columns(weights, 0, self.n), streams.width // self.n)
        return x, g.columns(weights, self.n, self.n * (self.n + 1))

    def write(self, g: Graph, y: Value, streams: Value, weights: Value) -> Value:
        """Streams behind a branch with the result y."""
        return mix_streams(g, g.concat(y, streams), weights, y.width)
