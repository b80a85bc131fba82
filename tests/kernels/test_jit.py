"""Cache of compiled kernels: reuse, damaged files, folders that cannot be written."""

import ctypes
import errno
import functools
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest
from numba.core.compiler_lock import global_compiler_lock
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

import tiny_llama
from llamacli.kernels import jit
from suite import slow_but

SIGNATURE = "int64(int64)"

PROGRAM = """
import logging
logging.basicConfig(format="%(message)s")
from llamacli.kernels.jit import Compiled
def double(x): return 2 * x
def triple(x): return 3 * x
print(*(Compiled(f, "int64(int64)").call(7) for f in (double, triple)))
"""

STORY = """
import logging, sys, llamacli
logging.basicConfig()
with llamacli.load_model(sys.argv[1]) as model, model.create_session() as session:
    print([token.id for token in session.generate([1, 5, 9], max_tokens=12)])
"""


CLOSURES = """
import sys
from numba import njit
from llamacli.kernels.jit import Compiled

def compiled(n):
    @njit
    def power_sum(x):  # too long to be inlined at every call
        total = 0
        for i in range(x):
            total = (total * n + i) % 1000003
            if total % 7 == 0:
                total += n * x
            if total % 11 == 3:
                total -= i
        return total
    def power_sums(x):
        return power_sum(x) + power_sum(x + 1) + power_sum(x + 2) * power_sum(x + 3) - power_sum(2 * x)
    return Compiled(power_sums, "int64(int64)", f"_{n}")

print(*(compiled(int(n)).call(50) for n in sys.argv[1:]))
"""


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The names of the kernels that are compiled, as they are."""
    names: list[str] = []
    monkeypatch.setattr(jit, "listeners", [names.append])
    monkeypatch.setattr(jit, "_unwritable_reasons", [])
    return names


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("LLAMACLI_CACHE", str(tmp_path / "cache"))
    return jit.cache_directory()


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    env = os.environ | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-c", *command], env=env, capture_output=True, text=True, timeout=240, check=False, **options
    )


def file_of(function, folder: Path) -> Path:
    """Place of a function's machine code in the cache."""
    return folder / jit.Compiled(function, SIGNATURE).file_name


def call(function, x: int = 7) -> int:
    """Result of freshly compiled or loaded machine code."""
    return jit.Compiled(function, SIGNATURE).call(x)


def test_a_kernel_is_compiled_once_and_loaded_afterwards(folder, compiled) -> None:
    assert (call(double), call(triple), call(double)) == (14, 21, 14)
    assert compiled == ["double", "triple"]
    assert sorted(folder.iterdir()) == [file_of(double, folder), file_of(triple, folder)]


@pytest.mark.slow
def test_kernels_of_two_processes_call_their_own_functions(tmp_path) -> None:
    """Functions that a kernel calls are weak symbols.

    Equal names would bind to the one that was loaded first.
    """
    env = {"LLAMACLI_CACHE": str(tmp_path)}
    apart = [run(CLOSURES, n, env=env).stdout.strip() for n in ("3", "5")]
    assert apart[0] != apart[1]
    assert run(CLOSURES, "3", "5", env=env).stdout.split() == apart
    assert run(CLOSURES, "5", "3", env=env).stdout.split() == apart[::-1]


def test_an_interrupt_leaves_no_lock_with_its_thread(folder, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        global_compiler_lock.acquire()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("llamacli.kernels.compiler._compile_for_target", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(double)
    assert elsewhere(lambda: call(double)) == 14


def test_what_is_compiled_waits_for_no_compiler(folder) -> None:
    compiled = jit.Compiled(double, SIGNATURE)
    compiled.compile()
    with jit._compiling:
        assert elsewhere(lambda: compiled.address) == compiled.address


def elsewhere(work: Callable[[], int]) -> int | None:
    """Result of another thread; None after a minute."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    return results[0] if results else None


def test_kernels_unused_for_long_are_deleted(folder, compiled) -> None:
    old, used, foreign = (folder.parent / name for name in ("0123456789abcdef", folder.name, "notes"))
    long_ago = time.time() - 60 * 24 * 3600
    for other in (old, used, foreign):
        other.mkdir(0o700, parents=True)
        for name in ("old.kernel", "new.kernel") if other == used else ("old.kernel",):
            (other / name).write_bytes(b"some")
        os.utime(other / "old.kernel", (long_ago, long_ago))
        os.utime(other, (long_ago, long_ago))
    jit._prune.cache_clear()
    assert call(double) == 14
    left = sorted(path.relative_to(folder.parent) for path in folder.parent.rglob("*.kernel"))
    new = file_of(double, folder)
    assert left == sorted(
        Path(*names) for names in ((used.name, new.name), (used.name, "new.kernel"), ("notes", "old.kernel"))
    )
    assert not old.exists()
    os.utime(new, (long_ago, long_ago))
    assert call(double) == 14
    assert compiled == ["double"]
    assert new.stat().st_mtime > time.time() - 3600, "what is loaded is in use"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_what_cannot_be_written_is_compiled_in_memory(folder, compiled, caplog, monkeypatch, number) -> None:
    def fail(path: Path, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data[:100])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert (call(double), call(triple)) == (14, 21)
    said = [record.message for record in caplog.records if "cannot be cached" in record.message]
    assert len(said) == 1
    assert os.strerror(number) in said[0]
    assert list(folder.iterdir()) == []


@pytest.mark.medium
def test_a_disk_that_takes_no_more_ends_no_run(tmp_path) -> None:
    done = run(
        PROGRAM, env={"LLAMACLI_CACHE": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "14 21\n"), done.stderr
    assert done.stderr.count("compiled kernels cannot be cached, so every process compiles them: ") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.medium
def test_a_folder_that_cannot_be_made_is_said_and_done_without(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder can be made in a file")
    done = run(PROGRAM, env={"LLAMACLI_CACHE": str(blocked / "cache")})
    assert (done.returncode, done.stdout) == (0, "14 21\n"), done.stderr
    assert done.stderr.count("cannot be cached") == 1


def test_a_filled_folder_is_read_where_nothing_can_be_written(folder, compiled, caplog, monkeypatch) -> None:
    call(double)
    folder.chmod(0o500)

    def refuse(path: Path, data: bytes) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # a superuser may write to any folder

    monkeypatch.setattr(Path, "write_bytes", refuse)
    caplog.clear()
    assert call(double) == 14
    assert compiled == ["double"]
    assert caplog.records == []
    folder.chmod(0o700)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:32],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"0",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:500] + bytes([data[500] ^ 4]) + data[501:],
        lambda data: bytes(len(data)),
    ],
    ids=["empty", "start", "digest", "half", "short", "long", "digest-bit", "code-bit", "zeros"],
)
def test_a_damaged_kernel_is_made_anew(folder, compiled, damage) -> None:
    call(double)
    entry = file_of(double, folder)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert call(double) == 14
    assert compiled == ["double", "double"]
    assert call(double) == 14
    assert compiled == ["double", "double"]


def test_a_kernel_that_others_can_write_is_compiled_again(folder, compiled, caplog) -> None:
    """A kernel's file holds machine code."""
    caplog.set_level(logging.INFO, "llamacli")
    call(double)
    file = file_of(double, folder)
    file.chmod(0o666)
    assert call(double) == 14
    assert compiled == ["double", "double"]
    assert f"other users can write to it: '{file}'" in caplog.text
    assert file.stat().st_mode & 0o777 == 0o600
    assert call(double) == 14
    assert compiled == ["double", "double"]


@pytest.mark.parametrize("reason", ["mode", "owner", "link", "shared"])
def test_kernels_in_folders_of_others_are_compiled(reason, folder, compiled, caplog, monkeypatch) -> None:
    """Nothing is read from there, and nothing written."""
    caplog.set_level(logging.INFO, "llamacli")
    jit._say_shared.cache_clear()
    call(double)
    named = folder
    if reason in ("owner", "link") and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    if reason == "mode":
        folder.chmod(0o777)
    elif reason == "owner":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        os.chown(folder, 54321, -1)
    elif reason == "shared":
        named = folder.parent.parent
        named.chmod(0o777)
    else:
        named = folder.parent.parent.with_name("link")
        named.symlink_to(folder.parent.parent)
        os.chown(named, 54321, -1, follow_symlinks=False)
        monkeypatch.setenv("LLAMACLI_CACHE", str(named))
    assert (call(double), call(triple)) == (14, 21)
    assert compiled == ["double", "double", "triple"]
    said = [record for record in caplog.records if "other users can write to it" in record.message]
    assert [record.levelname for record in said] == ["INFO"]
    assert str(named) in said[0].message
    assert not file_of(triple, folder).exists()


def test_own_links_and_folders_below_shared_ones_with_the_sticky_bit_are_used(folder, compiled, monkeypatch) -> None:
    call(double)
    home = folder.parent.parent.parent
    home.chmod(0o1777)
    (home / "link").symlink_to("cache")
    monkeypatch.setenv("LLAMACLI_CACHE", str(home / "cache" / ".." / "link"))
    assert call(double) == 14
    assert compiled == ["double"]


def test_kernels_directly_in_a_folder_with_the_sticky_bit_are_not_used(folder, compiled) -> None:
    call(double)
    folder.chmod(0o1777)
    assert call(double) == 14
    assert compiled == ["double", "double"]


def test_a_folder_in_a_kernels_place_is_not_read(folder, compiled, caplog) -> None:
    file_of(double, folder).mkdir(0o700, parents=True)
    assert call(double) == 14
    assert "cannot be cached" in caplog.text


def test_the_folder_is_a_users_own(monkeypatch) -> None:
    for name in ("LLAMACLI_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setattr(platformdirs, "PlatformDirs", Unix)
    assert jit.cache_directory().parent == Path("/somewhere/.cache/llamacli/kernels")
    monkeypatch.setattr(platformdirs, "PlatformDirs", MacOS)
    assert jit.cache_directory().parent == Path("/somewhere/Library/Caches/llamacli/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert jit.cache_directory().parent == Path("/elsewhere/llamacli/kernels")
    monkeypatch.setenv("LLAMACLI_CACHE", "here")
    assert jit.cache_directory().parent == Path("here/kernels")


@pytest.mark.parametrize("empty", ["LLAMACLI_CACHE", "XDG_CACHE_HOME"])
def test_an_empty_name_is_none(monkeypatch, empty) -> None:
    monkeypatch.delenv("LLAMACLI_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv(empty, "")
    monkeypatch.setattr(platformdirs, "PlatformDirs", Unix)
    assert jit.cache_directory().parent == Path("/somewhere/.cache/llamacli/kernels")


def test_an_empty_home_is_the_one_that_the_system_knows(monkeypatch) -> None:
    import pwd

    for name in ("LLAMACLI_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "")
    known = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert jit.cache_directory().is_relative_to(known)

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert jit.cache_directory() is None


@pytest.mark.medium
def test_without_a_folder_nothing_is_written_where_the_process_is(tmp_path) -> None:
    done = run(PROGRAM, env={"LLAMACLI_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "."}, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "14 21\n"), done.stderr
    assert "no home folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
def test_numbas_own_folder_stays_as_it_was(tmp_path) -> None:
    program = "import numba; before = numba.config.CACHE_DIR\n" + PROGRAM + "print(before == numba.config.CACHE_DIR)"
    for theirs in ("", str(tmp_path / "theirs")):
        done = run(program, env={"NUMBA_CACHE_DIR": theirs, "LLAMACLI_CACHE": str(tmp_path / "ours")})
        assert done.stdout == "14 21\nTrue\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def bind_modes() -> None:
    """Drop root's capabilities that override file modes (prctl).

    From the next program on.
    """
    for capability in (1, 2) if hasattr(LIBC, "prctl") else ():  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        LIBC.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


LIBC = ctypes.CDLL(None)


def set_read_only(folder: Path) -> None:
    """Forbid to write in a folder and to what is in it."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)


@pytest.fixture
def binding(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], None]:
    """Function that a child process calls so that modes bind it."""
    folder = tmp_path_factory.mktemp("read-only")
    set_read_only(folder)
    done = run(f"open({str(folder / 'file')!r}, 'w')", preexec_fn=bind_modes)
    if "PermissionError" not in done.stderr:
        pytest.skip("this process, or the file system, does not let modes of files bind: no folder is read-only")
    return bind_modes


@pytest.mark.medium
@pytest.mark.parametrize("state", slow_but(["damaged"], ["whole", "damaged", "empty"]))
def test_a_read_only_folder(state, binding, tmp_path) -> None:
    """Load kernels that are there; compile the others, with one warning."""
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    if state != "empty":
        assert run(PROGRAM, env={"LLAMACLI_CACHE": str(folder)}).returncode == 0
    entries = sorted(folder.rglob("*.kernel"))
    if state == "damaged":
        entries[0].write_bytes(entries[0].read_bytes()[:-1])
    set_read_only(folder)
    before = {path: path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}
    done = run(PROGRAM, env={"LLAMACLI_CACHE": str(folder)}, preexec_fn=binding)
    assert (done.returncode, done.stdout) == (0, "14 21\n"), done.stderr
    assert done.stderr.count("cannot be cached") == (state != "whole"), done.stderr
    assert done.stderr.count("is damaged") == (state == "damaged"), done.stderr
    assert bool(done.stderr) == (state != "whole")
    assert {path: path.stat().st_mtime for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("state", ["empty", "corrupt", "read-only", "full"])
def test_sixteen_first_starts_at_once(state, tmp_path, request) -> None:
    """All print the right numbers, and leave whole files behind, or none."""
    folder, limit = tmp_path / "cache", None
    env = os.environ | {"LLAMACLI_CACHE": str(folder)}
    if state == "read-only":
        folder.mkdir(0o500)
        limit = request.getfixturevalue("binding")
    if state == "corrupt":
        assert run(PROGRAM, env=env).returncode == 0
        for path in folder.rglob("*.kernel"):
            path.write_bytes(path.read_bytes()[:-1])
    if state == "full":
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, 100))
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=limit,
        )
        for _ in range(16)
    ]  # fmt: skip
    for start in starts:
        text, errors = start.communicate(timeout=600)
        assert (start.returncode, text) == (0, "14 21\n"), errors
        assert errors.count("cannot be cached") == (state in ("read-only", "full")), errors
    left = {path.name.partition("-")[0] for path in folder.rglob("*") if path.is_file()} - {"cpu.json"}
    assert left == (set() if state in ("read-only", "full") else {"double", "triple"})
    if left:
        assert run(PROGRAM, env=env).stderr == ""


@pytest.mark.slow
def test_a_model_runs_from_a_damaged_cache_as_from_a_new_one(tmp_path) -> None:
    model = tiny_llama.write_llama(tmp_path / "model.gguf", type="Q8_0")
    env = {"LLAMACLI_CACHE": str(tmp_path / "cache")}
    expected = run(STORY, str(model), env=env)
    assert expected.returncode == 0, expected.stderr
    entries = [path for path in tmp_path.rglob("*.kernel") if path.is_file()]
    assert entries
    for path in entries:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    done = run(STORY, str(model), env=env)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    assert done.stderr.count("is damaged and is compiled again") == len(entries)
    again = run(STORY, str(model), env=env)
    assert (again.stdout, again.stderr) == (expected.stdout, "")


@pytest.fixture(autouse=True)
def quiet(caplog) -> None:
    caplog.set_level(logging.WARNING, "llamacli")
