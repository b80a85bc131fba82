"""Weights of models larger than memory, mapped from their packed copy."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import InvalidRequestError, Model, load_model
from llamacli.engine import memory
from llamacli.engine.packed_copies import folder, streaming, writing
from llamacli.engine.packed_copies.format import read_index
from llamacli.errors import FileChangedError, OutOfMemoryError
from llamacli.plugins import Plugins

Load = Callable[..., Model]
CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folder of copies."""
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "packed"


@pytest.fixture(params=["gqa", "qwen3moe"])
def path(request: pytest.FixtureRequest, tiny_gguf: TinyGguf) -> Path:
    return tiny_gguf(request.param)


@pytest.fixture
def experts(tiny_gguf: TinyGguf) -> Path:
    return tiny_gguf("qwen3moe")


@pytest.fixture
def load(plugins: Plugins) -> Iterator[Load]:
    """Load models that are closed in the end."""
    models = list[Model]()

    def run(path: Path, load: str = "map") -> Model:
        models.append(load_model(path, threads=1, plugins=plugins, load=load))
        return models[-1]

    yield run
    for model in models:
        model.close()


def logits(model: Model) -> np.ndarray:
    with model.create_session(reuse=False) as session:
        return session.eval([1, 2, 3, 60, 7, 100], all_logits=True)


def test_bits_are_those_of_weights_in_memory(path: Path, load: Load, cache: Path) -> None:
    with load(path, "memory") as model:
        expected = logits(model)
    for _ in range(2):  # packed into the copy, then mapped
        with load(path) as model:
            np.testing.assert_array_equal(logits(model), expected)
    (copy,) = cache.iterdir()
    assert copy.suffix == ".packed"


def test_bits_are_equal_where_matrices_are_dropped(path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(path, "memory") as model:
        expected = logits(model)
    dropped, twice = list[int](), threading.Event()
    drop = streaming.MappedStack.drop

    def noted(stack: streaming.MappedStack) -> None:
        dropped.append(stack.place)
        drop(stack)
        if dropped.count(stack.place) > 1:
            twice.set()

    monkeypatch.setattr(streaming.MappedStack, "drop", noted)
    monkeypatch.setattr(streaming, "available_memory", lambda *, cached: 1)
    monkeypatch.setattr(streaming, "WINDOW", 1)
    monkeypatch.setattr(streaming, "_DROPPED", 1)
    with load(path) as model:
        for _ in range(3):
            np.testing.assert_array_equal(logits(model), expected)
    assert twice.wait(30)  # another thread drops them


def test_weights_that_do_not_fit_are_mapped(
    path: Path, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(path, "auto").close()
    assert not cache.exists()
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match="MiB are free: --load map reads the weights from disk"):
        load(path, "memory")
    load(path, "auto")
    (message,) = caplog.messages
    assert "MiB are free: the weights are read from disk when they are used" in message
    assert len([*cache.iterdir()]) == 1


def test_a_refused_load_keeps_the_copy(
    path: Path, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(path).close()
    before = [*cache.iterdir()]
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match="MiB are free: --load map reads the weights from disk"):
        load(path, "memory")
    assert [*cache.iterdir()] == before
    assert "is made again" not in caplog.text


def damage(copy: Path, tensor: str) -> None:
    """Change the bytes of a tensor; the index stays as it was."""
    index = read_index(np.memmap(copy, np.uint8, "r"))
    entry = next(entry for name, entry in index.tensors.items() if name.startswith(tensor))
    with copy.open("r+b") as file:
        file.seek(entry.start)
        file.write(bytes(byte ^ 1 for byte in os.pread(file.fileno(), entry.n_bytes, entry.start)))


@pytest.mark.parametrize("tensor", ["blk.1.ffn_down_exps", "blk.1.attn_q"])
def test_a_changed_tensor_is_found_when_it_is_first_used(tensor: str, experts: Path, load: Load, cache: Path) -> None:
    with load(experts) as model:
        expected = logits(model)
    (copy,) = cache.iterdir()
    damage(copy, tensor)
    with load(experts) as model, pytest.raises(FileChangedError, match=f"{copy} was cut or changed"):
        logits(model)
    assert not copy.exists()
    with load(experts) as model:  # it is made again
        np.testing.assert_array_equal(logits(model), expected)


def test_a_copy_that_is_found_changed_while_it_is_loaded_is_made_again(
    experts: Path, load: Load, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(experts) as model:
        expected = logits(model)
    (copy,) = cache.iterdir()
    damaged = copy.stat().st_ino
    damage(copy, "token_embd")
    for _ in range(2):
        with load(experts) as model:
            np.testing.assert_array_equal(logits(model), expected)
    (message,) = caplog.messages
    assert message.startswith(f"the packed copy is made again: {copy} was cut or changed")
    assert copy.stat().st_ino != damaged


@pytest.mark.parametrize("made", ["now", "before"])
@pytest.mark.parametrize("change", ["cut", "written", "damaged", "replaced"])
def test_a_copy_that_is_changed_in_use(
    change: str, made: str, path: Path, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it, and the next load makes it again."""
    if made == "before":
        load(path).close()
    model = load(path)
    expected = logits(model)
    (copy,) = cache.iterdir()
    whole = copy.read_bytes()
    if change == "cut":
        os.truncate(copy, 4096)
    elif change == "written":
        copy.write_bytes(bytes(len(whole)))
    elif change == "damaged":
        damage(copy, "blk.1.attn_q")
    else:
        copy.with_name("other").write_bytes(bytes(len(whole)))
        copy.with_name("other").replace(copy)
        np.testing.assert_array_equal(logits(model), expected)
        return
    for _ in range(2):
        with pytest.raises(FileChangedError, match=f"{copy} was cut or changed while it was in use"):
            logits(model)
    assert not copy.exists()
    np.testing.assert_array_equal(logits(load(path)), expected)
    assert read_index(np.memmap(copy, np.uint8, "r")) == read_index(np.frombuffer(whole, np.uint8))


def test_a_copy_that_is_cut_while_it_is_written(
    path: Path, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "checksum", lambda unit: os.truncate(next(cache.iterdir()), 0) or "")
    with pytest.raises(FileChangedError, match="was cut or changed while it was in use"):
        load(path)
    assert [*cache.iterdir()] == []


def test_a_full_disk_is_an_error_and_leaves_no_file(
    path: Path, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidRequestError, match=r"read from disk when they are used, but .*No space left"):
        load(path)
    assert [*cache.iterdir()] == []


def test_without_copies_nothing_is_mapped(path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folder.VARIABLE, "0")
    with pytest.raises(InvalidRequestError, match=r"packed copies are off \(LLAMACLI_PACKED_CACHE\)"):
        load(path)
    with pytest.raises(InvalidRequestError, match="load 'disk' is not one of auto, memory, map"):
        load(path, "disk")


SCRIPT = """
import logging
import sys
from pathlib import Path
import llamacli
from llamacli.engine.packed_copies import folder

group, file, cache = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text("0")
folder.cache_folder = lambda: cache
logging.basicConfig()
with llamacli.load_model(file, threads=1) as model, model.create_session() as session:
    print([token.id for token in session.generate([1, 2, 3], max_tokens=8)])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access(CGROUPS, os.W_OK), reason="needs a writable cgroup v1 of memory")
def test_a_model_larger_than_the_memory_limit(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    """Half of the weights fit into the limit of a cgroup."""
    path = tiny_gguf("qwen3moe", n_embd=1024, n_ff_expert=1024, n_expert=32, type="Q8_0")

    def run(group: Path, cache: str) -> tuple[str, str]:
        command = [sys.executable, "-c", SCRIPT, str(group), str(path), str(tmp_path / cache)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    expected, _ = run(CGROUPS, "unlimited")
    group = CGROUPS / f"llamacli-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(110 << 20))
        for _ in range(2):  # packed into the copy, then mapped
            found, messages = run(group, "limited")
            assert found == expected
            assert "read from disk when they are used" in messages
    finally:
        group.rmdir()
