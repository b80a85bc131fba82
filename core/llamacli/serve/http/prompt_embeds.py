"""Prompts of embeddings: `prompt_embeds`, as in vLLM.

Each is base64 of the bytes of a file with one array, [n, n_embd]: NumPy's .npy, or safetensors. Files of `torch.save`
are refused: they are pickles, which run code.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacli.errors import InvalidRequestError
from llamacli.inputs import Contents, Inputs
from llamacli.quantization.tensor_types import from_bf16
from llamacli.serve.errors import BadRequestError
from llamacli.serve.http.schemas.completions import CompletionRequest
from llamacli.serve.requests import ModelInfo

NAME = "prompt_embeds"

_SAFETENSORS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_MAX_HEADER = 1 << 16
_TEXT_ONLY = ("suffix", "echo", "truncate_prompt_tokens")
"""Fields that need prompts of text or token ids."""


def embedded_prompts(request: CompletionRequest, info: ModelInfo) -> tuple[list[list[int]], Contents]:
    """Content keys of each prompt of embeddings, with the contents.

    Raises BadRequestError that names the field.
    """
    given = request.prompt_embeds or []
    given = [given] if isinstance(given, str) else given
    prompts, contents = list[list[int]](), Contents()
    if given and (wrong := next((name for name in _TEXT_ONLY if getattr(request, name)), None)):
        raise BadRequestError(f"{wrong}: it needs a prompt of text or token ids, not {NAME}", wrong)
    for i, text in enumerate(given):
        name = NAME if isinstance(request.prompt_embeds, str) else f"{NAME}[{i}]"
        try:
            inputs = Inputs.of(embeddings=_array(text))
            if not len(inputs):
                raise InvalidRequestError("it has no rows")
            width = inputs.embeddings.shape[1] if inputs.embeddings is not None else 0
            if info.n_embd not in (None, width):
                raise InvalidRequestError(f"rows of {width} numbers, and the model has embeddings of {info.n_embd}")
            prompts.append(contents.add(inputs))
        except InvalidRequestError as error:
            raise BadRequestError(f"{name}: {error}", NAME) from None
    return prompts, contents


def _array(text: str) -> npt.NDArray[Any]:
    """Array in a file that is given as base64, [n, n_embd]."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"it is not base64: {error}") from None
    if data.startswith(b"\x93NUMPY"):
        array = _npy(data)
    elif data[8:9] == b"{":
        array = _safetensors(data)
    elif data.startswith((b"PK\x03\x04", b"\x80")):
        raise InvalidRequestError("a file of torch.save is a pickle, which is not read: send .npy or safetensors")
    else:
        raise InvalidRequestError("its bytes are neither those of .npy nor of safetensors")
    return array[0] if array.ndim == 3 and len(array) == 1 else array


def _npy(data: bytes) -> npt.NDArray[Any]:
    """Array of a .npy file.

    NumPy's `load` would allocate what the header says, whatever data follows.
    """
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"version {version[0]}.{version[1]} of the format is unknown")
        shape, is_fortran, kind = read(file)
    except Exception as error:  # of ast and tokenize too
        raise InvalidRequestError(f"its .npy header is wrong: {error}") from None
    if kind.kind != "f" or kind.itemsize > 8:
        raise InvalidRequestError(f"its .npy array is of type {kind}; float16, float32 and float64 are read")
    numbers = _numbers(data[file.tell() :], kind, shape)
    return numbers.reshape(shape[::-1]).T if is_fortran else numbers.reshape(shape)


def _safetensors(data: bytes) -> npt.NDArray[Any]:
    n = int.from_bytes(data[:8], "little")
    try:
        if n > min(_MAX_HEADER, len(data) - 8):
            raise ValueError(f"it has {n} bytes")
        header = json.loads(data[8 : 8 + n])
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        if len(tensors) != 1:
            raise ValueError(f"it lists {len(tensors)} tensors, expected one")
        (entry,) = tensors.values()
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        kind = _SAFETENSORS.get(entry["dtype"])
        if kind is None:
            raise ValueError(f"type {entry['dtype']!r}; {', '.join(_SAFETENSORS)} are read")
        if not all(type(size) is int and size >= 0 for size in (*shape, start, stop)):
            raise ValueError(f"shape {shape} or offsets {start} and {stop}")
        if start or 8 + n + stop != len(data):
            raise ValueError(f"offsets {start} and {stop} of {len(data) - 8 - n} bytes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"its safetensors header is wrong: {error!r}") from None
    numbers = _numbers(data[8 + n :], kind, shape)
    return (from_bf16(numbers) if kind.kind == "u" else numbers).reshape(shape)


def _numbers(data: bytes, kind: np.dtype[Any], shape: Any) -> npt.NDArray[Any]:
    if math.prod(shape) * kind.itemsize != len(data):
        raise InvalidRequestError(f"its shape {tuple(shape)} of {kind} does not fit {len(data)} bytes of data")
    return np.frombuffer(data, kind)
