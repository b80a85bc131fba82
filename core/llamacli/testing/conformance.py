"""Conformance of ops: the kernels of each example against its NumPy reference."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine import Engine, QuantMode, ReferenceEngine, Span
from llamacli.engine.examples import N_VOCAB, Example, examples_of
from llamacli.engine.native import NativeEngine
from llamacli.gguf import Metadata
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.loaders import ArrayFile
from llamacli.ops.base import Op
from llamacli.ops.lowering import f32

TOLERANCE = 1e-5
"""Largest difference between kernel and reference, as a share of the largest number of the row."""

ROUNDING = np.float32(2**-20)
"""Relative change of inputs that stands for the rounding of sums in float32: 16 units of it."""

N_TOKENS = 18

Rows = npt.NDArray[np.float32]


class ConformanceError(AssertionError):
    """Difference between a kernel and its reference, or a broken rule."""


def check_op(op: type[Op]) -> None:
    """Compare the kernels of every example of an op with its reference.

    Rows must agree, not depend on how tokens are batched, on which rows are wanted or on the number of threads, bit for
    bit, and leave the padding of rows zero. Raises ConformanceError naming the op, the example, and the first row and
    column at fault.
    """
    examples = list(examples_of(op))
    if not examples:
        raise ConformanceError(f"{op.__name__} has no examples: define `examples` to have it checked")
    for example in examples:
        check_example(example)


def check_example(
    example: Example,
    n_tokens: int = N_TOKENS,
    floor: float = 0.0,
    *,
    input_bounds: bool = False,
    nudged: bool = False,
) -> None:
    """Compare the kernels of one example with its reference; see `check_op`.

    The input is `n_tokens` random tokens. Rows whose largest number is below `floor`, or with `input_bounds` below the
    largest one of the input's row, may differ by as much as those of this magnitude. With `nudged`, rows may
    also differ by as much as random changes of the inputs by ROUNDING change them, for sums that may nearly cancel and
    for exponentials, whose relative error is the absolute one of their arguments.
    """
    name = f"{example.op.__name__}, example {example.number + 1}"
    tokens = np.random.default_rng(example.number).integers(0, N_VOCAB, n_tokens).astype(np.int32)
    expected = _rows(example, ReferenceEngine(), tokens, n_tokens)
    actual = _rows(example, NativeEngine(1), tokens, n_tokens)
    floors = np.full((n_tokens, 1), floor)
    if input_bounds:
        tables = [table for table in example.weights.values() if len(table) == N_VOCAB]
        floors = np.maximum(floors, np.abs(np.hstack(tables)[tokens]).max(axis=1, keepdims=True))
    finite = np.isfinite(expected)
    _expect(name, finite | (actual == expected), expected, actual)
    known = np.where(finite, expected, 0)
    bound = TOLERANCE * np.maximum(floors, np.abs(known).max(axis=1, keepdims=True, initial=0)) + 1e-30
    if nudged:
        random = np.random.default_rng(0)
        signs = {name: random.choice([-ROUNDING, ROUNDING], table.shape) for name, table in example.weights.items()}
        weights = {name: table * (1 + signs[name]) for name, table in example.weights.items()}
        nudged_rows = _rows(attrs.evolve(example, weights=weights), ReferenceEngine(), tokens, n_tokens)
        change = np.abs(np.where(finite, nudged_rows, 0) - known)
        bound += change.max(axis=1, keepdims=True, initial=0)
    _expect(name, np.abs(np.where(finite, actual, 0) - known) <= bound, expected, actual)
    _expect_equal(f"{name}, with 3 threads", actual, _rows(example, NativeEngine(3), tokens, n_tokens))
    if not example.graph.needs_whole_input:
        _expect_equal(f"{name}, token by token", actual, _rows(example, NativeEngine(1), tokens, 1))
    if example.graph.recurrent and not example.graph.needs_whole_input:
        _expect_equal(f"{name}, after drafts", actual, _rows(example, NativeEngine(1), tokens, 2, n_drafted=3))
    _expect_equal(f"{name}, last rows of several sequences", *_last_rows(example, tokens))
    _expect_zero_padding(name, example, tokens)


def _last_rows(example: Example, tokens: npt.NDArray[np.int32]) -> tuple[Rows, Rows]:
    """Compute the last rows of several sequences in two ways.

    With all rows and without; both float32 [n_sequences, width]. Without, an op that mixes no tokens computes rows from
    `first_row` on alone.
    """
    lengths = [len(part) for part in np.split(tokens, [7, 10]) if len(part)]
    file = ArrayFile(Path("example"), Metadata({}), example.weights)
    results = []
    for all_logits in (True, False):
        program = NativeEngine(1).compile(example.graph, file, QuantMode.FP32)  # again, so that all buffers are zero
        pool = KVPool(KVLayout.of(program.states, "f32", program.recurrent))
        spans = [Span(KVSequence(pool, n), 0, n) for n in lengths]
        for span in spans:
            span.sequence.reserve(0, span.n)
        rows = program.forward(tokens, spans, lengths if all_logits else [1] * len(spans))
        results.append(rows[np.cumsum(lengths) - 1] if all_logits else rows)
    return results[0], results[1]


def _rows(example: Example, engine: Engine, tokens: npt.NDArray[np.int32], n_batch: int, *, n_drafted: int = 0) -> Rows:
    """Compute the result of the example's op, float32 [n_tokens, width].

    Each batch has `n_drafted` more tokens, which are dropped afterwards.
    """
    file = ArrayFile(Path("example"), Metadata({}), example.weights)
    program = engine.compile(example.graph, file, QuantMode.FP32)
    sequence = KVSequence(KVPool(KVLayout.of(program.states, "f32", program.recurrent)), len(tokens) + n_drafted)
    parts = []
    for start in range(0, len(tokens), n_batch):
        stop = min(start + n_batch, len(tokens))
        ids = np.concatenate([tokens[start:stop], np.resize(tokens, n_drafted)])
        sequence.reserve(start, len(ids), n_behind=n_drafted)
        rows = program.forward(ids, [Span(sequence, start, len(ids))], [len(ids)])
        parts.append(rows[: stop - start])
        sequence.commit(ids.tolist(), n_ahead=n_drafted)
        sequence.truncate(stop)
    return np.concatenate(parts)


def _expect_equal(name: str, expected: Rows, actual: Rows) -> None:
    _expect(name, actual == expected, expected, actual)


def _expect(name: str, holds: npt.NDArray[np.bool_], expected: Rows, actual: Rows) -> None:
    if not holds.all():
        row, column = (int(i) for i in np.argwhere(~holds)[0])
        raise ConformanceError(
            f"{name}: the kernel computes {actual[row, column]!s} in row {row}, column {column}, "
            f"expected {expected[row, column]!s}"
        )


def _expect_zero_padding(name: str, example: Example, tokens: npt.NDArray[np.int32]) -> None:
    graph, out = example.graph.with_ops([*example.graph.ops]), example.graph.ops[-1].out
    graph.scale(out, 1.0)
    file = ArrayFile(Path("example"), Metadata({}), example.weights)
    program = NativeEngine(1).compile(graph, file, QuantMode.FP32)
    sequence = KVSequence(KVPool(KVLayout.of(program.states, "f32", program.recurrent)), len(tokens))
    sequence.reserve(0, len(tokens))
    program.forward(tokens, [Span(sequence, 0, len(tokens))], [len(tokens)])
    padding = program.buffers[f32(out)][: len(tokens), out.width :]
    if padding.any():
        row, column = (int(i) for i in np.argwhere(padding)[0])
        raise ConformanceError(f"{name}: the kernel writes to the padding of row {row}, column {out.width + column}")
