"""Atomic replacement of files."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamacli.errors import InvalidRequestError
from llamacli.util import files
from llamacli.util.files import SharedFileError, make_own_folder, open_own, replacing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.bin"


def write(path: Path, content: bytes = b"new", *, overwrite: bool = False) -> None:
    with replacing(path, overwrite=overwrite) as file:
        file.write(content)


def test_new_file_is_written(path: Path) -> None:
    with replacing(path, overwrite=False) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == [path.name]


def test_mode_follows_umask(path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_old_file_stays_until_new_one_is_complete(path: Path) -> None:
    path.write_bytes(b"old")
    with replacing(path, overwrite=True) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_leaves_old_file(path: Path, error: type[BaseException]) -> None:
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path, overwrite=True) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_existing_file_needs_overwrite(path: Path) -> None:
    path.write_bytes(b"old")
    with pytest.raises(InvalidRequestError, match="exists"):
        write(path)
    assert path.read_bytes() == b"old"


def test_file_created_meanwhile_is_kept(path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="exists"), replacing(path, overwrite=False):
        path.write_bytes(b"another's")
    assert path.read_bytes() == b"another's"
    assert os.listdir(path.parent) == [path.name]


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        with pytest.raises(InvalidRequestError, match="not a regular file"):
            write(path, overwrite=True)


def test_symlink_target_is_replaced(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"old")
    path.symlink_to(target)
    write(path, overwrite=True)
    assert path.is_symlink()
    assert target.read_bytes() == b"new"


def test_errors_name_the_file(tmp_path: Path) -> None:
    missing = tmp_path / "no such folder" / "out.bin"
    with pytest.raises(FileNotFoundError) as caught:
        write(missing)
    assert caught.value.filename == str(missing)


def test_full_disk_error_names_the_file(path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, replacing(path, overwrite=False):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(path)
    assert not os.listdir(path.parent)


def test_errors_of_other_files_keep_their_name(path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing(path, overwrite=False):
        Path("/no/such/file").read_bytes()
    assert caught.value.filename == "/no/such/file"


@pytest.mark.medium
def test_leftovers_of_killed_writers_are_removed(path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from llamacli.util.files import replacing\n"
        "with replacing(Path(sys.argv[1]), overwrite=True) as file:\n"
        "    file.write(b'partial'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == -signal.SIGKILL
    others = [".other.bin.01234567.part", f".{path.name}.0123456.part", f".{path.name}.01234567.part2"]
    for name in others:
        (path.parent / name).touch()
    assert len(os.listdir(path.parent)) == 4
    with replacing(path, overwrite=True) as file:
        file.write(b"first")
        write(path, b"second", overwrite=True)  # the temporary file of a writer at work stays
    assert path.read_bytes() == b"first"
    assert sorted(os.listdir(path.parent)) == sorted([path.name, *others])


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("user", "group", "members", "mode", "is_own"),
    [
        (12345, "one", [], 0o660, True), (12345, "one", ["one"], 0o660, True), (12345, "one", [], 0o662, False),
        (12345, "one", ["one", "two"], 0o660, False), (12345, "users", [], 0o660, False),
        (0, "one", [], 0o660, False),
    ],
)  # fmt: skip
def test_a_users_private_group_may_write(
    user: int, group: str, members: list[str], mode: int, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(mode)
    os.chown(path, user, 777)
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_uid=uid, pw_gid=777, pw_name="one"))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    files._is_private.cache_clear()
    if is_own:
        open_own(path).close()
    else:
        with pytest.raises(SharedFileError):
            open_own(path)
    files._is_private.cache_clear()


def test_own_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    folder, mask = tmp_path / "a" / "b", os.umask(0)
    try:
        make_own_folder(folder)
        make_own_folder(folder)
    finally:
        os.umask(mask)
    assert [one.stat().st_mode & 0o777 for one in (folder, folder.parent)] == [0o700, 0o700]
    folder.parent.chmod(0o707)
    with pytest.raises(SharedFileError, match=f"other users can write to it: '{folder.parent}'"):
        make_own_folder(folder)


@pytest.mark.parametrize("kind", ["loop", "pipe", "folder", "missing"])
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(OSError, match=str(path)) as error:
        open_own(path)
    assert not isinstance(error.value, SharedFileError)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given", ["file", "link", "folder"])
def test_files_that_others_can_change_are_not_opened(given: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("folder")
    path = tmp_path / "link" / "file"
    with open_own(path) as file:
        assert file.read() == b"text"
    place = {"file": tmp_path / "folder" / "file", "folder": tmp_path / "folder", "link": tmp_path / "link"}[given]
    os.chown(place, 54321, -1, follow_symlinks=False)
    with pytest.raises(SharedFileError, match=f"other users can write to it: '{place}'"):
        open_own(path)


@pytest.mark.parametrize("taken", [(), ("preadv", "writev", "posix_fallocate")])
def test_calls_that_other_systems_lack(taken: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in taken:
        monkeypatch.delattr(os, name)
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    descriptor = os.open(path, os.O_RDWR)
    try:
        files.allocate(descriptor, 4, 2_000_000)
        assert path.stat().st_size == 2_000_004
        os.lseek(descriptor, 3, os.SEEK_SET)
        pieces, n = [memoryview(b"de"), memoryview(b"fgh")], 0
        while pieces:
            n = files.write_pieces(descriptor, pieces)
            while pieces and n >= len(pieces[0]):
                n -= len(pieces.pop(0))
            assert n == 0
        found = bytearray(6)
        assert files.read_into(descriptor, memoryview(found), 2) == 6
        assert bytes(found) == b"cdefgh"
        assert files.read_into(descriptor, memoryview(found), 3_000_000) == 0
    finally:
        os.close(descriptor)
