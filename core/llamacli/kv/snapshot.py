"""Serialization of sequences: tokens, pages, and data that the caller adds.

Format: MAGIC, version, header length, JSON header, payload, SHA-256 of all before. The payload is the tokens of each
sequence as int32 (in version 4, where some are no plain ids, as int64), the pages of each group of layers (shared pages
once), then float32 arrays. A state is validated completely before anything is restored.
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
from typing import Any, BinaryIO

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import StateError
from llamacli.kernels.kv_types.types import CODE_LAYOUT, KV_TYPES, PAGE, IntegerType
from llamacli.kv.layout import Group
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence
from llamacli.util.files import replacing
from llamacli.util.memory import view
from llamacli.util.numbers import is_integer

MAGIC = b"LLAMACLI-KV\0"
VERSION, WIDE_VERSION = 3, 4
_FIXED = struct.Struct("<12sII")
_DIGEST = 32
_BAD_MAGIC = f"not a saved state: it does not begin with {MAGIC!r}"

Arrays = Mapping[str, npt.NDArray[np.float32]]


@attrs.frozen
class SavedSequence:
    """Saved sequence: fields of KVSequence and page indices.

    `pages` has, for each group, the indices of the sequence's pages in the state.
    """

    tokens: list[int]
    rope_variant: int
    first_cells: list[int]
    first_stale_cell: int | None
    pages: list[list[int]]
    adapters: str


@attrs.frozen
class Snapshot:
    """Validated state.

    - `sequences`: saved sequences by number.
    - `pages`: for each group, uint8 [n_pages, page_bytes].
    - `arrays`, `extra`: data that the caller of `dump` added; `extra` is JSON.
    - `n_bytes`: size of the whole state in bytes.
    """

    sequences: dict[int, SavedSequence]
    pages: list[npt.NDArray[np.uint8]]
    arrays: dict[str, npt.NDArray[np.float32]]
    extra: dict[str, Any]
    n_bytes: int

    def check(self, targets: Mapping[int, KVSequence]) -> None:
        """Raise StateError unless each target can hold its saved sequence."""
        for number, target in targets.items():
            saved = self.sequences[number]
            if len(saved.tokens) > target.seq_len:
                raise StateError(f"the state has {len(saved.tokens)} tokens, and the context is {target.seq_len} long")
            if saved.rope_variant != target.rope_variant:
                raise StateError("the state was computed for a context of another length, with another RoPE variant")
            if saved.adapters != target.adapters:
                raise StateError("the state was computed with other LoRA adapters or scales than the session has")

    def restore(self, targets: Mapping[int, KVSequence]) -> None:
        """Restore each target from the saved sequence of its number.

        Raises StateError as `check` does, changing nothing; OutOfMemoryError, and then all targets are empty.
        """
        self.check(targets)
        restored: list[dict[int, int]] = [{} for _ in self.pages]
        for target in targets.values():
            target.truncate(0)
        try:
            for number, target in targets.items():
                self._restore(self.sequences[number], target, restored)
        except BaseException:
            for target in targets.values():
                target.truncate(0)
            raise

    def _restore(self, saved: SavedSequence, target: KVSequence, restored: list[dict[int, int]]) -> None:
        with target.pool.lock:
            for g, pages in enumerate(target.pool.groups):
                table = target.tables[g]
                target.extend(saved.first_cells[g] // PAGE + len(saved.pages[g]))
                for i, number in enumerate(saved.pages[g], start=saved.first_cells[g] // PAGE):
                    if number in restored[g]:
                        pages.share(restored[g][number], table, i)
                        continue
                    pages.allocate(table, i)
                    restored[g][number] = int(table[i])
                    ctypes.memmove(restored[g][number], self.pages[g][number].ctypes.data, pages.page_bytes)
            target.set_contents(saved.tokens, saved.first_cells, saved.first_stale_cell)


def state_size(sequences: Mapping[int, KVSequence], *, arrays: Arrays | None = None, **extra: Any) -> int:
    """Size of what `dump` returns, in bytes."""
    return sum(len(chunk) for chunk in _chunks(sequences, arrays or {}, extra)) + _DIGEST


def dump(sequences: Mapping[int, KVSequence], *, arrays: Arrays | None = None, **extra: Any) -> bytes:
    """Serialize sequences of one pool, with `arrays` and `extra`, which is JSON."""
    return b"".join(_signed(_chunks(sequences, arrays or {}, extra)))


def write(
    path: str | os.PathLike[str], sequences: Mapping[int, KVSequence], *, arrays: Arrays | None = None, **extra: Any
) -> int:
    """Write a state atomically; returns its size in bytes. Raises OSError."""
    with replacing(Path(path), overwrite=True) as file:
        return sum(file.write(chunk) for chunk in _signed(_chunks(sequences, arrays or {}, extra)))


def read(path: str | os.PathLike[str], pool: KVPool) -> Snapshot:
    """Read and validate a state; StateError with the file's name, OSError."""
    try:
        with open(path, "rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC[: len(magic)]:  # before the rest is read, which may be huge
                raise StateError(_BAD_MAGIC)
            return load(magic + file.read(), pool)
    except StateError as error:
        raise StateError(f"{os.fspath(path)}: {error}") from None


def read_head(file: BinaryIO) -> tuple[dict[str, Any], list[int]]:
    """Header of a state in a file, and its first sequence's tokens.

    Nothing is checked by the checksum. Raises StateError unless it is a state of a known version, and what malformed
    JSON raises.
    """
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size or not fixed.startswith(MAGIC):
        raise StateError(_BAD_MAGIC)
    _, version, n_header = _FIXED.unpack(fixed)
    if version not in (VERSION, WIDE_VERSION):
        raise StateError(f"state version {version} is not supported, only versions {VERSION} and {WIDE_VERSION}")
    header = json.loads(file.read(n_header))
    kind = np.dtype("<i8" if version == WIDE_VERSION else "<i4")
    n_tokens = _checked_count(header["sequences"][0]["n_tokens"])
    return header, np.frombuffer(file.read(kind.itemsize * n_tokens), kind).tolist()


def load(data: bytes, pool: KVPool) -> Snapshot:
    """Validate a state for sequences of a pool; StateError names the fault."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise StateError(f"a state is bytes, not {type(data).__name__}")
    if len(data) < _FIXED.size + _DIGEST:
        raise StateError(f"{len(data)} bytes are too few for a state")
    magic, version, n_header = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise StateError(_BAD_MAGIC)
    if version not in (VERSION, WIDE_VERSION):
        raise StateError(f"state version {version} is not supported, only versions {VERSION} and {WIDE_VERSION}")
    if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise StateError("the state is damaged: its checksum does not match")
    payload = memoryview(data)[_FIXED.size + n_header : -_DIGEST]
    try:
        header = json.loads(data[_FIXED.size : min(len(data) - _DIGEST, _FIXED.size + n_header)])
        _check_compatible(header, pool)
        return _parse(header, payload, pool, len(data), "<i8" if version == WIDE_VERSION else "<i4")
    except StateError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"the state is inconsistent: {type(error).__name__}: {error}") from None


def _describe(pool: KVPool) -> dict[str, Any]:
    layout = pool.layout
    specs = [list(attrs.astuple(spec)) for spec in layout.specs]
    recurrent = [[spec.name, *spec.shape] for spec in layout.recurrent]
    has_codes = any(isinstance(KV_TYPES[name], IntegerType) for name in (layout.kv_type.k, layout.kv_type.v))
    return {
        "identity": pool.identity,
        "k": layout.kv_type.k,
        "v": layout.kv_type.v,
        "states": specs,
        **({"codes": CODE_LAYOUT} if has_codes else {}),
        **({"recurrent": recurrent} if recurrent else {}),
    }


def _n_pages(group: Group, n_tokens: int) -> int:
    return min(n_tokens, 1) if group.recurrent else -(-n_tokens // PAGE)


def _chunks(sequences: Mapping[int, KVSequence], arrays: Arrays, extra: dict[str, Any]) -> Iterator[bytes | memoryview]:
    pools = {id(sequence.pool): sequence.pool for sequence in sequences.values()}
    if len(pools) != 1:
        raise StateError("a state needs at least one sequence, and all of one model and cache type")
    pool = next(iter(pools.values()))
    if pool.layout.held is not None:
        raise StateError("the KV cache of a model on several machines cannot be saved")
    with pool.lock:  # only while the pages are shared: the consumer of the chunks may be slow
        shared = {number: sequence.fork() for number, sequence in sequences.items()}
    try:
        numbers: list[dict[int, int]] = [{} for _ in pool.groups]
        saved = []
        for number, sequence in shared.items():
            pages = []
            for g, table in enumerate(sequence.tables):
                n_pages = _n_pages(pool.layout.groups[g], len(sequence.tokens))
                held = table[sequence.first_cells[g] // PAGE : n_pages].tolist()
                pages.append([numbers[g].setdefault(page, len(numbers[g])) for page in held])
            saved.append(
                {"id": number, "n_tokens": len(sequence.tokens), "rope_variant": sequence.rope_variant,
                 "first_cells": sequence.first_cells, "cut": sequence.first_stale_cell, "pages": pages,
                 **({"adapters": sequence.adapters} if sequence.adapters else {})}
            )  # fmt: skip
        is_wide = any(min(sequence.tokens, default=0) < 0 for sequence in shared.values())
        header = json.dumps(
            {
                **_describe(pool),
                "sequences": saved,
                "n_pages": [len(group) for group in numbers],
                "arrays": {name: list(array.shape) for name, array in arrays.items()},
                "extra": extra,
            }
        ).encode()
        yield _FIXED.pack(MAGIC, WIDE_VERSION if is_wide else VERSION, len(header)) + header
        for sequence in shared.values():
            yield np.array(sequence.tokens, "<i8" if is_wide else "<i4").tobytes()
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


def _check_compatible(header: dict[str, Any], pool: KVPool) -> None:
    mine = _describe(pool)
    if pool.layout.held is not None:
        raise StateError("the KV cache of a model on several machines cannot be restored")
    if header["identity"] != mine["identity"]:
        raise StateError("the state is of another model, or of this one in another mode")
    if (header["k"], header["v"]) != (mine["k"], mine["v"]):
        raise StateError(
            f"the state's cache type is {header['k']}/{header['v']}, and the target's {mine['k']}/{mine['v']}"
        )
    if header.get("codes") != mine.get("codes"):
        kinds = f"{header['k']}/{header['v']}"
        raise StateError(f"the state has cells of {kinds} as another version of llamacli orders them")
    if header["states"] != mine["states"] or header.get("recurrent") != mine.get("recurrent"):
        raise StateError("the state's layers differ from this model's")


def _parse(header: dict[str, Any], payload: memoryview, pool: KVPool, n_bytes: int, token_type: str) -> Snapshot:
    n_pages = [_checked_count(n) for n in header["n_pages"]]
    shapes = {str(name): [_checked_count(n) for n in shape] for name, shape in header["arrays"].items()}
    lengths = [_checked_count(saved["n_tokens"]) for saved in header["sequences"]]
    sizes = [np.dtype(token_type).itemsize * n for n in lengths]
    sizes += [n * group.page_bytes for n, group in zip(n_pages, pool.groups, strict=True)]
    sizes += [4 * math.prod(shape) for shape in shapes.values()]
    if sum(sizes) != len(payload):
        raise StateError(f"the state's payload has {len(payload)} bytes instead of {sum(sizes)}")
    ends = np.cumsum([0, *sizes]).tolist()
    parts = (np.frombuffer(payload[start:end], np.uint8) for start, end in itertools.pairwise(ends))
    tokens = [next(parts).view(token_type).tolist() for _ in lengths]
    sequences = {}
    for saved, ids in zip(header["sequences"], tokens, strict=True):
        entry = SavedSequence(
            ids,
            _checked_count(saved["rope_variant"]),
            [_checked_count(first) for first in saved["first_cells"]],
            None if saved["cut"] is None else _checked_count(saved["cut"]),
            [[_checked_count(number) for number in group] for group in saved["pages"]],
            str(saved.get("adapters", "")),
        )
        for group, first, numbers, n in zip(pool.layout.groups, entry.first_cells, entry.pages, n_pages, strict=True):
            if (
                first > group.first_seen(len(ids))
                or len(numbers) != max(0, _n_pages(group, len(ids)) - first // PAGE)
                or (group.recurrent and first)
                or any(number >= n for number in numbers)
            ):
                raise StateError("the state's pages do not match its tokens")
        if _checked_count(saved["id"]) in sequences:
            raise StateError(f"the state has sequence {saved['id']} twice")
        sequences[saved["id"]] = entry
    if not isinstance(header["extra"], dict):
        raise StateError("the state's extra data is not a JSON object")
    return Snapshot(
        sequences,
        [next(parts).reshape(n, group.page_bytes) for n, group in zip(n_pages, pool.groups, strict=True)],
        {name: next(parts).view("<f4").reshape(shape) for name, shape in shapes.items()},
        header["extra"],
        n_bytes,
    )


def _checked_count(value: Any) -> int:
    if not is_integer(value) or not 0 <= value < 1 << 40:
        raise StateError(f"{value!r} is not a valid count")
    return int(value)
