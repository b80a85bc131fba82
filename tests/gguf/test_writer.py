"""Writing of GGUF files: copies are equal to the last bit."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf_builder as b
from gguf_builder import Kind, Tensor
from llamacli.errors import ClosedError, InvalidRequestError
from llamacli.gguf import GGUFFile, TensorInfo, metadata_pair, open_gguf, write_gguf
from llamacli.quantization import TensorType
from suite import calls_at_most

PAIRS = [
    b.pair("u8", Kind.U8, 255),
    b.pair("i8", Kind.I8, -128),
    b.pair("u16", Kind.U16, 65535),
    b.pair("i16", Kind.I16, -32768),
    b.pair("u32", Kind.U32, 2**32 - 1),
    b.pair("i32", Kind.I32, -(2**31)),
    b.pair("f32", Kind.F32, 0.1),
    b.pair("bool", Kind.BOOL, b"\x02"),
    b.pair("string", Kind.STRING, b"not \xff UTF-8"),
    b.pair("u64", Kind.U64, 2**64 - 1),
    b.pair("i64", Kind.I64, -(2**63)),
    b.pair("f64", Kind.F64, 1e300),
    b.array_pair("strings", Kind.STRING, [b"a", "ü", "", b"\xfe"]),
    b.array_pair("numbers", Kind.I16, [1, -2, 3]),
    b.array_pair("none", Kind.F32, []),
]
TENSORS = [
    Tensor("scalar", []),
    Tensor("vector", [5]),
    Tensor("matrix", [32, 3], TensorType.Q4_0),
    Tensor("experts", [4, 3, 2], TensorType.F16),
    Tensor("empty", [0]),
    Tensor("last", [3], TensorType.I8),
]


def copy(file: GGUFFile) -> bytes:
    """Copy a file, with tensors written row by row."""

    def rows(info: TensorInfo) -> Iterator[np.ndarray]:
        yield from file.data(info.name)

    out = io.BytesIO()
    write_gguf(
        out, [file.pair(key) for key in file.metadata], list(file.tensors.values()), rows, alignment=file.alignment
    )
    return out.getvalue()


@given(
    alignment=st.sampled_from([8, 32, 64, 4096]),
    pairs=st.permutations(PAIRS),
    tensors=st.permutations(TENSORS),
)
def test_a_copy_is_the_same_file(alignment: int, pairs: list[bytes], tensors: list[Tensor], tmp_path_factory) -> None:
    content = b.gguf_bytes([b.alignment_pair(alignment), *pairs], tensors, alignment=alignment)
    path = tmp_path_factory.mktemp("writer") / "model.gguf"
    path.write_bytes(content)
    with open_gguf(path) as file:
        assert copy(file) == content


def test_older_version_is_written_as_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b.gguf_bytes(PAIRS, TENSORS, version=2))
    with open_gguf(path) as file:
        assert copy(file) == b.gguf_bytes(PAIRS, TENSORS, version=3)


def test_metadata_pair_round_trip(tmp_path: Path) -> None:
    assert metadata_pair("general.file_type", 15) == b.pair("general.file_type", Kind.U32, 15)


@pytest.mark.parametrize("n_bytes", [0, 12, 19, 21])
def test_a_tensor_must_have_all_its_bytes(n_bytes: int) -> None:
    info = TensorInfo("vector", (5,), TensorType.F32, 20)
    with pytest.raises(InvalidRequestError, match=f"'vector' has 20 bytes, {n_bytes} were given"):
        write_gguf(io.BytesIO(), [], [info], lambda _: [np.zeros(n_bytes, np.uint8)])


def test_pairs_end_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b.gguf_bytes(PAIRS))
    file = open_gguf(path)
    with pytest.raises(KeyError):
        file.pair("missing")
    file.close()
    with pytest.raises(ClosedError):
        file.pair("u8")


def test_a_large_vocabulary_takes_few_calls_a_token(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens = b.array_pair("tokenizer.ggml.tokens", Kind.STRING, [f"token {i}" for i in range(262144)])
    path.write_bytes(b.gguf_bytes([tokens, *PAIRS], TENSORS))
    with calls_at_most(4 * 262144), open_gguf(path) as file:
        assert copy(file) == path.read_bytes()
