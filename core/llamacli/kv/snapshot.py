"""States of sequences as bytes: tokens, pages, and what their owner adds.

A state is MAGIC, a version, the length of a header, the header in JSON, the payload, and the SHA-256 of all before. The
payload is the tokens of each sequence, int32, then the pages of each group of layers, those that sequences share once,
then arrays of float32. All is checked before anything is restored.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import StateError
from llamacli.kernels.kv_types.types import PAGE
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence
from llamacli.util.files import replacing
from llamacli.util.memory import view
from llamacli.util.numbers import is_integer

MAGIC = b"LLAMACLI-KV\0"
VERSION = 3
_FIXED = struct.Struct("<12sII")
_DIGEST = 32
_NO_STATE = "this is no state: it does not begin with what states begin with"

Arrays = Mapping[str, npt.NDArray[np.float32]]


@attrs.frozen
class Placed:
    """One sequence of a state: what a KVSequence has, and of each group the numbers of the pages that it keeps."""

    tokens: list[int]
    rope_variant: int
    first_cells: list[int]
    cut: int | None
    pages: list[list[int]]


@attrs.frozen
class Snapshot:
    """A state that has been checked.

    - `sequences`: by their numbers.
    - `pages`: of each group, bytes [n_pages, page_bytes].
    - `arrays`, `extra`: what the owner added; `extra` is JSON.
    """

    sequences: dict[int, Placed]
    pages: list[npt.NDArray[np.uint8]]
    arrays: dict[str, npt.NDArray[np.float32]]
    extra: dict[str, Any]

    def check(self, targets: Mapping[int, KVSequence]) -> None:
        """Raise StateError unless each target can hold the sequence of its number."""
        for number, target in targets.items():
            saved = self.sequences[number]
            if len(saved.tokens) > target.seq_len:
                raise StateError(f"the state holds {len(saved.tokens)} tokens, and the context {target.seq_len} only")
            if saved.rope_variant != target.rope_variant:
                raise StateError(
                    "the state was computed for a context of another length, which changes this model's RoPE"
                )

    def restore(self, targets: Mapping[int, KVSequence]) -> None:
        """Let each target hold what the sequence of its number held.

        Raises what `check` does, changing nothing; OutOfMemoryError, and then all targets are empty.
        """
        self.check(targets)
        placed: list[dict[int, int]] = [{} for _ in self.pages]
        for target in targets.values():
            target.truncate(0)
        try:
            for number, target in targets.items():
                self._restore(self.sequences[number], target, placed)
        except BaseException:
            for target in targets.values():
                target.truncate(0)
            raise

    def _restore(self, saved: Placed, target: KVSequence, placed: list[dict[int, int]]) -> None:
        with target.pool.lock:
            for g, pages in enumerate(target.pool.groups):
                table = target.tables[g]
                for i, number in enumerate(saved.pages[g], start=saved.first_cells[g] // PAGE):
                    if number in placed[g]:
                        pages.share(placed[g][number], table, i)
                        continue
                    pages.allocate(table, i)
                    placed[g][number] = int(table[i])
                    ctypes.memmove(placed[g][number], self.pages[g][number].ctypes.data, pages.page_bytes)
            target.adopt(saved.tokens, saved.first_cells, saved.cut)


def state_size(sequences: Mapping[int, KVSequence], *, arrays: Arrays | None = None, **extra: Any) -> int:
    """Bytes of what `dump` gives."""
    return sum(len(chunk) for chunk in _chunks(sequences, arrays or {}, extra)) + _DIGEST


def dump(sequences: Mapping[int, KVSequence], *, arrays: Arrays | None = None, **extra: Any) -> bytes:
    """The state of some sequences of one pool, by numbers, with arrays and JSON of their owner's."""
    return b"".join(_signed(_chunks(sequences, arrays or {}, extra)))


def write(
    path: str | os.PathLike[str], sequences: Mapping[int, KVSequence], *, arrays: Arrays | None = None, **extra: Any
) -> int:
    """Write a state to a file, which then is the old one or the new one whatever happens. Returns its bytes."""
    with replacing(Path(path), overwrite=True) as file:
        return sum(file.write(chunk) for chunk in _signed(_chunks(sequences, arrays or {}, extra)))


def read(path: str | os.PathLike[str], pool: KVPool) -> Snapshot:
    """Check the state in a file. Raises StateError naming the file and what is wrong with it, OSError."""
    try:
        with open(path, "rb") as file:
            begun = file.read(len(MAGIC))
            if begun != MAGIC[: len(begun)]:  # whatever it is, and however large: it need not be read
                raise StateError(_NO_STATE)
            return load(begun + file.read(), pool)
    except StateError as error:
        raise StateError(f"{os.fspath(path)}: {error}") from None


def load(data: bytes, pool: KVPool) -> Snapshot:
    """Check a state that is to be restored into sequences of a pool. Raises StateError saying what is wrong with it."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise StateError(f"a state is bytes, not {type(data).__name__}")
    if len(data) < _FIXED.size + _DIGEST:
        raise StateError(f"{len(data)} bytes are too few for a state")
    magic, version, n_header = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise StateError(_NO_STATE)
    if version != VERSION:
        raise StateError(f"it is of version {version}, and this is version {VERSION}")
    if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise StateError("it is damaged: its checksum is another")
    payload = memoryview(data)[_FIXED.size + n_header : -_DIGEST]
    try:
        header = json.loads(data[_FIXED.size : min(len(data) - _DIGEST, _FIXED.size + n_header)])
        _check_owner(header, pool)
        return _parse(header, payload, pool)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"it contradicts itself: {type(error).__name__}: {error}") from None


def _about(pool: KVPool) -> dict[str, Any]:
    layout = pool.layout
    states = [[state.n_head_kv, state.head_dim, state.window] for state in layout.states]
    return {"identity": pool.identity, "k": layout.kv_type.k, "v": layout.kv_type.v, "states": states}


def _chunks(sequences: Mapping[int, KVSequence], arrays: Arrays, extra: dict[str, Any]) -> Iterator[bytes | memoryview]:
    pools = {id(sequence.pool): sequence.pool for sequence in sequences.values()}
    if len(pools) != 1:
        raise StateError("a state is of one sequence at least, and all of them of one model and type")
    pool = next(iter(pools.values()))
    with pool.lock:  # not longer than it takes to share the pages: whoever writes the state may be slow
        shared = {number: sequence.fork() for number, sequence in sequences.items()}
    try:
        numbers: list[dict[int, int]] = [{} for _ in pool.groups]
        saved = []
        for number, sequence in shared.items():
            pages = []
            for g, table in enumerate(sequence.tables):
                held = table[sequence.first_cells[g] // PAGE : -(-len(sequence.tokens) // PAGE)].tolist()
                pages.append([numbers[g].setdefault(page, len(numbers[g])) for page in held])
            saved.append(
                {"id": number, "n_tokens": len(sequence.tokens), "rope_variant": sequence.rope_variant,
                 "first_cells": sequence.first_cells, "cut": sequence.cut, "pages": pages}
            )  # fmt: skip
        header = json.dumps(
            {
                **_about(pool),
                "sequences": saved,
                "n_pages": [len(group) for group in numbers],
                "arrays": {name: list(array.shape) for name, array in arrays.items()},
                "extra": extra,
            }
        ).encode()
        yield _FIXED.pack(MAGIC, VERSION, len(header)) + header
        for sequence in shared.values():
            yield np.array(sequence.tokens, "<i4").tobytes()
        for group, owned in zip(pool.groups, numbers, strict=True):
            for page in owned:
                yield view(page, group.page_bytes).data
        for array in arrays.values():
            yield np.ascontiguousarray(array, "<f4").tobytes()
    finally:
        for sequence in shared.values():
            sequence.close()


def _signed(chunks: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
    yield digest.digest()


def _check_owner(header: dict[str, Any], pool: KVPool) -> None:
    mine = _about(pool)
    if header["identity"] != mine["identity"]:
        raise StateError("it is of another model, or of this one in another mode")
    if (header["k"], header["v"]) != (mine["k"], mine["v"]):
        raise StateError(f"its cache is of type {header['k']}/{header['v']}, and this one of {mine['k']}/{mine['v']}")
    if header["states"] != mine["states"]:
        raise StateError("its layers are others than this model's")


def _parse(header: dict[str, Any], payload: memoryview, pool: KVPool) -> Snapshot:
    n_pages = [_natural(n) for n in header["n_pages"]]
    shapes = {str(name): [_natural(n) for n in shape] for name, shape in header["arrays"].items()}
    lengths = [_natural(saved["n_tokens"]) for saved in header["sequences"]]
    sizes = [4 * n for n in lengths]
    sizes += [n * group.page_bytes for n, group in zip(n_pages, pool.groups, strict=True)]
    sizes += [4 * math.prod(shape) for shape in shapes.values()]
    if sum(sizes) != len(payload):
        raise StateError(f"it should have {sum(sizes)} bytes of content and has {len(payload)}")
    ends = np.cumsum([0, *sizes]).tolist()
    parts = (np.frombuffer(payload[start:end], np.uint8) for start, end in itertools.pairwise(ends))
    tokens = [next(parts).view("<i4").tolist() for _ in lengths]
    sequences = {}
    for saved, ids in zip(header["sequences"], tokens, strict=True):
        placed = Placed(
            ids,
            _natural(saved["rope_variant"]),
            [_natural(first) for first in saved["first_cells"]],
            None if saved["cut"] is None else _natural(saved["cut"]),
            [[_natural(number) for number in group] for group in saved["pages"]],
        )
        for group, first, numbers, n in zip(pool.layout.groups, placed.first_cells, placed.pages, n_pages, strict=True):
            seen = 0 if group.window is None else max(0, len(ids) - group.window + 1)
            if (
                first > seen
                or len(numbers) != max(0, -(-len(ids) // PAGE) - first // PAGE)
                or any(number >= n for number in numbers)
            ):
                raise StateError("its pages are not those of its tokens")
        if _natural(saved["id"]) in sequences:
            raise StateError(f"it holds sequence {saved['id']} twice")
        sequences[saved["id"]] = placed
    if not isinstance(header["extra"], dict):
        raise StateError("what its owner added is no object")
    return Snapshot(
        sequences,
        [next(parts).reshape(n, group.page_bytes) for n, group in zip(n_pages, pool.groups, strict=True)],
        {name: next(parts).view("<f4").reshape(shape) for name, shape in shapes.items()},
        header["extra"],
    )


def _natural(value: Any) -> int:
    if not is_integer(value) or not 0 <= value < 1 << 40:
        raise StateError(f"{value!r} is no number of things")
    return int(value)
