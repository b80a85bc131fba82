"""Prefixes on disk: written, found again in another process, limited, damaged."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import Model, load_model
from llamacli.engine import default_engine
from llamacli.kv import PrefixIndex, prompt_cache
from llamacli.kv.prompt_cache import MIN_TOKENS, PromptCache
from llamacli.plugins import Plugins

TEXT = [(7 * i * i + 3 * i) % 100 + 3 for i in range(150)]
Load = Callable[..., Model]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


@pytest.fixture
def load(tiny_gguf: TinyGguf, plugins: Plugins, folder: Path) -> Iterator[Load]:
    """Load models with the cache, as a new process would."""
    models: list[Model] = []

    def run(variant: str = "gqa", *, max_bytes: int = 1 << 30, **options: object) -> Model:
        path = tiny_gguf(variant, **options)
        model = load_model(path, "fp32", plugins=plugins, engine=default_engine())
        model.prompt_cache = PromptCache(folder, max_bytes)
        models.append(model)
        return model

    yield run
    for model in models:
        model.close()


def evaluated(model: Model, tokens: list[int]) -> tuple[int, np.ndarray]:
    """Number of reused tokens, and the logits after the last one."""
    with model.create_session(n_ctx=200) as session:
        session.eval(tokens)
        return session.n_reused, session.logits.copy()


@pytest.mark.parametrize("variant", ["gqa", "gemma2", "lfm2"])
def test_a_prefix_survives_the_process(variant: str, load: Load, folder: Path) -> None:
    """With full attention, sliding windows and recurrent states."""
    with load(variant) as model:
        evaluated(model, TEXT[:120])
    assert len([*folder.iterdir()]) >= 1
    with load(variant) as model:
        n, logits = evaluated(model, TEXT)
        assert n == (120 if variant != "lfm2" else n)
        assert n >= 64
    with load(variant) as model:
        model.prompt_cache = None
        expected = evaluated(model, TEXT)
    assert expected[0] == 0
    np.testing.assert_array_equal(logits, expected[1])


@pytest.mark.parametrize("variant", ["gqa", "gemma2", "gemma3"])
@pytest.mark.parametrize("n_more", [0, 1, 3])
def test_a_prompt_is_found_again_after_its_reply(variant: str, n_more: int, load: Load) -> None:
    """With sliding windows, from what its window still has."""
    with load(variant) as model, model.create_session(n_ctx=200) as session:
        session.eval(TEXT[:120])
        for token in TEXT[120 : 120 + n_more]:
            session.eval([token])
    with load(variant) as model:
        n, logits = evaluated(model, TEXT[:120])
    with load(variant) as model:
        model.prompt_cache = None
        expected = evaluated(model, TEXT[:120])
    assert (n, expected[0]) == (119, 0)
    np.testing.assert_array_equal(logits, expected[1])


def test_only_prefixes_of_the_same_kind_are_used(load: Load, folder: Path) -> None:
    with load() as model:
        evaluated(model, TEXT)
    with load(n_layer=1) as model:
        assert evaluated(model, TEXT)[0] == 0
    with load() as model, model.create_session(n_ctx=200, kv_type="q8_0") as session:
        session.eval(TEXT)
        assert session.n_reused == 0
    with load() as model:
        assert evaluated(model, TEXT[1:])[0] == 0


def test_longer_texts_replace_their_beginnings(load: Load, folder: Path) -> None:
    for n in (100, 130, 150):
        with load() as model:
            evaluated(model, TEXT[:n])
        assert len([*folder.iterdir()]) == 1
    with load() as model:
        evaluated(model, [*TEXT[:70], 1, *TEXT[:60]])
    assert len([*folder.iterdir()]) == 2


def test_the_longest_of_several_beginnings_is_read(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (TEXT[:150], [*TEXT[:70], 1, *TEXT[:60]]):
        with load() as model:
            evaluated(model, text)
    with load() as model, model.create_session(n_ctx=200) as session:
        cache = model.prompt_cache
        entries = cache._read_index(session.cache)
        for turn in (entries, entries[::-1]):
            monkeypatch.setattr(cache, "_read_index", lambda _, turn=turn: turn)
            index = PrefixIndex(session.cache.pool)
            assert cache.load(index, session.cache, TEXT[1:], 1 << 30) == 0
            assert cache.load(index, session.cache, TEXT, 1 << 30) == 150
            index.clear()
        assert len(entries) == 2


def test_the_shortest_beginning_that_is_read(load: Load) -> None:
    with load() as model:
        evaluated(model, TEXT)
    for n in (MIN_TOKENS, MIN_TOKENS + 1):  # the last token is always evaluated
        with load() as model, model.create_session(n_ctx=200) as session:
            index = PrefixIndex(session.cache.pool)
            assert model.prompt_cache.load(index, session.cache, TEXT[:n], 1 << 30) == (n > MIN_TOKENS and len(TEXT))
            index.clear()


def test_short_texts_are_not_written(load: Load, folder: Path) -> None:
    for n in (63, 64):
        with load() as model:
            evaluated(model, TEXT[:n])
        assert len([*folder.iterdir()]) == (n == 64)


def test_the_least_recently_used_files_are_deleted(load: Load, folder: Path) -> None:
    for i in range(4):
        with load(max_bytes=1 << 30) as model:
            evaluated(model, [i + 3, *TEXT[:90]])
    (first, *_, last) = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    size = last.stat().st_size
    os.utime(first, (time.time() + 10,) * 2)  # used since
    with load(max_bytes=2 * size + size // 2) as model:
        evaluated(model, [50, *TEXT[:90]])
    assert first.exists()
    assert len([*folder.iterdir()]) == 2
    PromptCache(folder, size + size // 2)  # as after a process that was killed before it deleted
    assert [*folder.iterdir()] == [first]


def test_files_that_another_server_deletes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.prompt").write_bytes(bytes(10))
        os.utime(folder / f"{i}.prompt", (i, i))
    found = [*folder.iterdir(), folder / "gone.prompt"]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(found))
    PromptCache(folder, 20)
    assert sorted(path.name for path in folder.iterdir()) == ["1.prompt", "2.prompt"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "version"])
def test_damaged_files_are_deleted(damage: str, load: Load, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load() as model:
        expected = evaluated(model, TEXT)[1]
    (path,) = folder.iterdir()
    data = path.read_bytes()
    changed = {
        "cut": data[: len(data) // 2],
        "flipped": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
        "empty": b"",
        "other": b"x" * 1000,
        "version": data.replace(b'"version": "0', b'"version": "9', 1),
    }[damage]
    path.write_bytes(changed)
    with load() as model, caplog.at_level(logging.WARNING):
        n, logits = evaluated(model, TEXT)
    assert n == 0
    np.testing.assert_array_equal(logits, expected)
    assert ("is deleted" in caplog.text) == (damage != "version")


def test_idle_prefixes_are_written_in_the_background(load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "IDLE_S", 0.05)
    with load() as model:
        evaluated(model, TEXT)
        model.prompt_cache.save_in_background(model.prefixes(model.kv_pool().layout.kv_type, 200))
        while not [*folder.glob("*.prompt")]:
            time.sleep(0.01)
        model.prompt_cache.close()


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(OSError, match="shared"):
        PromptCache(shared, 1000)


def test_a_full_disk_is_logged(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from llamacli.kv import snapshot

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "write", full)
    with load() as model:
        evaluated(model, TEXT)
    assert "was not written: [Errno 28] No space left on device" in caplog.text


SCRIPT = """
import sys, time
from pathlib import Path
import llamacli
from llamacli.kv.prompt_cache import PromptCache
model = llamacli.load_model(sys.argv[1], "fp32", threads=1)
model.prompt_cache = PromptCache(Path(sys.argv[2]), 1 << 30)
print("ready", flush=True)
for i in range(10_000):
    with model.create_session(n_ctx=200) as session:
        session.eval([i % 100 + 3, i // 100 + 3, *range(3, 100)])
    model.prompt_cache.save(model.prefixes(model.kv_pool().layout.kv_type, 200))
"""


@pytest.mark.slow
def test_a_killed_process_leaves_no_half_file(tiny_gguf: TinyGguf, folder: Path, load: Load) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny_gguf()), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for i in range(8):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while not [*folder.glob("*.prompt")]:
                time.sleep(0.01)
            time.sleep(0.01 * i)
            process.kill()
    with load() as model:
        tokens = [3, 3, *range(3, 100), 7]
        n, logits = evaluated(model, tokens)
        assert n == 99
        model.prompt_cache = None
        model.prefixes(model.kv_pool().layout.kv_type, 200).clear()
        assert evaluated(model, tokens)[0] == 0
        np.testing.assert_array_equal(logits, evaluated(model, tokens)[1])
