"""The 34 cases of llama.cpp's tests/test-gguf.cpp, with random content."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gguf_builder as b
from gguf_builder import Kind, Tensor
from llamacli.errors import ModelFormatError
from llamacli.gguf import open_gguf
from llamacli.gguf.header import parse_header
from llamacli.quantization import FORMATS, TensorType
from suite import calls_at_most

Random = np.random.Generator


def random_pairs(rng: Random) -> list[bytes]:
    """Keys of every type, scalars and arrays, with random bytes as values.

    Strings are mostly not UTF-8.
    """
    pairs = []
    for i, kind in enumerate([*Kind, *Kind]):
        if kind == Kind.ARRAY:
            continue
        is_array = i >= len(Kind)
        length = int(rng.integers(0, 16)) if is_array else 1
        if kind == Kind.STRING:
            body = b"".join(b.text(rng.bytes(int(rng.integers(0, 40)))) for _ in range(length))
        else:
            body = rng.bytes(length * struct.calcsize(b.NUMBERS[kind]))
        key = b.text(f"my_key_{i}")
        pairs.append(key + (b.u32(Kind.ARRAY) + b.u32(kind) + b.u64(length) if is_array else b.u32(kind)) + body)
    return pairs


def random_tensors(rng: Random) -> list[Tensor]:
    """Tensors of every type with one to four dimensions.

    The last one ends without padding at any alignment.
    """
    tensors = []
    for i, fmt in enumerate(FORMATS[type_] for type_ in TensorType):
        ne = [int(rng.integers(1, 5)) * fmt.block_size, *map(int, rng.integers(1, 6, rng.integers(0, 4)))]
        tensors.append(Tensor(f"my_tensor_{i}", ne, fmt.type))
    return [*tensors, Tensor("my_last_tensor", [32, 3], TensorType.I8)]


def only(tensor: Tensor) -> Callable[[Random], bytes]:
    return lambda rng: b.gguf_bytes(random_pairs(rng), [tensor])


def tensors(declared: int | None = None, used: int = 32, with_data: bool = True) -> Callable[[Random], bytes]:
    """A file with tensors, laid out by `used` and stating `declared` alignment."""

    def build(rng: Random) -> bytes:
        pairs = random_pairs(rng) + ([] if declared is None else [b.alignment_pair(declared)])
        return b.gguf_bytes(pairs, random_tensors(rng), alignment=used, with_data=with_data)

    return build


BIG_I64 = round(1.01 * ((1 << 64) / 8) ** 0.5)

REJECTED: dict[str, tuple[str, Callable[[Random], bytes]]] = {
    "HEADER_BAD_MAGIC": ("not a GGUF file.*FUGG", lambda rng: b.gguf_bytes(magic=b"FUGG")),
    "HEADER_BAD_VERSION_0": ("version 0 ", lambda rng: b.gguf_bytes(version=0)),
    "HEADER_BAD_VERSION_1": ("version 1 ", lambda rng: b.gguf_bytes(version=1)),
    "HEADER_BAD_VERSION_FUTURE": ("version 4 ", lambda rng: b.gguf_bytes(version=4)),
    "HEADER_BAD_N_TENSORS": (f"{2**64 - 1} tensors", lambda rng: b.gguf_bytes(n_tensors=-1)),
    "HEADER_BAD_N_KV": (f"{2**64 - 1} metadata keys", lambda rng: b.gguf_bytes(n_kv=-1)),
    "KV_BAD_KEY_SIZE": (
        f"metadata key 0 has {2**64 - 1} bytes",
        lambda rng: b.gguf_bytes([b.text("my_key", -1) + b.u32(Kind.U32) + b.u32(1)]),
    ),
    "KV_EMPTY_KEY": ("metadata key 0 is empty", lambda rng: b.gguf_bytes([b.pair("", Kind.U32, 1)])),
    "KV_BAD_TYPE": ("'my_key' has the unknown type 13", lambda rng: b.gguf_bytes([b.pair("my_key", 13, b"\0")])),
    "KV_BAD_VALUE_SIZE": (
        f"'my_key' has {2**64 - 1} bytes",
        lambda rng: b.gguf_bytes([b.text("my_key") + b.u32(Kind.STRING) + b.u64(-1)]),
    ),
    "KV_DUPLICATE_KEY": (
        "'my_key_0' appears twice",
        lambda rng: b.gguf_bytes([*random_pairs(rng), b.pair("my_key_0", Kind.U32, 1)]),
    ),
    "KV_BAD_ALIGN": (
        "general.alignment is 13",
        lambda rng: b.gguf_bytes([*random_pairs(rng), b.alignment_pair(13)], alignment=13),
    ),
    "KV_WRONG_TYPE_ALIGN": (
        "general.alignment must be",
        lambda rng: b.gguf_bytes([b.pair("general.alignment", Kind.I32, 32)]),
    ),
    "TENSORS_BAD_NAME_SIZE": ("name of tensor 0 has 64 bytes", only(Tensor("n" * 64))),
    "TENSORS_BAD_N_DIMS": ("'my_tensor' has 5 dimensions", only(Tensor("my_tensor", [1] * 5))),
    "TENSORS_BAD_SHAPE": ("'my_tensor'.*shape", only(Tensor("my_tensor", [-1, -1], data=b""))),
    "TENSORS_NE_TOO_BIG": (
        "'my_tensor'.*shape",
        only(Tensor("my_tensor", [4 * (2**31 - 1)] * 2, TensorType.I8, data=b"")),
    ),
    "TENSORS_NBYTES_TOO_BIG": (
        "'my_tensor'.*shape",
        only(Tensor("my_tensor", [BIG_I64] * 2, TensorType.I64, data=b"")),
    ),
    "TENSORS_NBYTES_PAD_WRAP": (
        "'my_tensor'.*shape",
        only(Tensor("my_tensor", [4, 2**30 - 1, 2**30 + 1], data=b"")),
    ),
    "TENSORS_BAD_TYPE": ("'my_tensor' has the unknown type 43", only(Tensor("my_tensor", type=43, data=bytes(16)))),
    "TENSORS_BAD_OFFSET": (f"'my_tensor' has offset {2**64 - 1}", only(Tensor("my_tensor", offset=-1))),
    "TENSORS_DUPLICATE_NAME": (
        "'my_tensor' appears twice",
        lambda rng: b.gguf_bytes(random_pairs(rng), [Tensor("my_tensor"), Tensor("my_tensor")]),
    ),
    "TENSORS_BAD_ALIGN": ("general.alignment is 13", tensors(declared=13, used=13, with_data=False)),
    "TENSORS_INCONSISTENT_ALIGN": ("'my_tensor_.*offset", tensors(used=1, with_data=False)),
    "DATA_NOT_ENOUGH_DATA": ("'my_last_tensor' ends at.*truncated", lambda rng: tensors()(rng)[:-1]),
    "DATA_BAD_ALIGN": ("general.alignment is 13", tensors(declared=13, used=13)),
    "DATA_INCONSISTENT_ALIGN": ("'my_tensor_.*offset", tensors(used=1)),
    "DATA_MEM_SIZE_OVERFLOW": (
        "'my_tensor_0'.*shape",
        lambda rng: b.gguf_bytes(
            random_pairs(rng),
            [
                Tensor("my_tensor_0", [0x7FFFFFFFFFFFFFC0], TensorType.I8, data=b""),
                Tensor("my_tensor_1", [0x7FFFFFFFFFFFFFC0], TensorType.I8, 0x7FFFFFFFFFFFFFC0, bytes(32)),
            ],
        ),
    ),
}

ACCEPTED: dict[str, Callable[[Random], bytes]] = {
    "HEADER_EMPTY": lambda rng: b.gguf_bytes(),
    "KV_SUCCESS": lambda rng: b.gguf_bytes(random_pairs(rng)),
    "TENSORS_ZERO_DIM": lambda rng: b.gguf_bytes(random_pairs(rng), [Tensor("my_tensor", [7, 0])]),
    "DATA_SUCCESS": tensors(),
    "DATA_CUSTOM_ALIGN": tensors(declared=1, used=1),
}

# Upstream reads these for their infos alone: a file whose tensors have no data is no model.
HEADERS_ACCEPTED: dict[str, Callable[[Random], bytes]] = {
    "TENSORS_SUCCESS": tensors(with_data=False),
    "TENSORS_CUSTOM_ALIGN": tensors(declared=1, used=1, with_data=False),
}


def test_all_34_cases_and_the_retired_one() -> None:
    assert len(REJECTED) == 27 + 1
    assert len(ACCEPTED) + len(HEADERS_ACCEPTED) == 7


@pytest.fixture(params=[0, 1, 2])
def rng(request: pytest.FixtureRequest) -> Random:
    return np.random.default_rng(request.param)


@pytest.mark.parametrize("name", REJECTED)
def test_broken_file_is_rejected_with_bounded_work_and_memory(name: str, rng: Random, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    message, build = REJECTED[name]
    path.write_bytes(build(rng))
    tracemalloc.start()
    with calls_at_most(10_000), pytest.raises(ModelFormatError, match=rf"broken\.gguf: .*{message}"):
        open_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ACCEPTED)
def test_valid_file_is_read(name: str, rng: Random, tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(ACCEPTED[name](rng))
    with open_gguf(path) as file:
        for value in file.metadata.values():
            assert value is not None
        for tensor in file.tensors:
            raw = file.data(tensor)
            assert raw.ravel().tolist() == [i % 256 for i in range(file.tensors[tensor].n_bytes)]
            assert raw.shape[0] * raw.shape[1] == file.tensors[tensor].n_bytes


@pytest.mark.parametrize("name", HEADERS_ACCEPTED)
def test_valid_header_with_missing_data_is_rejected(name: str, rng: Random, tmp_path: Path) -> None:
    content = HEADERS_ACCEPTED[name](rng)
    assert len(parse_header(content, "header").tensors) == len(TensorType) + 1
    path = tmp_path / "no data.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match="my_tensor_0"):
        open_gguf(path)
