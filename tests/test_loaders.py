import logging
from pathlib import Path

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import ArrayFile, Loader, ModelFormatError, PluginError, load_model
from llamacli.engine import Engine
from llamacli.gguf import Metadata, open_gguf
from llamacli.loaders import WatchedFile, open_model_file
from llamacli.plugins import Plugins
from llamacli.quantization import TensorType


@pytest.fixture
def dummy() -> list[Loader]:
    """The loader of files that begin with "dummy"."""
    return [
        Loader(
            "dummy",
            lambda path: path.read_bytes().startswith(b"dummy"),
            lambda path: ArrayFile(path, Metadata({"a": 1}), {"t": np.arange(6, dtype=np.float32).reshape(2, 3)}),
        )
    ]


class TestOpening:
    def test_gguf_without_loaders(self, tiny_gguf: TinyGguf) -> None:
        file = open_model_file(tiny_gguf("gqa"), Plugins([]).loaders())
        assert file.metadata["general.architecture"] == "llama"

    def test_matching_loader_opens_the_file(self, dummy: list[Loader], tmp_path: Path) -> None:
        (path := tmp_path / "x").write_bytes(b"dummy!")
        file = open_model_file(str(path), dummy)
        assert (file.path, file.metadata["a"]) == (path, 1)

    def test_unknown_format_raises(self, dummy: list[Loader], tmp_path: Path) -> None:
        (path := tmp_path / "x").write_bytes(b"other")
        with pytest.raises(ModelFormatError, match=r"x: not a model file of a known format \(GGUF, dummy\)"):
            open_model_file(path, dummy)

    def test_error_in_matches_is_logged(
        self, dummy: list[Loader], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        dummy.insert(0, Loader("broken", lambda path: {}[path], lambda path: {}[path]))
        (path := tmp_path / "x").write_bytes(b"dummy!")
        with caplog.at_level(logging.WARNING):
            assert open_model_file(path, dummy).metadata["a"] == 1
        assert f"loader 'broken' failed over {path}: KeyError" in caplog.text

    def test_error_in_open_names_the_loader(self, dummy: list[Loader], tmp_path: Path) -> None:
        dummy.insert(0, Loader("broken", lambda path: True, lambda path: {}["header"]))
        (path := tmp_path / "x").write_bytes(b"dummy!")
        with pytest.raises(PluginError, match="loader 'broken' failed: KeyError: 'header'"):
            open_model_file(path, dummy)

    @pytest.mark.parametrize("name", ["missing", "", "a\0b"])
    def test_unreadable_path_raises(
        self, name: str, dummy: list[Loader], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(ModelFormatError, match=r"no such|not a regular|cannot read"),
        ):
            open_model_file(tmp_path / name, dummy)
        assert caplog.text == ""


class TestArrayFile:
    def test_implements_model_file(self) -> None:
        arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float32)}
        file = ArrayFile(Path("p"), Metadata({}), arrays)
        info = file.tensors["a"]
        assert (info.name, info.shape, info.type, info.n_bytes) == ("a", (2, 3), TensorType.F32, 24)
        for name, array in arrays.items():
            raw = file.data(name)
            assert (raw.dtype, raw.ndim) == (np.uint8, 2)
            np.testing.assert_array_equal(raw.view(np.float32).reshape(array.shape), array)

    def test_arrays_in_any_memory_order(self) -> None:
        array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
        raw = ArrayFile(Path("p"), Metadata({}), {"a": array}).data("a")
        np.testing.assert_array_equal(raw.view(np.float32), array)


class TestWatchedFile:
    def test_progress_counts_bytes_of_tensors(self) -> None:
        arrays = {name: np.zeros((n, 4), np.float32) for name, n in (("a", 1), ("b", 2), ("c", 3), ("d", 4))}
        seen: list[tuple[int, int]] = []
        file = ArrayFile(Path("p"), Metadata({"k": 1}), arrays)
        watched = WatchedFile(file, lambda done, total: seen.append((done, total)))
        assert (watched.path, watched.metadata, watched.tensors) == (file.path, file.metadata, file.tensors)
        for name in ("b", "b", "a", "d", "a"):
            np.testing.assert_array_equal(watched.data(name), file.data(name))
            watched.release(name)
        watched.done()
        assert seen == [(0, 160), (32, 160), (48, 160), (160, 160)]
        watched.close()
        with pytest.raises(KeyError):
            watched.data("a")

    def test_the_engine_reads_every_tensor(self, tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine) -> None:
        seen: list[tuple[int, int]] = []
        path = tiny_gguf("moe_8_2")
        load_model(path, plugins=plugins, engine=engine, progress=lambda done, total: seen.append((done, total)))
        with open_gguf(path) as file:
            total = sum(info.n_bytes for info in file.tensors.values())
            assert seen[0] == (0, total)
            assert seen[-1] == (total, total)
            assert len(seen) == len(file.tensors) + 1
        assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer"),
        (b"\n<!DOCTYPE html>\n<html>", "an HTML page"),
    ],
)
def test_what_is_often_saved_as_a_model_is_named(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=rf"model\.gguf: {said}"):
        open_model_file(path, [])
