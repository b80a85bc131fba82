"""Malformed files: a ModelFormatError or a correct result."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf_builder as b
from gguf_builder import Kind, Tensor
from llamacli.errors import ModelFormatError
from llamacli.gguf import is_gguf, open_gguf
from llamacli.gguf.header import parse_header
from llamacli.quantization import TensorType
from suite import calls_at_most, examples

SMALL = b.gguf_bytes(
    [
        b.pair("general.architecture", Kind.STRING, "tiny"),
        b.alignment_pair(8),
        b.pair("tiny.eps", Kind.F32, 1e-5),
        b.array_pair("tokens", Kind.STRING, ["a", "", "é"]),
        b.array_pair("types", Kind.I32, [1, 2, 3]),
        b.array_pair("flags", Kind.BOOL, [True, False]),
    ],
    [Tensor("w", [32, 2], TensorType.Q8_0), Tensor("empty", [4, 0]), Tensor("bias", [6])],
    alignment=8,
)


def read_all(path: Path) -> None:
    with open_gguf(path) as file:
        for value in file.metadata.values():
            if not isinstance(value, bool | int | float):
                list(value)
        for name, info in file.tensors.items():
            assert file.data(name).size == info.n_bytes
            assert file.tensor(name).shape == info.shape


def array_of(kind: int, length: int, body: bytes = b"") -> bytes:
    return b.text("a") + b.u32(Kind.ARRAY) + b.u32(kind) + b.u64(length) + body


def tensor_file(*tensors: Tensor) -> bytes:
    return b.gguf_bytes(tensors=tensors)


ADVISORIES = {
    "43 bytes with 2^63 numbers (PR 27188)": (b.gguf_bytes([array_of(Kind.U32, 2**63)])[:43], "metadata key 'a'"),
    "2^30 numbers that are not there": (b.gguf_bytes([array_of(Kind.U8, 2**30)]), f"'a' needs {2**30} bytes"),
    "2^30 strings that are not there": (b.gguf_bytes([array_of(Kind.STRING, 2**30)]), f"'a' has {2**30} strings"),
    "more than 2^30 strings": (b.gguf_bytes([array_of(Kind.STRING, 2**61)]), f"'a' has {2**61} elements"),
    "string in an array beyond the end": (
        b.gguf_bytes([array_of(Kind.STRING, 3, b.text("x") + b.text("y", -8) + b.text("z"))]),
        "'a': string 1 of 3",
    ),
    "array of arrays (huggingface.js 2028)": (
        b.gguf_bytes([array_of(Kind.ARRAY, 1, b.u32(Kind.ARRAY) * 99)]),
        "'a' is an array of arrays",
    ),
    "array of an unknown type": (b.gguf_bytes([array_of(13, 1, bytes(8))]), "'a' is an array of the unknown type 13"),
    "alignment 0 (CVE-2025-0317)": (b.gguf_bytes([b.alignment_pair(0)]), "general.alignment is 0"),
    "alignment 2^31": (b.gguf_bytes([b.alignment_pair(2**31)]), f"general.alignment is {2**31}"),
    "alignment as an array": (b.gguf_bytes([b.array_pair("general.alignment", Kind.U32, [32])]), "general.alignment"),
    "n_kv (CVE-2024-23605)": (b.gguf_bytes(n_kv=2**61), f"{2**61} metadata keys"),
    "n_tensors (CVE-2024-21802)": (b.gguf_bytes(n_tensors=2**62 + 1), f"{2**62 + 1} tensors"),
    "product of dimensions wraps to 4": (
        tensor_file(Tensor("t", [4194305, 4194305, 211106198978564], data=bytes(16))),
        "'t'.*shape",
    ),
    "10^6 dimensions": (tensor_file(Tensor("t", n_dims=10**6)), "'t' has 1000000 dimensions"),
    "empty along one dimension, endless along others": (
        tensor_file(Tensor("t", [0, 2**40, 2**40], data=b"")),
        "'t'.*shape",
    ),
    "size plus padding wraps (CVE-2025-53630)": (
        tensor_file(Tensor("t", [2**60 - 1], TensorType.I8, data=b""), Tensor("u", offset=0)),
        f"'u' has offset 0, not {2**60}",
    ),
    "sum of sizes wraps (CVE-2026-33298)": (
        tensor_file(
            *(Tensor(f"t{i}", [2**59 - 1], TensorType.F64, i * 2**62, b"") for i in range(4)), Tensor("u", offset=0)
        ),
        f"'u' has offset 0, not {2**64}",
    ),
    "tensor beyond the end (CVE-2026-7482)": (
        tensor_file(Tensor("t", [2**32], data=bytes(64))),
        "'t' ends at byte .* beyond the end",
    ),
    "two tensors share an offset": (tensor_file(Tensor("t"), Tensor("u", offset=0)), "'u' has offset 0, not 32"),
    "a gap between tensors": (tensor_file(Tensor("t"), Tensor("u", offset=64)), "'u' has offset 64, not 32"),
    "row is no whole number of blocks": (
        tensor_file(Tensor("t", [33], TensorType.Q8_0, data=bytes(64))),
        "'t' with shape.*33.*Q8_0.*32",
    ),
    "scalar of a block type": (tensor_file(Tensor("t", [], TensorType.Q4_K, data=bytes(144))), "'t' with shape"),
    "removed tensor type Q4_2": (tensor_file(Tensor("t", type=4, data=bytes(16))), "'t' has the unknown type 4"),
    "tensor type -1": (tensor_file(Tensor("t", type=-1, data=bytes(16))), "'t' has the unknown type 4294967295"),
    "key that is not UTF-8": (b.gguf_bytes([b.pair(b"\xff\xfe", Kind.U8, 1)]), "metadata key 0 is not UTF-8"),
    "endless key": (b.gguf_bytes([b.pair("k" * 65536, Kind.U8, 1)]), "metadata key 0 has 65536 bytes"),
    "tensor name that is not UTF-8": (tensor_file(Tensor(b"\xc3")), "name of tensor 0 is not UTF-8"),
    "big endian": (
        b"GGUF" + (3).to_bytes(4, "big") + bytes(16),
        "big-endian",
    ),
    "another format": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "a text file": (b"hello", "not a GGUF file"),
    "two bytes": (b"GG", "not a GGUF file"),
    "only the magic": (b"GGUF", "truncated: version"),
    "nothing": (b"", "empty"),
}


@pytest.mark.parametrize("name", ADVISORIES)
def test_known_attack_is_rejected_at_once(name: str, tmp_path: Path) -> None:
    content, message = ADVISORIES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with calls_at_most(1000), pytest.raises(ModelFormatError, match=rf"bad\.gguf: .*{message}"):
        open_gguf(path)


def test_long_key_and_value_do_not_flood_the_message() -> None:
    with pytest.raises(ModelFormatError) as caught:
        parse_header(b.gguf_bytes([b.pair("k" * 60000, 99, b"")]), "x")
    assert len(str(caught.value)) < 200
    with pytest.raises(ModelFormatError) as caught:
        parse_header(b.gguf_bytes([b.pair(b"\xff" * 60000, Kind.U8, 1)]), "x")
    assert len(str(caught.value)) < 500


def test_unreadable_path(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"absent\.gguf: no such file$"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        open_gguf(tmp_path)
    with pytest.raises(ModelFormatError, match="cannot read the file"):
        open_gguf(str(tmp_path / "nul\0.gguf"))
    assert not is_gguf(tmp_path / "absent.gguf")
    assert not is_gguf(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFormatError, match=r"pipe\.gguf: not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")
    assert not is_gguf(tmp_path / "pipe.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(SMALL)
    path.chmod(0)
    with pytest.raises(ModelFormatError, match=r"secret\.gguf: cannot read the file: .*denied"):
        open_gguf(path)
    assert not is_gguf(path)


def test_every_truncation_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(SMALL)
    read_all(path)
    for length in reversed(range(len(SMALL))):
        os.truncate(path, length)
        with pytest.raises(ModelFormatError):
            open_gguf(path)


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be truncated")
def test_file_truncated_while_open_is_noticed_before_the_data_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "shrinking.gguf"
    path.write_bytes(SMALL)
    with open_gguf(path) as file:
        file.data("bias")
        os.truncate(path, 100)
        with pytest.raises(ModelFormatError, match=r"shrinking\.gguf: .*truncated.*'bias'"):
            file.data("bias")


SPECIAL = [0, 1, 7, 8, 9, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
mutations = st.lists(
    st.tuples(
        st.integers(0, len(SMALL) - 1),
        st.sampled_from([0, 1, 4, 8]),
        st.binary(max_size=4) | st.sampled_from(SPECIAL).map(b.u64) | st.sampled_from(SPECIAL).map(b.u32),
    ),
    min_size=1,
    max_size=3,
)


@examples(300)
@given(mutations)
def test_mutated_file_is_rejected_or_read(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, bytes]]
) -> None:
    content = bytearray(SMALL)
    for position, n_replaced, replacement in changes:
        content[position : position + n_replaced] = replacement
    path = tmp_path_factory.getbasetemp() / "mutant.gguf"
    path.write_bytes(content)
    message = ""
    try:
        read_all(path)
    except ModelFormatError as error:
        message = str(error)
    assert not message or message.startswith(f"{path}: ")
