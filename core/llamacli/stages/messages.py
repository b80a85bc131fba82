"""Messages between the caller and a worker: what their frames hold."""

from __future__ import annotations

import hashlib
import importlib.metadata
from typing import Any

import attrs
import numpy as np

from llamacli.engine.packed_copies import sources_digest
from llamacli.engine.stages import RESULTS, SPAN, StageBatch
from llamacli.errors import OutOfMemoryError, StageError
from llamacli.graph import Graph, Tensor, Value
from llamacli.kernels.kv_types.types import KVType
from llamacli.stages.frames import Connection, Frame

SILENCE_S = 20.0
"""Seconds after which a worker that sends nothing is lost; while it computes, it sends a frame each BEAT_S."""

BEAT_S = 2.0

_DTYPES = ("<i8", "<i4", "<i8", "<i8", "<i8", "<i4", "<i8", "<i8", "<f4")
_COLUMNS = (5, None, len(SPAN.names or ()), None, None, None, 3, 2, None)


def version() -> str:
    """Version of the code whose bits two stages must share."""
    return f"{importlib.metadata.version('llamacli')} {sources_digest()[:16]}"


def digest_of(graph: Graph) -> str:
    """Digest of a graph: ops with their fields, and caches."""
    numbers = {op.out: i for i, op in enumerate(graph.ops)}

    def shown(value: Any) -> str:
        if isinstance(value, Value):
            return f"value {numbers[value]}"
        if isinstance(value, tuple | list):
            return f"({', '.join(map(shown, value))})"
        if callable(value) and hasattr(value, "__qualname__"):
            return str(value.__qualname__)
        return repr(value) if isinstance(value, str | int | float | Tensor | None) else type(value).__name__

    digest = hashlib.sha256(repr((graph.states, graph.recurrent, graph.n_encoder)).encode())
    for op in graph.ops:
        fields = [shown(getattr(op, field.name)) for field in attrs.fields(type(op)) if field.name != "out"]
        digest.update(f"{type(op).__qualname__} {op.out.width} {' '.join(fields)}\n".encode())
    return digest.hexdigest()


def send_batch(connection: Connection, number: int, batch: StageBatch, received: Any) -> None:
    """Send a batch, with what the stage before sent."""
    heads = batch.spans.view(np.int64).reshape(len(batch.spans), -1)
    arrays = (
        batch.log, batch.tokens, heads, batch.tables, batch.counts, batch.positions, batch.ranges, batch.rows, received,
    )  # fmt: skip
    connection.send("batch", arrays, number=number, k=batch.kv_type.k, v=batch.kv_type.v, result=batch.result)


def batch_of(frame: Frame) -> tuple[StageBatch, Any]:
    """Batch of a frame, and what the stage before sent. Raises StageError."""
    arrays = frame.arrays
    if len(arrays) != len(_DTYPES) or frame.text("result") not in RESULTS:
        raise StageError(f"a batch has {len(arrays)} arrays and result {frame.fields.get('result')!r}")
    for i, (array, dtype, n) in enumerate(zip(arrays, _DTYPES, _COLUMNS, strict=True)):
        n_axes = 1 if i in (1, 3) else 2
        if array.dtype.str != dtype or array.ndim != n_axes or (n is not None and array.shape[1] != n):
            raise StageError(f"array {i} of a batch is {array.dtype.str} {array.shape}")
    log, tokens, heads, tables, counts, positions, ranges, rows, received = arrays
    spans = np.ascontiguousarray(heads).view(SPAN).reshape(-1)
    kv_type = kv_type_of(frame)
    batch = StageBatch(
        kv_type, frame.text("result"), log, tokens, spans, tables, counts, positions, ranges, rows
    )  # fmt: skip
    return batch, received


def kv_type_of(frame: Frame) -> KVType:
    """Cache type of a frame. Raises StageError."""
    try:
        return KVType.of((frame.text("k"), frame.text("v")))
    except ValueError as error:
        raise StageError(f"a batch has an unknown cache type: {error}") from None


def send_error(connection: Connection, number: int, error: Exception) -> None:
    """Send the error of a batch."""
    memory = [error.asked, error.available] if isinstance(error, OutOfMemoryError) else []
    connection.send("error", number=number, message=f"{type(error).__name__}: {error}"[:4000], memory=memory)


def error_of(frame: Frame, peer: str) -> Exception:
    """Error that a worker sent."""
    memory = frame.numbers("memory")
    return (
        OutOfMemoryError(memory[0], memory[1]) if len(memory) == 2 else StageError(f"{peer}: {frame.text('message')}")
    )
