"""Errors of llama.cpp's quantizers with importance matrices: `python -m oracle.importance_quantizers`.

They are those of its function ggml_quantize_chunk. The tables of some types take it up to a minute to make. With
`--compare`, prints the share of llama.cpp's error that ours has: the mean over the samples and the largest.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamacli.quantization import BLOCK_FORMATS, CODEBOOK_TYPES, TensorType, codebook, dequantize, nbytes
from oracle.goldens import DIRECTORY
from oracle.quantizers import Matrix, matrices

GOLDEN = DIRECTORY / "importance_quantizers.json"
KINDS = {"plain": CODEBOOK_TYPES, "weighted": (*BLOCK_FORMATS, *CODEBOOK_TYPES)}
"""Types of which errors are recorded, without and with weights."""

_ROWS = 16
_NEED_WEIGHTS = (TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ2_S, TensorType.IQ1_S, TensorType.IQ1_M)
"""Types that the peer quantizes with weights only: without an importance matrix they are ones."""


def samples() -> dict[str, Matrix]:
    """Random matrices, float32 [16, 1024], by the name of their distribution."""
    return {name: x[:_ROWS] for name, x in matrices("random").items()}


def weights_of(case: str) -> Matrix | None:
    """Weights of the columns, float32 [1024], of a case of KINDS."""
    spread = np.random.default_rng(1).normal(size=1024)
    return np.exp(1.5 * spread).astype(np.float32) if case == "weighted" else None


def weighted_rmse(x: Matrix, y: Matrix, weights: Matrix | None) -> float:
    """Root of the weighted mean of squared differences."""
    squares = (x.astype(np.float64) - y) ** 2
    return float(np.sqrt(np.average(squares.mean(axis=0), weights=weights)))


@functools.cache
def _library() -> ctypes.CDLL:
    import llama_cpp

    library = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("*ggml-base*"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
    ]  # fmt: skip
    return library


def peer_quantized(kind: TensorType, x: Matrix, weights: Matrix | None) -> npt.NDArray[np.float32]:
    """Quantize with llama.cpp, and dequantize."""
    n_rows, width = x.shape
    raw = np.zeros((n_rows, nbytes(kind, (width,))), np.uint8)
    if weights is None and kind in _NEED_WEIGHTS:
        weights = np.ones(width, np.float32)
    _library().ggml_quantize_init(int(kind))
    _library().ggml_quantize_chunk(
        int(kind), x.ctypes.data, raw.ctypes.data, 0, n_rows, width, None if weights is None else weights.ctypes.data
    )
    return dequantize(raw, kind)


def peer_errors(case: str, kind: TensorType) -> dict[str, float]:
    """Errors of llama.cpp by sample."""
    weights = weights_of(case)
    return {name: weighted_rmse(x, peer_quantized(kind, x, weights), weights) for name, x in samples().items()}


def _record() -> None:
    golden = {
        case: {
            kind.name: {name: float(f"{error:.7g}") for name, error in peer_errors(case, kind).items()}
            for kind in kinds
        }
        for case, kinds in KINDS.items()
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


def _compare() -> None:
    from llamacli.kernels.codebook_encoding import encode_codebook
    from llamacli.kernels.encoding import encode
    from llamacli.kernels.team import Team

    golden, team, exact = json.loads(GOLDEN.read_text()), Team(1), samples()
    print("| type | plain | weighted |\n|---|---:|---:|")
    for kind in KINDS["weighted"]:
        cells = []
        for case in KINDS:
            weights, shares = weights_of(case), []
            for name, error in golden[case].get(kind.name, {}).items():
                x = exact[name]
                if kind in BLOCK_FORMATS:
                    raw = BLOCK_FORMATS[kind].pack(encode(team, BLOCK_FORMATS[kind], x, weights))
                else:
                    raw = codebook(kind).pack(encode_codebook(team, codebook(kind), x, weights))
                shares.append(weighted_rmse(x, dequantize(raw.reshape(len(x), -1), kind), weights) / error)
            cells.append(f"{np.mean(shares):.3f}, {max(shares):.3f}" if shares else "")
        print(f"| {kind.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", action="store_true", help="compare with what was recorded")
    if parser.parse_args().compare:
        _compare()
    else:
        _record()
