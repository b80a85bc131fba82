"""Full disks and short writes: the old file stays."""

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from conftest import TinyGguf
from llamacli import LlamaCliError, load_model
from llamacli.chat.messages import Message
from llamacli.cli.conversations import Conversation, ConversationLog
from llamacli.conversion import file_type, plan, write
from llamacli.gguf import open_gguf
from llamacli.plugins import Plugins
from llamacli.util import files

POINTS = 12
"""Sizes at which files may not grow any more, from nothing to all but a byte."""

TALK = Conversation("model.gguf", "", {}, [])


@attrs.frozen
class Action:
    """Writer of two versions of a file, 0 and 1, and reader."""

    path: Path
    write: Callable[[int], object]
    read: Callable[[], object]


@contextlib.contextmanager
def no_file_larger_than(n_bytes: int) -> Iterator[None]:
    """Limit the size of files (RLIMIT_FSIZE).

    A write across it is short, the next one fails.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=["state", "model", "log"])
def action(request: pytest.FixtureRequest, tiny_gguf: TinyGguf, plugins: Plugins, tmp_path: Path) -> Action:
    path = tmp_path / "folder" / "out"
    path.parent.mkdir()
    if request.param == "state":
        model = load_model(tiny_gguf("gqa"), plugins=plugins)
        sessions = [model.create_session(reuse=False) for _ in range(2)]
        for n, session in enumerate(sessions):
            session.eval(range(20 + 20 * n))
        return Action(path, lambda version: sessions[version].save(path), path.read_bytes)
    if request.param == "model":

        def convert(version: int) -> None:
            with open_gguf(tiny_gguf("gqa")) as file:
                write(plan(file, file_type(["Q8_0", "BF16"][version])), path, threads=1, overwrite=True)

        return Action(path, convert, path.read_bytes)
    log = ConversationLog(path)
    number = log.save(TALK)
    versions = [attrs.evolve(TALK, id=number, messages=[Message("user", text * 60_000)]) for text in "xy"]
    return Action(path, lambda version: log.save(versions[version]), lambda: log.load(number).messages)


def test_failed_writes_leave_the_old_file(action: Action) -> None:
    contents, sizes = [], []
    for version in (1, 0):
        action.write(version)
        contents.append(action.read())
        sizes.append(action.path.stat().st_size)
    names, n_failed = os.listdir(action.path.parent), 0
    for point in range(POINTS):
        error = failure(action.write, 1, point * (sizes[0] - 1) // (POINTS - 1))
        if error is None:  # a database has free pages
            assert action.read() == contents[0]
            action.write(0)
        else:
            n_failed += 1
            assert str(action.path) in str(error)
            assert action.read() == contents[1]
            assert os.listdir(action.path.parent) == names
    assert n_failed == POINTS or (n_failed > 0 and sizes[0] == sizes[1])


def failure(write: Callable[[int], object], version: int, n_bytes: int) -> Exception | None:
    """Error of a write where no file may be larger."""
    try:
        with no_file_larger_than(n_bytes):
            write(version)
    except (OSError, LlamaCliError) as error:
        return error
    return None


def write_new(path: Path) -> None:
    with files.replacing(path, overwrite=True) as file:
        file.write(b"new")


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_failing_system_call_leaves_the_old_file(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_new(path)
    assert caught.value.filename == str(path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["out"])
