"""Split GGUF models: opening by any shard, and errors of shards."""

from pathlib import Path

import pytest

import gguf_builder as b
from gguf_builder import Kind, Tensor
from llamacli.errors import ModelFormatError
from llamacli.gguf import open_gguf

COUNT = 3


def name(i: int, count: int = COUNT) -> str:
    return f"model-{i + 1:05}-of-{count:05}.gguf"


def shard(i: int, *, no: int | None = None, count: int = COUNT, n_tensors: int = COUNT, tensor: str = "") -> bytes:
    pairs = [
        b.pair("split.no", Kind.U16, i if no is None else no),
        b.pair("split.count", Kind.U16, count),
        b.pair("split.tensors.count", Kind.I32, n_tensors),
    ]
    if i == 0:
        pairs.append(b.pair("general.architecture", Kind.STRING, "tiny"))
    return b.gguf_bytes(pairs, [Tensor(tensor or f"t{i}", [i + 1])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(COUNT):
        (tmp_path / name(i)).write_bytes(shard(i))
    return tmp_path


@pytest.mark.parametrize("named", range(COUNT))
def test_any_shard_opens_the_whole_model(folder: Path, named: int) -> None:
    with open_gguf(folder / name(named)) as file:
        assert list(file.tensors) == ["t0", "t1", "t2"]
        assert file.metadata.get_str("general.architecture") == "tiny"
        assert file.n_bytes == sum(path.stat().st_size for path in folder.iterdir())
        assert file.path == folder / name(0)
        for i in range(COUNT):
            assert file.data(f"t{i}").shape == (1, 4 * (i + 1))
            file.release(f"t{i}")


def test_missing_shard_is_named(folder: Path) -> None:
    (folder / name(1)).unlink()
    with pytest.raises(ModelFormatError, match=name(1)):
        open_gguf(folder / name(0))


def test_repeated_shard_is_named(folder: Path) -> None:
    (folder / name(2)).write_bytes(shard(1))
    with pytest.raises(ModelFormatError, match=rf"{name(2)}: split\.no 1 .* 2 of 3"):
        open_gguf(folder / name(0))


def test_shard_of_another_split_is_named(folder: Path) -> None:
    (folder / name(2)).write_bytes(shard(2, count=4))
    with pytest.raises(ModelFormatError, match=rf"{name(2)}: .*split\.count 4"):
        open_gguf(folder / name(0))


def test_shard_without_number_is_named(folder: Path) -> None:
    (folder / name(2)).write_bytes(b.gguf_bytes())
    with pytest.raises(ModelFormatError, match=rf"{name(2)}: .*'split\.no' is missing"):
        open_gguf(folder / name(0))


def test_broken_shard_is_named(folder: Path) -> None:
    (folder / name(1)).write_bytes(shard(1)[:-40])
    with pytest.raises(ModelFormatError, match=name(1)):
        open_gguf(folder / name(0))


def test_tensor_in_two_shards(folder: Path) -> None:
    (folder / name(2)).write_bytes(shard(2, tensor="t0"))
    with pytest.raises(ModelFormatError, match=rf"{name(2)}: tensor 't0' .*{name(0)}"):
        open_gguf(folder / name(0))


def test_wrong_number_of_tensors(folder: Path) -> None:
    (folder / name(0)).write_bytes(shard(0, n_tensors=4))
    with pytest.raises(ModelFormatError, match=r"split\.tensors\.count is 4, but the shards have 3"):
        open_gguf(folder / name(1))


@pytest.mark.parametrize("wrong", ["whole.gguf", "model-00002-of-00003.gguf", "model-00001-of-00004.gguf"])
def test_renamed_shard_says_what_it_should_be_called(tmp_path: Path, wrong: str) -> None:
    (tmp_path / wrong).write_bytes(shard(0))
    with pytest.raises(ModelFormatError, match=rf"{wrong}: shard 1 of 3 .*-00001-of-00003\.gguf"):
        open_gguf(tmp_path / wrong)


@pytest.mark.parametrize("count", [0, 1])
def test_split_into_one_may_have_any_name(tmp_path: Path, count: int) -> None:
    (tmp_path / "whole.gguf").write_bytes(shard(0, count=count))
    with open_gguf(tmp_path / "whole.gguf") as file:
        assert list(file.tensors) == ["t0"]


def test_shard_name_without_split_keys_is_a_single_file(tmp_path: Path) -> None:
    (tmp_path / name(0)).write_bytes(b.gguf_bytes(tensors=[Tensor("t")]))
    with open_gguf(tmp_path / name(0)) as file:
        assert list(file.tensors) == ["t"]


@pytest.mark.parametrize("value", [b.pair("split.count", Kind.STRING, "3"), b.pair("split.count", Kind.I32, -3)])
def test_invalid_split_count(tmp_path: Path, value: bytes) -> None:
    (tmp_path / name(0)).write_bytes(b.gguf_bytes([value]))
    with pytest.raises(ModelFormatError, match=r"split\.count"):
        open_gguf(tmp_path / name(0))
