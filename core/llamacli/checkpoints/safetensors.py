"""Safetensors files: strict header, memory-mapped tensors."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.errors import ModelFormatError

_LFS = b"version https://git-lfs"
_MAX_HEADER = 100 << 20

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"), "F8_E8M0": np.dtype("u1"), "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"), "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
"""NumPy types by those of safetensors; BF16 and F8 are their bits."""


@attrs.frozen
class Entry:
    """Tensor of a safetensors file: dtype, shape, bytes from `start`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFile:
    """Open safetensors file; `entries` by tensor name, in file order."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(len(_LFS))
                if head == _LFS:
                    raise ModelFormatError(
                        f"{path}: a Git LFS pointer, not the tensors: run `git lfs pull` there, or download it again"
                    )
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFormatError(f"{path}: the file is missing: download it again") from None
        except (OSError, ValueError) as error:
            raise ModelFormatError(
                f"{path}: cannot read the file: {getattr(error, 'strerror', None) or error}"
            ) from error
        self.entries = self._read()

    def _read(self) -> dict[str, Entry]:
        size = len(self._mapping)
        n_header = int.from_bytes(self._mapping[:8], "little")
        if size < 8 or n_header > min(_MAX_HEADER, size - 8):
            raise ModelFormatError(f"{self.path}: no safetensors file, or a truncated one: download it again")
        try:
            header = json.loads(self._mapping[8 : 8 + n_header])
        except (ValueError, RecursionError) as error:
            raise ModelFormatError(f"{self.path}: the header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise ModelFormatError(f"{self.path}: the header is no JSON object")
        found = {
            name: self._entry(name, entry, 8 + n_header) for name, entry in header.items() if name != "__metadata__"
        }
        return dict(sorted(found.items(), key=lambda item: item[1].start))

    def _entry(self, name: str, entry: Any, base: int) -> Entry:
        what = f"{self.path}: tensor {name!r}"
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
                pass
            case _:
                raise ModelFormatError(f"{what} has no dtype, shape and data_offsets")
        if dtype not in DTYPES:
            raise ModelFormatError(f"{what} has the unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ModelFormatError(f"{what} has the shape {shape}")
        n_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if start < 0 or stop - start != n_bytes:
            raise ModelFormatError(f"{what} {dtype} {shape} needs {n_bytes} bytes, data_offsets are {start} to {stop}")
        if base + stop > len(self._mapping):
            raise ModelFormatError(
                f"{what} ends at byte {base + stop}, beyond the end of the file at {len(self._mapping)}: "
                "is it truncated? Download it again"
            )
        return Entry(self.path, dtype, tuple(shape), base + start)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Read-only view of a tensor in the file; bits for BF16, F8."""
        entry = self.entries[name]
        if self._mapping.size() < len(self._mapping):  # reading beyond the end raises SIGBUS
            raise ModelFormatError(f"{self.path}: the file was truncated while open: tensor {name!r} cannot be read")
        flat = np.frombuffer(self._mapping, DTYPES[entry.dtype], math.prod(entry.shape), entry.start)
        return flat.reshape(entry.shape)

    def release(self, name: str) -> None:
        """Drop the tensor's pages from memory; touching reads them again."""
        entry = self.entries[name]
        if hasattr(mmap, "MADV_DONTNEED") and (n_bytes := math.prod(entry.shape) * DTYPES[entry.dtype].itemsize):
            start = entry.start - entry.start % mmap.PAGESIZE
            self._mapping.madvise(mmap.MADV_DONTNEED, start, entry.start + n_bytes - start)


def _float8(exponent_bits: int, bias: int) -> npt.NDArray[np.float32]:
    """Values of all 256 codes of a float8, float32 [256]."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = sign * np.where(exponent, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias))
    if exponent_bits == 5:  # infinities and NaN as in IEEE 754
        values = np.where(exponent == 31, np.where(mantissa == 0, sign * np.inf, np.nan), values)
    else:
        values = np.where((codes & 127) == 127, np.nan, values)
    return values.astype(np.float32)


_TABLES: Mapping[str, npt.NDArray[np.float32]] = {
    "F8_E4M3": _float8(4, 7),
    "F8_E5M2": _float8(5, 15),
    "F8_E8M0": np.array([*np.exp2(np.arange(255) - 127.0), np.nan], np.float32),
}


def as_float(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Numbers of a tensor: float16 for F16, float32 for all others."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype in _TABLES:
        return _TABLES[dtype][bits]
    return bits if dtype == "F16" else bits.astype(np.float32, copy=False)
