"""Importance matrices: llama.cpp's two file formats, and damaged files."""

import struct
from pathlib import Path

import numpy as np
import pytest

import gguf
from llamacli.conversion import Importance, ImportanceMatrix, read_imatrix, write_imatrix
from llamacli.errors import InvalidRequestError, ModelFormatError, ModelNotFoundError
from llamacli.gguf import TensorInfo, open_gguf
from llamacli.quantization import TensorType

SUMS = {"blk.0.attn_q.weight": np.arange(8, dtype=np.float32), "blk.1.ffn_up.weight": np.ones(4, np.float32)}


def dat(entries: dict[str, tuple[int, np.ndarray]], tail: bytes = b"") -> bytes:
    """The .dat format: name, number of chunks, means times it."""
    parts = [struct.pack("<i", len(entries))]
    for name, (n_calls, values) in entries.items():
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", n_calls, len(values))]
        parts.append(values.astype("<f4").tobytes())
    return b"".join(parts) + tail


def info(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, shape, TensorType.F32, 4 * int(np.prod(shape)))


@pytest.fixture
def matrix(tmp_path: Path) -> ImportanceMatrix:
    entries = {
        "blk.1.ffn_up_exps.weight": Importance(np.array([[2, 4], [0, 0], [9, 3]], np.float32), np.float32([2, 0, 3])),
        "blk.0.attn_q.weight": Importance(np.array([[8, 4]], np.float32), np.float32([4])),
    }
    return ImportanceMatrix(tmp_path / "imatrix.gguf", entries, ["a.txt", "b.txt"], 7, 512)


def test_written_file_is_read_back(matrix: ImportanceMatrix) -> None:
    write_imatrix(matrix)
    back = read_imatrix(matrix.path)
    assert (back.datasets, back.chunk_count, back.chunk_size) == (["a.txt", "b.txt"], 7, 512)
    assert list(back.entries) == sorted(matrix.entries)
    for name, entry in matrix.entries.items():
        np.testing.assert_array_equal(back.entries[name].sums, entry.sums)
        np.testing.assert_array_equal(back.entries[name].counts, entry.counts)


def test_file_has_the_keys_and_tensors_of_llama_cpp(matrix: ImportanceMatrix) -> None:
    write_imatrix(matrix)
    reader = gguf.GGUFReader(matrix.path)
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.datasets").contents() == ["a.txt", "b.txt"]
    assert reader.get_field("imatrix.chunk_count").contents() == 7
    assert reader.get_field("imatrix.chunk_size").contents() == 512
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors) == [
        "blk.0.attn_q.weight.in_sum2", "blk.0.attn_q.weight.counts",
        "blk.1.ffn_up_exps.weight.in_sum2", "blk.1.ffn_up_exps.weight.counts",
    ]  # fmt: skip
    assert tensors["blk.1.ffn_up_exps.weight.in_sum2"].shape.tolist() == [2, 3]
    assert tensors["blk.1.ffn_up_exps.weight.counts"].shape.tolist() == [1, 3]
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}


def test_means_are_sums_by_counts_and_one_where_nothing_was_counted(matrix: ImportanceMatrix) -> None:
    weights = matrix.weights(info("blk.1.ffn_up_exps.weight", 3, 5, 2))
    np.testing.assert_array_equal(weights, [[1, 2], [1, 1], [3, 1]])
    np.testing.assert_array_equal(matrix.weights(info("blk.0.attn_q.weight", 5, 2)), [[2, 1]])
    assert matrix.weights(info("blk.9.attn_q.weight", 5, 2)) is None


def test_stack_of_matrices_with_one_count(tmp_path: Path) -> None:
    entry = Importance(np.array([[2, 4, 6, 8]], np.float32), np.float32([2]))
    matrix = ImportanceMatrix(tmp_path / "m", {"blk.0.attn_k_b.weight": entry}, [], 1, 8)
    np.testing.assert_array_equal(matrix.weights(info("blk.0.attn_k_b.weight", 2, 3, 2)), [[1, 2], [3, 4]])


def test_entry_of_another_size_is_an_error(matrix: ImportanceMatrix) -> None:
    with pytest.raises(InvalidRequestError, match=r"imatrix.gguf: the entry of 'blk.0.attn_q.weight' has 2 numbers"):
        matrix.weights(info("blk.0.attn_q.weight", 5, 4))


@pytest.mark.parametrize("tail", [b"", struct.pack("<i", 5), struct.pack("<ii", 5, 5) + b"a.txt"])
def test_dat_format(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(dat({name: (5, 5 * values) for name, values in SUMS.items()}, tail))
    found = read_imatrix(path)
    assert found.entries.keys() == SUMS.keys()
    for name, values in SUMS.items():
        np.testing.assert_array_equal(found.entries[name].means, values)
    assert found.chunk_count == (5 if tail else 0)
    assert found.datasets == (["a.txt"] if len(tail) > 4 else [])


def test_truncated_dat_files(tmp_path: Path) -> None:
    path, whole = tmp_path / "imatrix.dat", dat({name: (1, values) for name, values in SUMS.items()})
    for size in range(0, len(whole), 5):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFormatError, match="it is no importance matrix, or truncated"):
            read_imatrix(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (dat({}), "the importance matrix has no entries"),
        (dat({"w": (1, np.empty(0))}), "the entry of 'w' has no numbers"),
        (dat({"w": (1, np.array([1, np.nan]))}), "the entry of 'w' has numbers that are negative or not finite"),
        (dat({"w": (1, np.array([1, -1]))}), "the entry of 'w' has numbers that are negative or not finite"),
        (b"text" * 10, "it is no importance matrix, or truncated"),
    ],
)
def test_damaged_dat_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=message):
        read_imatrix(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        read_imatrix(tmp_path / "none.gguf")


def test_model_file_is_no_importance_matrix(tiny_gguf) -> None:
    with pytest.raises(ModelFormatError, match="not 'imatrix': it is no importance matrix"):
        read_imatrix(tiny_gguf())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w.in_sum2": (2, 4)}, "'w.in_sum2' has no 'w.counts'"),
        ({"w.in_sum2": (2, 4), "w.counts": (3, 1)}, "'w.in_sum2' has 8 numbers for 3 counts"),
        ({"other": (2, 4)}, "the importance matrix has no entries"),
    ],
)
def test_damaged_gguf_files(tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str) -> None:
    path = tmp_path / "imatrix.gguf"
    writer = gguf.GGUFWriter(path, "none")
    writer.add_type("imatrix")
    for name, shape in tensors.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match=message):
        read_imatrix(path)


@pytest.mark.parametrize("value", [5, True, "a.txt", [1, 2]])
def test_datasets_that_are_no_list_of_strings(tmp_path: Path, value: object) -> None:
    path = tmp_path / "imatrix.gguf"
    writer = gguf.GGUFWriter(path, "none")
    writer.add_type("imatrix")
    writer.add_key_value("imatrix.datasets", value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("w.in_sum2", np.ones((1, 4), np.float32))
    writer.add_tensor("w.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match=r"imatrix.gguf: imatrix.datasets is .*, not a list of strings"):
        read_imatrix(path)


def test_existing_file_is_kept(matrix: ImportanceMatrix) -> None:
    matrix.path.write_text("precious")
    with pytest.raises(InvalidRequestError, match="exists"):
        write_imatrix(matrix)
    assert matrix.path.read_text() == "precious"
    write_imatrix(matrix, overwrite=True)
    with open_gguf(matrix.path) as file:
        assert len(file.tensors) == 4
