"""Packed copies: written once, mapped afterwards, made again when damaged."""

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import TinyGguf
from llamacli import InvalidRequestError, Model, load_model
from llamacli.engine import native
from llamacli.engine.packed_copies import (
    PackedCopy,
    copies,
    finish_copies,
    folder,
    limit,
    open_copy,
    reading,
    remove_copies,
    writing,
)
from llamacli.engine.packed_copies.format import DATA_START, PREFIX, checksum
from llamacli.plugins import Plugins
from llamacli.util import files
from test_full_disk import no_file_larger_than


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folder of copies, which has room for small ones."""
    monkeypatch.setattr(writing, "MIN_BYTES", 1)
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "packed"


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are packed."""
    from llamacli.engine import weights

    names, pack = list[str](), weights.load_matrix

    def counted(tensor, *arguments):
        names.append(tensor.name)
        return pack(tensor, *arguments)

    monkeypatch.setattr(weights, "load_matrix", counted)
    return names


@pytest.fixture
def path(tiny_gguf: TinyGguf, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_gguf("gqa", type="Q8_0"), tmp_path / "model.gguf"))


@pytest.fixture
def logits(path: Path, plugins: Plugins) -> Callable[..., np.ndarray]:
    """Load the model, wait for its copy, and return some logits."""

    def run(mode: str = "auto", threads: int = 1) -> np.ndarray:
        with load_model(path, mode, threads=threads, plugins=plugins) as model:
            finish_copies()
            found = some_logits(model)
            finish_copies()  # a guarded engine compiles again when it runs
            return found

    return run


def some_logits(model: Model) -> np.ndarray:
    with model.create_session(reuse=False) as session:
        session.eval([1, 2, 3])
        return session.logits.copy()


def only(cache: Path) -> Path:
    (found,) = cache.glob("*.packed")
    return found


def test_second_start_packs_nothing(logits, packs, cache) -> None:
    first = logits()
    assert packs
    packs.clear()
    np.testing.assert_array_equal(logits(), first)
    np.testing.assert_array_equal(logits(threads=2), first)
    assert packs == []
    assert only(cache).stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in cache.iterdir()] == [only(cache).name], "no temporary file is left"


@pytest.mark.parametrize("huge", [True, False])
def test_copy_without_huge_pages_is_read_into_memory(huge, logits, packs, monkeypatch) -> None:
    """Pages of 4 KiB would slow generation down."""
    copied, in_memory = list[int](), reading._in_memory

    def counted(*arguments):
        copied.append(1)
        return in_memory(*arguments)

    monkeypatch.setattr(reading, "_in_memory", counted)
    monkeypatch.setattr(reading, "huge_pages", lambda: "madvise")
    monkeypatch.setattr(reading, "huge_share", lambda data: float(huge))
    first = logits()
    packs.clear()
    np.testing.assert_array_equal(logits(), first)
    assert (packs, bool(copied)) == ([], not huge)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice about files")
@pytest.mark.parametrize(("share", "reads"), [(0.0, False), (0.5, True), (1.0, False)])
def test_copy_partly_in_huge_pages_is_read_again(share, reads, logits, packs, cache, monkeypatch) -> None:
    advice = list[tuple[int, ...]]()
    monkeypatch.setattr(writing, "huge_share", lambda data: share)
    monkeypatch.setattr(writing.os, "posix_fadvise", lambda _, *arguments: advice.append(arguments))
    first = logits()
    for thread in threading.enumerate():
        if thread.name == "llamacli-copy":
            thread.join()
    assert {*advice} == ({(0, 0, os.POSIX_FADV_DONTNEED)} if reads else set())
    whole = only(cache).read_bytes()
    packs.clear()
    np.testing.assert_array_equal(logits(), first)
    assert only(cache).read_bytes() == whole
    assert packs == []


def test_copy_that_ends_while_it_is_read(logits, packs, cache, monkeypatch) -> None:
    monkeypatch.setattr(reading, "huge_pages", lambda: "madvise")
    monkeypatch.setattr(reading, "huge_share", lambda data: 0.0)
    first, whole = logits(), only(cache).read_bytes()
    in_memory = reading._in_memory

    def cut(*arguments):
        monkeypatch.setattr(reading, "_in_memory", in_memory)  # an engine that compiles again reads the new copy
        os.truncate(only(cache), len(whole) // 2)
        return in_memory(*arguments)

    monkeypatch.setattr(reading, "_in_memory", cut)
    packs.clear()
    np.testing.assert_array_equal(logits(), first)
    assert packs
    assert only(cache).read_bytes() == whole, "made again"


def test_models_that_share_weights_open_no_second_copy(path, plugins, logits, monkeypatch) -> None:
    opened = list[str]()
    monkeypatch.setattr(
        native, "open_copy", lambda key, *others, **more: (opened.append(key), open_copy(key, *others, **more))[1]
    )
    expected = logits()
    opened.clear()
    with load_model(path, threads=1, plugins=plugins):
        assert opened
        opened.clear()
        with load_model(path, threads=1, plugins=plugins) as second:
            assert not opened
            np.testing.assert_array_equal(some_logits(second), expected)


def test_engine_that_compiles_again_finds_the_copy_that_it_wrote(path, plugins, packs) -> None:
    engine = native.NativeEngine(1, copy_key="key")
    for expected in (True, False):
        packs.clear()
        with load_model(path, plugins=plugins, engine=engine):
            finish_copies()
        assert bool(packs) is expected


@pytest.mark.parametrize("variant", ["moe_8_2", "phi3_long", "biases"])
def test_every_kind_of_tensor_is_the_same_from_a_copy(variant, tiny_gguf, plugins, packs) -> None:
    """Experts, parts of fused tensors, biases."""
    path, found = tiny_gguf(variant), []
    for _ in range(2):
        packs.clear()
        with load_model(path, threads=1, plugins=plugins) as model:
            finish_copies()
            found.append(some_logits(model))
    assert packs == []
    np.testing.assert_array_equal(*found)


def test_each_mode_has_its_copy(logits, cache, packs) -> None:
    for mode in ("auto", "q4"):
        logits(mode)
    assert len([*cache.glob("*.packed")]) == 2
    packs.clear()
    logits("q4")
    assert packs == []


START = DATA_START
DAMAGE = {
    "empty": lambda data: b"",
    "start": lambda data: data[:40],
    "cut": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"0",
    "version": lambda data: b"llamacli packed0" + data[16:],
    "bit": lambda data: flipped(data, START + 500, 1),
    "sign": lambda data: flipped(data, START, 128),
    "index": lambda data: flipped(data, len(data) - 5, 1),
    "digest": lambda data: flipped(data, 20, 1),
    "zeros": lambda data: data[:START] + bytes(4096) + data[START + 4096 :],
    "moved": lambda data: moved(data, START, 4096),
}


def moved(data: bytes, at: int, n: int) -> bytes:
    return data[:at] + data[at + n : at + 2 * n] + data[at : at + n] + data[at + 2 * n :]


def flipped(data: bytes, at: int, mask: int) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_copy_is_made_again(damage, logits, packs, cache, caplog) -> None:
    first = logits()
    copy, whole = only(cache), only(cache).read_bytes()
    assert damage(whole) != whole
    copy.write_bytes(damage(whole))
    packs.clear()
    np.testing.assert_array_equal(logits(), first)
    assert packs
    assert f"the packed copy {copy} is made again" in caplog.text
    assert copy.read_bytes() == whole


def test_copy_without_memory_for_it_stays(logits, packs, cache, monkeypatch, caplog) -> None:
    first, copy = logits(), only(cache)
    before = copy.stat().st_ino

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    packs.clear()
    with monkeypatch.context() as patched:
        patched.setattr(reading.mmap, "mmap", full)
        assert reading.open_copy(copy.stem) is None
    np.testing.assert_array_equal(logits(), first)
    assert not packs
    assert copy.stat().st_ino == before
    assert "made again" not in caplog.text


def test_copy_of_a_file_that_has_changed_is_not_used(path, logits, packs, cache) -> None:
    logits()
    stale, stat = only(cache), path.stat()
    data = bytearray(path.read_bytes())
    data[-40_000] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as tools do that keep times
    packs.clear()
    changed = logits()
    assert packs
    assert len([*cache.glob("*.packed")]) == 2
    other = next(copy for copy in cache.glob("*.packed") if copy != stale)
    stale.replace(other)  # under the name of the other, it is not believed either
    packs.clear()
    np.testing.assert_array_equal(logits(), changed)
    assert packs


def test_copy_of_other_sources_is_not_used(logits, packs, monkeypatch, cache) -> None:
    logits()
    monkeypatch.setattr(folder, "sources_digest", lambda: "those of another version")
    packs.clear()
    logits()
    assert packs
    assert len([*cache.glob("*.packed")]) == 2


@pytest.mark.parametrize("writable", ["file", "folder"])
def test_copy_that_others_can_write_is_not_used(writable, logits, packs, cache, caplog) -> None:
    first = logits()
    (only(cache) if writable == "file" else cache).chmod(0o777)
    packs.clear()
    caplog.set_level(logging.INFO, "llamacli")
    np.testing.assert_array_equal(logits(), first)
    assert packs
    assert "other users can write to" in caplog.text
    if writable == "file":
        assert only(cache).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("function", ["claimed", "checksum"])
def test_failing_write_leaves_nothing(function, logits, cache, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writing, function, fail)
        first = logits()
    assert [*cache.iterdir()] == []
    np.testing.assert_array_equal(logits(), first)
    assert only(cache)


def test_model_that_is_closed_early_leaves_no_copy(path, plugins, cache, monkeypatch) -> None:
    """Its memory is freed at once."""
    entered, write = [], files.claimed

    def slow(target: Path):
        entered.append(target)
        model.close()
        return write(target)

    monkeypatch.setattr(writing._Writer, "start", lambda writer: waiting.append(writer))
    waiting: list[writing._Writer] = []
    model = load_model(path, threads=1, plugins=plugins)
    monkeypatch.setattr(writing, "claimed", slow)
    waiting[0].save()
    assert entered
    assert [*cache.iterdir()] == []


def test_the_first_tokens_come_before_the_copy(path, plugins, cache, monkeypatch) -> None:
    """It is written after a while, or before the process ends."""
    monkeypatch.setattr(writing, "_GRACE_S", 60.0)
    with load_model(path, threads=1, plugins=plugins) as model:
        some_logits(model)
        assert not cache.exists()
        finish_copies()
        assert only(cache)
    remove_copies()
    monkeypatch.setattr(writing, "_GRACE_S", 0.01)
    with load_model(path, threads=1, plugins=plugins):
        for _ in range(3000):
            if [*cache.glob("*.packed")]:
                break
            time.sleep(0.01)
        assert only(cache)


def test_one_process_writes_a_copy(cache) -> None:
    cache.mkdir(parents=True)
    target = cache / "a.packed"
    with files.claimed(target) as first:
        assert first is not None
        with files.claimed(target) as second:
            assert second is None
        first.write(b"first")
    assert target.read_bytes() == b"first"
    (left := cache / ".b.packed.part").write_bytes(b"of a process that was killed")
    with files.claimed(cache / "b.packed") as file:
        assert file is not None
        files.remove_unclaimed(cache)
        assert left.exists(), "it is being written"
        file.write(b"b")
    assert (cache / "b.packed").read_bytes() == b"b"
    left.write_bytes(b"of a process that was killed")
    files.remove_unclaimed(cache)
    assert sorted(path.name for path in cache.iterdir()) == ["a.packed", "b.packed"]


def test_oldest_copies_make_room(logits, path, cache, monkeypatch) -> None:
    logits()
    size = only(cache).stat().st_size
    for name, age in (("old", 300), ("older", 600), ("unused", folder.UNUSED_S + 60)):
        (cache / f"{name}.packed").write_bytes(bytes(size))
        os.utime(cache / f"{name}.packed", (time.time() - age,) * 2)
    os.utime(path)
    monkeypatch.setenv(folder.VARIABLE, str(3 * size))
    logits()
    names = {copy.path.stem for copy in copies()}
    assert len(names) == 3
    assert "old" in names
    monkeypatch.setenv(folder.VARIABLE, str(size // 2))
    os.utime(path)
    logits()
    assert {copy.path.stem for copy in copies()} == names, "a copy above the limit removes no other"


def test_disk_that_fills_while_writing(logits, cache) -> None:
    """The write is short, the next one fails."""
    with no_file_larger_than(START + 50_000):
        first = logits()
    assert [*cache.iterdir()] == []
    np.testing.assert_array_equal(logits(), first)
    assert only(cache)


def test_full_disk_gets_no_copy(logits, cache, monkeypatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    logits()
    assert [*cache.iterdir()] == []


def test_copies_are_listed_and_removed(logits, path, cache) -> None:
    logits()
    (found,) = copies()
    assert (found.path, found.model, found.n_bytes) == (only(cache), str(path), only(cache).stat().st_size)
    (cache / "broken.packed").write_bytes(b"")
    assert {copy.model for copy in copies()} == {"", str(path)}
    assert remove_copies() == found.n_bytes
    assert copies() == []


def test_no_copies_with_a_limit_of_zero(logits, cache, monkeypatch) -> None:
    monkeypatch.setenv(folder.VARIABLE, "0")
    logits()
    assert not cache.exists()


@pytest.mark.parametrize(("text", "n_bytes"), [("0", 0), ("500m", 500 << 20), ("20G", 20 << 30), ("1T", 1 << 40)])
def test_limit(text: str, n_bytes: int, monkeypatch) -> None:
    monkeypatch.setenv(folder.VARIABLE, text)
    assert limit() == n_bytes


@pytest.mark.parametrize("text", ["-1", "much", "1.5G", "G"])
def test_limit_that_is_no_size(text: str, monkeypatch) -> None:
    monkeypatch.setenv(folder.VARIABLE, text)
    with pytest.raises(InvalidRequestError, match="is not a size such as 500M, 20G or 0"):
        limit()


def test_copy_gives_whole_tensors_only() -> None:
    copy = PackedCopy({"a": np.zeros((2, 3, 4), np.uint8)})
    assert copy.get("a", (2, 3, 4)).shape == (2, 3, 4)
    assert copy.complete
    assert copy.get("a", (2, 3, 5)) is None
    assert copy.get("a", (24,)) is None
    assert copy.get("b", (2, 3, 4)) is None
    assert not copy.complete


@pytest.mark.parametrize("n", [0, 7, 8 * 2039, 100_003])
def test_sum_sees_each_byte(n: int) -> None:
    data = np.random.default_rng(n).integers(0, 256, n, np.uint8)
    before = checksum(data)
    for at in range(0, n, max(1, n // 50)):
        data[at] ^= 1 << at % 8
        assert checksum(data) != before
        data[at] ^= 1 << at % 8
    assert checksum(data) == before


KILLED = """
import os, sys, threading, time
sys.path[:0] = sys.argv[3].split(os.pathsep)
from pathlib import Path
from llamacli.engine.packed_copies import finish_copies, folder, save_copy, writing
writing.MIN_BYTES = 1
folder.cache_folder = lambda: Path(sys.argv[2])
import numpy as np
from llamacli.kernels.matrix import Matrix
matrices = {str(i): Matrix(None, np.full((1, 1, 1, 1 << 22), i, np.uint8), (1, 1), None) for i in range(8)}
print("ready", flush=True)
sys.stdin.readline()
save_copy(sys.argv[1], Path("model"), matrices)
print("started", flush=True)
finish_copies(60)
"""


@pytest.mark.slow
def test_killed_writers_leave_whole_copies_or_none(cache) -> None:
    """Two processes write one copy; they are killed, or end."""
    paths = os.pathsep.join(sys.path)
    seen = set()
    for delay in (0.0, 0.02, None):
        command = [sys.executable, "-c", KILLED, "key", str(cache.parent), paths]
        both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for one in both:
            assert one.stdout.readline() == "ready\n"
        for one in both:
            one.stdin.write("\n")
            one.stdin.flush()
        if delay is not None:
            time.sleep(delay)
        for one in both:
            if delay is not None:
                one.kill()
            one.communicate()
        copy = open_copy("key")
        seen.add(copy is not None)
        for number in range(8) if copy else ():
            assert (copy.get(str(number), (1, 1, 1, 1 << 22)) == number).all()
        remove_copies()
        assert [*cache.iterdir()] == [] if cache.exists() else True
    assert True in seen


def test_index_that_points_outside_is_refused(logits, cache, packs) -> None:
    """Forged copies read nothing outside of their file."""
    logits()
    copy = only(cache)
    data = copy.read_bytes()
    _, _, start, _ = PREFIX.unpack_from(data)
    index = json.loads(data[start:])
    name = next(iter(index["tensors"]))
    changes: list[dict[str, object]] = [
        {"start": 1 << 40}, {"start": -64}, {"start": 3}, {"start": "x"}, {"shape": [1 << 40]}, {"shape": [-1, -64]},
        {"shape": 64}, {"shape": "x"}, {"shape": {}}, {"shape": [0, 1 << 62, 1 << 62], "sums": []}, {"sums": []},
        {"sums": {}},
    ]  # fmt: skip
    for change in changes:
        forged = json.loads(data[start:])
        forged["tensors"][name].update(change)
        copy.write_bytes(reindexed(data, forged))
        packs.clear()
        logits()
        assert packs, change


def reindexed(data: bytes, index: object) -> bytes:
    """Copy with another index and a right checksum of it."""
    magic, _, start, _ = PREFIX.unpack_from(data)
    text = json.dumps(index).encode()
    prefix = PREFIX.pack(magic, hashlib.sha256(text).digest(), start, len(text))
    return prefix + data[len(prefix) : start] + text
