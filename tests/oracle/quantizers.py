"""llama.cpp's quantization errors, recorded as bounds: `python -m oracle.quantizers`.

With `--compare`, prints for every source and type the share of llama.cpp's error that ours has: the smallest, the mean
and the largest over its tensors.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import gguf
from llamacli.gguf import open_gguf
from llamacli.quantization import BLOCK_FORMATS, TensorType
from oracle.goldens import DIRECTORY, sha256

Matrix = npt.NDArray[np.float32]

_ROOT = Path(__file__).resolve().parents[2]
GOLDEN = DIRECTORY / "quantizers.json"
SOURCES = {
    "random": None,
    "demo": _ROOT / "core" / "llamacli" / "data" / "demo.gguf",
    "stories260K": _ROOT.parent / "shared" / "models" / "stories260K.gguf",
    "TinyStories-656K": _ROOT.parent / "shared" / "models" / "TinyStories-656K.Q8_0.gguf",
}
"""Where the tensors come from: drawn, or a model's, made float32 first."""

_WIDTH = 256
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12,
    "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K": 15, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K": 17, "Q5_K_S": 16,
    "Q5_K_M": 17, "Q6_K": 18, "BF16": 32, "Q2_K_S": 21, "IQ4_NL": 25, "IQ4_XS": 30, "IQ3_M": 27, "IQ3_S": 26,
    "IQ3_XS": 22, "IQ3_XXS": 23, "IQ2_M": 29, "IQ2_S": 28, "IQ2_XS": 20, "IQ2_XXS": 19, "IQ1_M": 31, "IQ1_S": 24,
    "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38, "NVFP4": 39,
}  # fmt: skip
"""llama.cpp's numbers of its file types."""


def rmse(x: Matrix, y: Matrix) -> float:
    """The root of the mean squared difference."""
    return float(np.sqrt(np.mean((x.astype(np.float64) - y) ** 2)))


def matrices(source: str) -> dict[str, Matrix]:
    """Matrices of a source by name, with rows regrouped to 256 numbers."""
    path = SOURCES[source]
    return dict(_drawn() if path is None else _of_a_model(path))


def _drawn() -> Iterator[tuple[str, Matrix]]:
    random, shape = np.random.default_rng(0), (64, 1024)
    columns = np.exp(random.normal(size=(1, 1024)))
    for name, x in {
        "normal": random.normal(size=shape),
        "laplace": random.laplace(size=shape),
        "heavy": random.standard_t(3, size=shape),
        "uniform": random.uniform(-1, 1, size=shape),
        "offset": random.normal(1, 1, size=shape),
        "one_sided": random.exponential(size=shape),
        "columns": random.normal(size=shape) * columns,
    }.items():
        yield name, (x * 0.02).astype(np.float32)


def _of_a_model(path: Path) -> Iterator[tuple[str, Matrix]]:
    with open_gguf(path) as file:
        for name, info in file.tensors.items():
            if len(info.shape) > 1:
                yield name.removesuffix(".weight"), file.tensor(name).reshape(-1, _WIDTH)


def write_model(path: Path, tensors: dict[str, tuple[Any, ...] | Matrix], **metadata: int) -> None:
    """Write a file with all that llama.cpp's quantizer reads: names, shapes, keys.

    A shape stands for zeros.
    """
    writer = gguf.GGUFWriter(path, "llama")
    keys = {"block_count": 1, "context_length": 8, "embedding_length": 256, "feed_forward_length": 256}
    for key, value in (keys | {"attention.head_count": 8} | metadata).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", np.zeros(tensor, np.float32) if isinstance(tensor, tuple) else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peer_quantize(
    source: Path,
    target: Path,
    file_type: str,
    *,
    pure: bool = False,
    importance: dict[str, Matrix] | None = None,
    overrides: Sequence[tuple[str, int]] = (),
) -> None:
    """Quantize a file with llama.cpp.

    `importance` are weights of columns by tensor, float32 [n_matrices * n_columns], `overrides` types by regex.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    if importance:
        entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()
        for entry, (name, weights) in zip(entries, importance.items(), strict=False):
            data = weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            entry.name, entry.data, entry.size = name.encode(), data, weights.size
        params.imatrix = entries
    if overrides:
        types = (llama_cpp.llama_model_tensor_override * (len(overrides) + 1))()
        for entry, (pattern, kind) in zip(types, overrides, strict=False):
            entry.pattern, entry.type = pattern.encode(), kind
        params.tt_overrides = types
    params.ftype, params.pure, params.allow_requantize, params.nthread = FILE_TYPES[file_type], pure, True, 2
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise SystemExit(f"the peer does not quantize {source} to {file_type}")


def _peer_errors(source: str, kind: TensorType, folder: Path) -> dict[str, float]:
    exact = matrices(source)
    path, quantized = folder / "exact.gguf", folder / "quantized.gguf"
    write_model(path, dict(exact))
    peer_quantize(path, quantized, kind.name, pure=True)
    with open_gguf(quantized) as file:
        assert {info.type for info in file.tensors.values()} == {kind}
        return {name: rmse(x, file.tensor(f"{name}.weight").reshape(x.shape)) for name, x in exact.items()}


def fingerprint(source: str) -> str:
    """Hash of the matrices whose errors were recorded."""
    path = SOURCES[source]
    return "drawn" if path is None else sha256(path)


def _record() -> None:
    golden = {
        source: {"sha256": fingerprint(source)}
        | {
            kind.name: {name: float(f"{error:.7g}") for name, error in _errors(source, kind).items()}
            for kind in BLOCK_FORMATS
        }
        for source in SOURCES
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


def _errors(source: str, kind: TensorType) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return _peer_errors(source, kind, Path(folder))


def _compare() -> None:
    from llamacli.kernels.encoding import encode
    from llamacli.kernels.team import Team
    from llamacli.quantization import dequantize

    golden, team = json.loads(GOLDEN.read_text()), Team(1)
    print("| source | type | least | mean | most |\n|---|---|---:|---:|---:|")
    for source, by_type in golden.items():
        exact = matrices(source)
        for kind, fmt in BLOCK_FORMATS.items():
            shares = []
            for name, x in exact.items():
                raw = fmt.pack(encode(team, fmt, x)).reshape(len(x), -1)
                ours, theirs = rmse(x, dequantize(raw, kind)), by_type[kind.name][name]
                shares.append(1.0 if ours == theirs == 0 else ours / max(theirs, 1e-12))
            print(f"| {source} | {kind.name} | {min(shares):.4f} | {np.mean(shares):.4f} | {max(shares):.4f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", action="store_true", help="compare with what was recorded")
    if parser.parse_args().compare:
        _compare()
    else:
        _record()
