"""Dump of llama.cpp's tensors, like llama-eval-callback's: `python -m llamacli.testing.dump MODEL --tokens 1 5 9`.

Of a mmproj file those of its encoder: `python -m llamacli.testing.dump MMPROJ --image FILE`, or `--audio FILE`.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from llamacli.media.encoder import Medium, content_of
from llamacli.media.pictures import Picture
from llamacli.media.sound import Sound
from llamacli.testing.peer import Peer
from llamacli.testing.peer_media import PeerEncoder, write_reader
from llamacli.tools.op_values import Recorded

_SHOWN = 3
"""Numbers at each end of an axis."""


class _Tensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml.h."""

    _fields_: ClassVar[list[Any]] = [
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64), ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]  # fmt: skip


_TYPES = {0: np.float32, 1: np.float16, 26: np.int32}
"""ggml's types that are printed: f32, f16, i32."""


def write_dump(model: Path, tokens: Sequence[int], out: IO[str]) -> None:
    """Evaluate tokens and print every tensor. Raises ImportError without llama-cpp-python."""
    with Peer(model, max(256, len(tokens)), on_tensor=_printer(out)) as peer:
        peer.eval(tokens)


def write_encoder_dump(mmproj: Path, medium: Medium, out: IO[str]) -> None:
    """Encode a medium and print every tensor. Raises ImportError without llama-cpp-python."""
    recorded = Recorded.of(mmproj)
    assert recorded.encoder is not None
    content = content_of(recorded.encoder, str(mmproj), medium)
    with tempfile.TemporaryDirectory() as folder:
        reader = write_reader(Path(folder) / "reader.gguf", recorded.graph.ops[-1].out.width)
        with Peer(reader, 256) as peer, PeerEncoder(peer, mmproj, on_tensor=_printer(out)) as encoder:
            encoder.encode(content)


def _printer(out: IO[str]) -> Callable[[int], None]:
    """Function that prints the tensor at an address."""
    import llama_cpp

    library: Any = llama_cpp.llama_cpp._lib
    for name in ("ggml_op_desc", "ggml_type_name"):
        getattr(library, name).restype = ctypes.c_char_p
    library.ggml_op_desc.argtypes = [ctypes.c_void_p]

    def on_tensor(address: int) -> None:
        tensor = _Tensor.from_address(address)
        if tensor.type not in _TYPES:
            return
        sources = [_Tensor.from_address(source) for source in tensor.src[:2] if source]
        operands = ", ".join(f"{source.name.decode()}{{{_sizes(source)}}}" for source in sources)
        kind, op = library.ggml_type_name(tensor.type).decode(), library.ggml_op_desc(address).decode()
        print(
            f"ggml_debug: {tensor.name.decode():>24} = ({kind}) {op:>10}({operands}}}) = {{{_sizes(tensor)}}}", file=out
        )
        _print_numbers(_array(tensor), out)

    return on_tensor


def _sizes(tensor: _Tensor) -> str:
    return ", ".join(str(size) for size in tensor.ne)


def _array(tensor: _Tensor) -> np.ndarray:
    """Numbers of a tensor, slowest axis first."""
    dtype = np.dtype(_TYPES[tensor.type])
    shape, strides = tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
    n_bytes = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_char * n_bytes).from_address(tensor.data)
    return np.ndarray(shape, dtype, memory, strides=strides)


def _print_numbers(array: np.ndarray, out: IO[str]) -> None:
    indent = " " * 37
    for cube in array:
        print(f"{indent}[", file=out)
        for matrix in _both_ends(cube):
            if matrix is None:
                print(f"{indent} ..., ", file=out)
                continue
            print(f"{indent} [", file=out)
            for row in _both_ends(matrix):
                numbers = [] if row is None else ["..." if x is None else f"{float(x):12.4f}" for x in _both_ends(row)]
                print(f"{indent}  [{', '.join(numbers)}]," if numbers else f"{indent}  ..., ", file=out)
            print(f"{indent} ],", file=out)
        print(f"{indent}]", file=out)
    print(f"{indent}sum = {float(np.sum(array, dtype=np.float64)):f}", file=out)


def _both_ends(items: Any) -> list[Any]:
    if len(items) <= 2 * _SHOWN:
        return list(items)
    return [*items[:_SHOWN], None, *items[-_SHOWN:]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--tokens", type=int, nargs="+", help="token ids")
    given.add_argument("--image", type=Path, help="picture for the encoder of a mmproj file")
    given.add_argument("--audio", type=Path, help="sound for the encoder of a mmproj file")
    options = parser.parse_args()
    if options.image:
        write_encoder_dump(options.model, Picture.of(options.image), sys.stdout)
    elif options.audio:
        write_encoder_dump(options.model, Sound.of(options.audio), sys.stdout)
    else:
        write_dump(options.model, options.tokens, sys.stdout)
