"""Weights that models of one file share."""

import gc
import os
import shutil
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import ClosedError, Model, load_model
from llamacli.engine.sharing import file_key, shared_program
from llamacli.plugins import Plugins


@pytest.fixture
def path(tiny_gguf: TinyGguf, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_gguf("gqa"), tmp_path / "model.gguf"))


def load(path: Path, plugins: Plugins, mode: str = "fp32", threads: int = 1) -> Model:
    return load_model(path, mode, plugins=plugins, threads=threads)


def logits(model: Model) -> np.ndarray:
    with model.create_session() as session:
        session.eval([1, 2, 3])
        return session.logits


def test_models_of_one_file_share_their_program(path: Path, plugins: Plugins) -> None:
    first, second = load(path, plugins), load(path.parent / "." / path.name, plugins)
    os.link(path, path.with_name("linked.gguf"))
    assert first.program is second.program
    assert first.program is not load(path, plugins, "q8").program
    assert first.program is not load(path, plugins, threads=2).program
    first.config.n_ctx = 7
    assert second.config.n_ctx == 256
    np.testing.assert_array_equal(logits(first), logits(second))
    assert first.kv_pool() is not second.kv_pool(), "caches are each model's own"


def test_closing_one_model_leaves_the_other(path: Path, plugins: Plugins) -> None:
    first, second = load(path, plugins), load(path, plugins)
    expected, session = logits(first), first.create_session()
    program = weakref.ref(first.program)
    first.close()
    with pytest.raises(ClosedError):
        session.eval([1])
    np.testing.assert_array_equal(logits(second), expected)
    second.close()
    gc.collect()
    assert program() is None, "the last one frees the weights"


def test_file_that_has_changed_is_loaded_again(path: Path, plugins: Plugins) -> None:
    first = load(path, plugins)
    replacement = path.with_name("other.gguf")
    shutil.copy(path, replacement)
    os.replace(replacement, path)
    second = load(path, plugins)
    assert second.program is not first.program
    np.testing.assert_array_equal(logits(first), logits(second))
    before = file_key([path])
    os.utime(path, (1, 1))
    assert file_key([path]) != before


def test_threads_that_load_together_get_one_program() -> None:
    class Compiled:
        is_whole = True

    both, found = threading.Barrier(2), []

    def compile_program() -> Compiled:
        both.wait(10)
        return Compiled()

    threads = [
        threading.Thread(target=lambda: found.append(shared_program(("test", id(both)), compile_program)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] is found[1]
