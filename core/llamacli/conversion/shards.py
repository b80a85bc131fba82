"""Split GGUF files: tensors of shards, names and keys of gguf-split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.gguf import GGUFFile, TensorInfo, metadata_pair
from llamacli.gguf.header import DEFAULT_ALIGNMENT, padded

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_MOST = 99999


def kept_shards(file: GGUFFile) -> list[int]:
    """Numbers of tensors in the shards of a file; [] without shards."""
    return [file.shards.count(number) for number in range(len(file.paths))] if len(file.paths) > 1 else []


def shards_by_limit(tensors: Sequence[TensorInfo], *, n_tensors: int = 0, n_bytes: int = 0) -> list[int]:
    """Numbers of tensors in shards of limited size.

    Each has at most `n_tensors`, or tensors of `n_bytes`. A tensor that is larger is alone. Raises InvalidRequestError
    for more shards than names can count.
    """
    found, size = list[int](), 0
    for i, info in enumerate(tensors):
        more = padded(info.n_bytes, DEFAULT_ALIGNMENT)
        if not found or (i % n_tensors == 0 if n_tensors else size + more > n_bytes):
            found, size = [*found, 0], 0
        found[-1], size = found[-1] + 1, size + more
    if len(found) > _MOST:
        raise InvalidRequestError(f"{len(found)} shards are more than {_MOST}")
    return found


def shard_path(path: Path, number: int, count: int) -> Path:
    """Path of a shard, from 0 on, of the file `path`."""
    return path.with_name(f"{path.name.removesuffix('.gguf')}-{number + 1:05}-of-{count:05}.gguf")


def shard_pairs(number: int, count: int, n_tensors: int) -> list[bytes]:
    """Keys of a shard; a `count` of 0 for merged ones."""
    return [
        metadata_pair("split.no", np.uint16(number)),
        metadata_pair("split.tensors.count", np.int32(n_tensors)),
        metadata_pair("split.count", np.uint16(count)),
    ]
