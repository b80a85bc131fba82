"""Reading of valid GGUF files."""

import sys
from pathlib import Path

import numpy as np
import pytest

import gguf
import gguf_builder as b
from gguf_builder import Kind, Tensor
from llamacli.errors import ClosedError, ModelFormatError
from llamacli.gguf import StringArray, TensorInfo, is_gguf, open_gguf
from llamacli.quantization import TensorType
from suite import calls_at_most

VOCABULARY = Path(__file__).parents[3] / "shared" / "vocab" / "ggml-vocab-gemma-4.gguf"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def write_with_gguf(path: Path, tensors: dict[str, np.ndarray], alignment: int | None = None) -> None:
    writer = gguf.GGUFWriter(path, "tiny")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("str", "Grüße, 世界 🙂")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False, True])
    writer.add_array("strings", ["a", "ü", "世界"])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_reads_files_of_the_gguf_package(path: Path, alignment: int | None) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {
        "vector": rng.standard_normal(5).astype(np.float32),
        "matrix": rng.standard_normal((3, 4)).astype(np.float16),
        "experts": rng.standard_normal((2, 3, 4)).astype(np.float32),
        "ids": rng.integers(0, 100, (3, 1)).astype(np.int32),
    }
    write_with_gguf(path, tensors, alignment)
    assert is_gguf(path)
    with open_gguf(path) as file:
        assert file.path == path
        assert file.version == 3
        assert file.alignment == (alignment or 32)
        assert file.n_bytes == path.stat().st_size
        scalars = {key: value for key, value in file.metadata.items() if isinstance(value, bool | int | float | str)}
        scalars.pop("general.alignment", None)
        assert scalars == {
            "general.architecture": "tiny",
            "u8": 255,
            "i8": -128,
            "u16": 65535,
            "i16": -32768,
            "u32": 2**32 - 1,
            "i32": -(2**31),
            "u64": 2**64 - 1,
            "i64": -(2**63),
            "f32": float(np.float32(0.1)),
            "f64": 0.1,
            "bool": True,
            "str": "Grüße, 世界 🙂",
        }
        assert {key: type(value) for key, value in scalars.items()} == {
            **dict.fromkeys(["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"], int),
            **dict.fromkeys(["f32", "f64"], float),
            **dict.fromkeys(["general.architecture", "str"], str),
            "bool": bool,
        }
        assert file.metadata["ints"].tolist() == [1, -2, 3]
        assert file.metadata["floats"].tolist() == [0.5, -1.5]
        assert file.metadata["bools"].tolist() == [True, False, True]
        assert file.metadata["strings"] == ["a", "ü", "世界"]
        for key in ("ints", "floats", "bools"):
            assert not file.metadata[key].flags.writeable
        assert list(file.tensors) == list(tensors)
        for name, values in tensors.items():
            info = file.tensors[name]
            assert info.shape == values.shape
            assert info.n_bytes == values.nbytes
            np.testing.assert_array_equal(file.tensor(name), values.astype(np.float32))
            assert file.tensor(name).dtype == np.float32


def test_data_has_one_row_per_row_of_every_expert(path: Path) -> None:
    path.write_bytes(
        b.gguf_bytes(
            tensors=[
                Tensor("vector", [64], TensorType.Q8_0),
                Tensor("matrix", [64, 3], TensorType.Q8_0),
                Tensor("experts", [64, 3, 2], TensorType.Q8_0),
                Tensor("scalar", []),
                Tensor("no_rows", [64, 0], TensorType.Q8_0),
                Tensor("no_columns", [0, 3], TensorType.Q8_0),
            ]
        )
    )
    with open_gguf(path) as file:
        shapes = {name: file.data(name).shape for name in file.tensors}
        assert shapes == {
            "vector": (1, 68),
            "matrix": (3, 68),
            "experts": (6, 68),
            "scalar": (1, 4),
            "no_rows": (0, 68),
            "no_columns": (3, 0),
        }
        assert {name: file.tensor(name).shape for name in file.tensors} == {
            "vector": (64,),
            "matrix": (3, 64),
            "experts": (2, 3, 64),
            "scalar": (),
            "no_rows": (0, 64),
            "no_columns": (3, 0),
        }
        assert file.tensors["experts"] == TensorInfo(
            "experts", (2, 3, 64), TensorType.Q8_0, 408, file.tensors["experts"].offset
        )
        raw = file.data("matrix")
        assert not raw.flags.writeable
        assert raw.ravel().tolist() == [i % 256 for i in range(204)]


def test_tensors_need_no_alignment(path: Path) -> None:
    tensors = [Tensor("odd", [3], TensorType.I8), Tensor("floats", [2, 2], data=np.arange(4, dtype="<f4").tobytes())]
    path.write_bytes(b.gguf_bytes([b.alignment_pair(1)], tensors, alignment=1))
    with open_gguf(path) as file:
        assert file.tensors["floats"].offset == file.tensors["odd"].offset + 3
        assert file.tensor("floats").tolist() == [[0, 1], [2, 3]]
        assert file.tensor("odd").tolist() == [0, 1, 2]


def test_version_2(path: Path) -> None:
    path.write_bytes(b.gguf_bytes([b.pair("a", Kind.U32, 7)], [Tensor("t")], version=2))
    with open_gguf(path) as file:
        assert (file.version, file.metadata["a"], file.data("t").shape) == (2, 7, (1, 16))


def test_padding_after_the_last_tensor_may_be_missing(path: Path) -> None:
    """llama.cpp's loader accepts such files, and some writers make them."""
    content = b.gguf_bytes(tensors=[Tensor("t", [5])])
    path.write_bytes(content[: -(32 - 20)])
    with open_gguf(path) as file:
        assert file.data("t").size == 20
    path.write_bytes(content[: -(32 - 20) - 1])
    with pytest.raises(ModelFormatError, match="'t' ends at byte"):
        open_gguf(path)


def test_strings_that_are_not_utf8_can_still_be_read(path: Path) -> None:
    pairs = [b.pair("s", Kind.STRING, b"a\xffb"), b.array_pair("a", Kind.STRING, [b"\xe4", "ok"])]
    path.write_bytes(b.gguf_bytes(pairs))
    with open_gguf(path) as file:
        assert file.metadata["s"] == "a\ufffdb"
        assert file.metadata["a"] == ["\ufffd", "ok"]


def test_any_byte_but_0_is_true(path: Path) -> None:
    path.write_bytes(b.gguf_bytes([b.pair("b", Kind.BOOL, b"\x35"), b.array_pair("a", Kind.U8, [0, 1, 0x35])]))
    content = bytearray(path.read_bytes())
    content[content.index(b.u64(3) + b"\0\1\x35") - 4] = Kind.BOOL
    path.write_bytes(content)
    with open_gguf(path) as file:
        assert file.metadata["b"] is True
        assert file.metadata["a"].view(np.uint8).tolist() == [0, 1, 1]


def test_string_array_is_a_sequence(path: Path) -> None:
    tokens = ["", "a", "bc", "", "ü"]
    path.write_bytes(b.gguf_bytes([b.array_pair("tokens", Kind.STRING, tokens), b.array_pair("e", Kind.STRING, [])]))
    with open_gguf(path) as file:
        found, empty = file.metadata["tokens"], file.metadata["e"]
    assert isinstance(found, StringArray)
    assert list(found) == tokens
    assert [found[i] for i in range(-5, 5)] == tokens + tokens
    assert found[1:4] == tokens[1:4]
    assert found[::-2] == tokens[::-2]
    assert found.index("bc") == 2
    assert "ü" in found
    assert found.last_places(["", "ü", "bc", "cb", "x"]) == {"ü": 4, "bc": 2}
    assert empty.last_places(["a"]) == {}
    assert found == tokens
    assert tokens == found
    assert found != tokens[:-1]
    assert found != [*tokens[:-1], "x"]
    assert found != "abc"
    assert len(empty) == 0
    assert list(empty) == []
    with pytest.raises(IndexError):
        found[5]
    with pytest.raises(IndexError):
        empty[-1]


def test_closed_file_keeps_metadata_and_arrays_but_gives_no_more(path: Path) -> None:
    path.write_bytes(b.gguf_bytes([b.array_pair("tokens", Kind.STRING, ["x"])], [Tensor("t")]))
    with open_gguf(path) as file:
        raw = file.data("t")
    file.close()
    assert raw.tolist() == [list(range(16))]
    assert file.metadata["tokens"] == ["x"]
    for use in (file.data, file.tensor, file.release):
        with pytest.raises(ClosedError, match=r"model\.gguf"):
            use("t")


def test_missing_tensor_is_named(path: Path) -> None:
    path.write_bytes(b.gguf_bytes())
    with open_gguf(path) as file, pytest.raises(ModelFormatError, match=r"model\.gguf: tensor 'w' is missing"):
        file.data("w")


def test_tensor_of_a_type_without_dequantizer_is_named(path: Path) -> None:
    path.write_bytes(b.gguf_bytes(tensors=[Tensor("w", [32], TensorType.Q8_1)]))
    with open_gguf(path) as file, pytest.raises(ModelFormatError, match=r"model\.gguf: tensor 'w': .*Q8_1"):
        file.tensor("w")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_released_pages_are_given_back_and_come_back(path: Path) -> None:
    n_bytes = 64 << 20
    path.write_bytes(b.gguf_bytes(tensors=[Tensor("t", [n_bytes], TensorType.I8, data=bytes(n_bytes - 1) + b"\1")]))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with open_gguf(path) as file:
        before = resident()
        raw = file.data("t")
        assert int(raw.sum()) == 1
        assert resident() - before > n_bytes // 2
        file.release("t")
        assert resident() - before < n_bytes // 8
        assert int(raw.sum()) == 1


@pytest.mark.skipif(not VOCABULARY.exists(), reason="the real vocabularies are not part of the project")
def test_real_vocabulary_is_read_with_few_calls_a_token() -> None:
    with calls_at_most(16 * 262144), open_gguf(VOCABULARY) as file:
        tokens = list(file.metadata["tokenizer.ggml.tokens"])
    assert len(tokens) == 262144
    assert tokens[:3] == ["<pad>", "<eos>", "<bos>"]
