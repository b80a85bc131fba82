"""Record llama.cpp's squared activations of tiny models: `python -m oracle.importance`.

The method is that of its imatrix tool, on the tensors that its evaluation callback shows: of the inputs of matrix
products the squares are summed, of products with experts by expert.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tiny_variants
from llamacli.testing.dump import _array, _Tensor
from llamacli.testing.peer import Peer
from oracle import goldens

PATH = goldens.DIRECTORY / "importance.json"
"""By variant and tensor: the number of rows by expert, and for each expert the sum of all squares and some of them."""

VARIANTS = ("gqa", "moe_4_1", "hunyuan_moe", "deepseek2")
TOKENS = np.random.RandomState(3).randint(3, 128, 32).tolist()
STEP = 9
"""Every so many columns are recorded."""

Sums = dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]


def peer_sums(path: Path) -> Sums:
    """Sums of squares and numbers of rows of a file's tensors."""
    import llama_cpp

    library: Any = llama_cpp.llama_cpp._lib
    library.ggml_op_desc.restype, library.ggml_op_desc.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    found: Sums = {}

    def on_tensor(address: int) -> None:
        tensor = _Tensor.from_address(address)
        if library.ggml_op_desc(address) not in (b"MUL_MAT", b"MUL_MAT_ID"):
            return
        weight, x = (_Tensor.from_address(source) for source in tensor.src[:2])
        name = weight.name.decode()
        if not name.startswith("blk."):
            return
        rows = _array(x)[0].astype(np.float64)
        if library.ggml_op_desc(address) == b"MUL_MAT":
            # A stack has a matrix for each head of the input, and one count.
            n_heads = weight.ne[2]
            squares = np.square(rows).reshape(-1, n_heads, *rows.shape[1:]).sum(axis=(0, 2)).reshape(1, -1)
            entry = found.setdefault(name, (np.zeros_like(squares), np.zeros(1, np.int64)))
            entry[0][:] += squares
            entry[1][:] += rows.shape[0] * rows.shape[1] // n_heads
            return
        chosen = _array(_Tensor.from_address(tensor.src[2]))[0, 0]
        entry = found.setdefault(name, (np.zeros((weight.ne[2], rows.shape[-1])), np.zeros(weight.ne[2], np.int64)))
        for token, experts in enumerate(chosen):
            for slot, expert in enumerate(experts):
                entry[0][expert] += np.square(rows[token, slot % rows.shape[1]])
                entry[1][expert] += 1

    with Peer(path, 256, on_tensor=on_tensor) as peer:
        peer.eval(TOKENS)
    return found


def summary(sums: npt.NDArray[np.floating[Any]]) -> list[list[float]]:
    """For each matrix the sum of all squares, then some of them."""
    return [[float(f"{x:.7g}") for x in (row.sum(), *row[::STEP])] for row in sums]


def _record() -> None:
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            path = tiny_variants.write(Path(folder) / f"{variant}.gguf", variant)
            golden[variant] = {
                name: {"counts": counts.tolist(), "squares": summary(sums)}
                for name, (sums, counts) in sorted(peer_sums(path).items())
            }
    PATH.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    _record()
