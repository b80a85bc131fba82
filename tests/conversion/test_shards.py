"""Split and merged files: those of llama.cpp's gguf-split, byte by byte."""

import hashlib
from pathlib import Path

import pytest

from conftest import TinyGguf
from llamacli import InvalidRequestError
from llamacli.conversion import file_type, plan, unchanged, write
from llamacli.conversion.shards import kept_shards, shards_by_limit
from llamacli.gguf import GGUFFile, open_gguf
from llamacli.hub.demo import demo_path

BY_TENSORS = ("0d4d05bd", "9b046120", "7e673e7d", "3cd93498", "4d4fa15e", "f173db2c", "bc55f9c9", "586bdf0e")
"""Digests of the shards of the demo model by `gguf-split --split-max-tensors 7`."""
BY_SIZE = ("810a0d53", "2b8f9536", "5c5cee1b", "a8b251a1")
"""The same by `--split-max-size 1M`."""
MERGED = "2a633267"
"""The same of the first ones by `gguf-split --merge`."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("out-*.gguf"))


def split(file: GGUFFile, folder: Path, shards: list[int]) -> list[Path]:
    write(unchanged(file, None), folder / "out.gguf", shards=shards, threads=1)
    return shards_of(folder)


def test_splits_by_tensors_and_merges_as_gguf_split(tmp_path: Path) -> None:
    with open_gguf(demo_path()) as file:
        found = split(file, tmp_path, shards_by_limit([*file.tensors.values()], n_tensors=7))
    assert [path.name for path in found] == [f"out-{i + 1:05}-of-00008.gguf" for i in range(8)]
    assert [digest(path) for path in found] == [*BY_TENSORS]
    with open_gguf(found[3]) as file:
        assert kept_shards(file) == [7] * 8
        write(unchanged(file, None), tmp_path / "merged.gguf", threads=1)
    assert digest(tmp_path / "merged.gguf") == MERGED


def test_splits_by_size_as_gguf_split(tmp_path: Path) -> None:
    with open_gguf(demo_path()) as file:
        infos = [*file.tensors.values()]
        found = split(file, tmp_path, shards_by_limit(infos, n_bytes=1_000_000))
        assert kept_shards(file) == []
        assert shards_by_limit(infos, n_bytes=1) == [1] * len(infos)
    assert [digest(path) for path in found] == [*BY_SIZE]


def test_shards_are_kept_in_another_type(tmp_path: Path, tiny_gguf: TinyGguf) -> None:
    with open_gguf(tiny_gguf("gqa")) as file:
        found = split(file, tmp_path, shards_by_limit([*file.tensors.values()], n_tensors=5))
    wanted = file_type("Q8_0")
    with open_gguf(found[0]) as file:
        shards = kept_shards(file)
        write(plan(file, wanted), tmp_path / "whole.gguf", threads=1)
        write(plan(file, wanted), tmp_path / "kept.gguf", shards=shards, threads=1)
    with (
        open_gguf(tmp_path / f"kept-00001-of-{len(found):05}.gguf") as kept,
        open_gguf(tmp_path / "whole.gguf") as whole,
    ):
        assert kept_shards(kept) == shards
        assert kept.tensors.keys() == whole.tensors.keys()
        assert all((kept.data(name) == whole.data(name)).all() for name in kept.tensors)
        assert kept.metadata["general.file_type"] == whole.metadata["general.file_type"] == wanted.number
        assert "split.count" not in whole.metadata


def test_nothing_is_written_over_shards(tmp_path: Path) -> None:
    with open_gguf(demo_path()) as file:
        shards = shards_by_limit([*file.tensors.values()], n_tensors=30)
        (tmp_path / "out-00002-of-00002.gguf").write_bytes(b"kept")
        with pytest.raises(InvalidRequestError, match="out-00002-of-00002"):
            split(file, tmp_path, shards)
        assert [path.name for path in tmp_path.iterdir()] == ["out-00002-of-00002.gguf"]
    found = tmp_path / "out-00002-of-00002.gguf"
    found.unlink()
    with open_gguf(demo_path()) as file:
        first, *_ = split(file, tmp_path, shards)
    with open_gguf(first) as file, pytest.raises(InvalidRequestError, match="is a file of the source model"):
        write(unchanged(file, None), tmp_path / "out.gguf", shards=shards, overwrite=True, threads=1)
