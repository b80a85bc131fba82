"""Store: owners, pages, limits, ages, and files that it cannot read."""

import contextlib
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.serve.errors import StorageFullError, StoreError, UnknownObjectError
from llamacli.serve.store import FILE_NAME, VERSION, Store


def respond(store: Store, name: str, text: str = "", **options) -> None:
    store.add("response", "anna", {"id": name, "text": text}, **options)


def test_objects_survive_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    respond(store, "resp_1", items=[{"id": "a"}, {"id": "b"}], private={"body": 1}, is_open=True)
    store.close()
    store = Store(tmp_path / "data")
    found = store.get("response", "resp_1", "anna")
    assert (found.data, found.private) == ({"id": "resp_1", "text": ""}, {"body": 1})
    assert [item["id"] for item in store.items("resp_1")] == ["a", "b"]
    assert [one.id for one in store.unfinished("response")] == ["resp_1"]
    assert store.update("resp_1", {"id": "resp_1", "text": "done"}, is_open=False)
    assert store.unfinished("response") == []
    store.close()


@pytest.mark.parametrize(("kind", "owner"), [("response", "bert"), ("file", "anna")])
def test_objects_of_others_are_unknown(kind, owner) -> None:
    store = Store()
    respond(store, "resp_1")
    with pytest.raises(UnknownObjectError, match="resp_1"):
        store.get(kind, "resp_1", owner)
    with pytest.raises(UnknownObjectError):
        store.remove(kind, "resp_1", owner)
    assert store.get("response", "resp_1", None).owner == "anna"


def test_items_with_the_same_id_are_a_mistake_of_the_request() -> None:
    store = Store()
    with pytest.raises(InvalidRequestError, match="two items have the same id"):
        store.add("conversation", "anna", {"id": "conv_1"}, items=[{"id": "a"}, {"id": "a"}])
    with pytest.raises(UnknownObjectError):
        store.get("conversation", "conv_1", "anna")
    store.close()


def test_pages() -> None:
    store = Store()
    for i in range(5):
        respond(store, f"resp_{i}", items=[{"id": f"item_{k}"} for k in range(3)])
    newest, more = store.page("response", "anna", limit=2)
    assert ([one["id"] for one in newest], more) == (["resp_4", "resp_3"], True)
    rest, more = store.page("response", "anna", limit=9, after="resp_3")
    assert ([one["id"] for one in rest], more) == (["resp_2", "resp_1", "resp_0"], False)
    assert store.page("response", "bert", limit=9) == ([], False)
    items, more = store.page_of_items("resp_0", limit=2, after="item_0", ascending=True)
    assert ([one["id"] for one in items], more) == (["item_1", "item_2"], False)
    with pytest.raises(UnknownObjectError, match="after"):
        store.page("response", "anna", limit=2, after="resp_9")
    store.remove_item("resp_0", "item_1")
    assert [one["id"] for one in store.items("resp_0")] == ["item_0", "item_2"]
    with pytest.raises(UnknownObjectError):
        store.remove_item("resp_0", "item_1")


def test_least_recently_used_give_way() -> None:
    store = Store(max_bytes=1 << 20)
    respond(store, "resp_open", "x", is_open=True)
    for i in range(40):
        respond(store, f"resp_{i}", "x" * 50_000)
    assert store.n_bytes < 1.5 * (1 << 20)
    store.get("response", "resp_39", "anna")
    store.get("response", "resp_open", "anna")
    with pytest.raises(UnknownObjectError):
        store.get("response", "resp_0", "anna")


def test_a_full_store_refuses_and_keeps_what_it_has() -> None:
    store = Store(max_bytes=1 << 20)
    store.add_chunk("file_1", 0, b"x" * 900_000)
    with pytest.raises(StorageFullError, match="--store-size"):
        store.add_chunk("file_2", 0, b"x" * 900_000)
    assert b"".join(store.chunks("file_1")) == b"x" * 900_000
    assert list(store.chunks("file_2")) == []
    store.drop_chunks("file_1")
    store.add_chunk("file_2", 0, b"x" * 900_000)


def test_old_objects_expire() -> None:
    store = Store(max_age=3600)
    respond(store, "resp_new")
    respond(store, "resp_old", items=[{"id": "a"}])
    respond(store, "resp_open", is_open=True)
    store._database.execute("UPDATE objects SET used = ? WHERE id != 'resp_new'", (time.time() - 4000,))
    assert store.expire() == 1
    assert store.items("resp_old") == []
    assert store.get("response", "resp_new", "anna")
    assert store.get("response", "resp_open", "anna")


def test_results_are_there_once() -> None:
    store = Store()
    for line, failed in ((3, False), (1, True), (3, True), (2, False)):
        store.add_result("batch_1", line, b"%d\n" % line, failed=failed)
    assert store.lines_done("batch_1") == {1: True, 2: False, 3: False}
    assert list(store.results("batch_1", failed=False)) == [b"2\n", b"3\n"]
    assert store.n_result_bytes("batch_1", failed=True) == (1, 2)


def test_one_server_a_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    with pytest.raises(InvalidRequestError, match="another process"):
        Store(tmp_path / "data")
    store.close()
    Store(tmp_path / "data").close()


@pytest.mark.parametrize("damage", ["cut", "text", "other"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "data"
    store = Store(folder)
    for i in range(200):
        respond(store, f"resp_{i}", "x" * 1000)
    store.close()
    path = folder / FILE_NAME
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "text":
            path.write_bytes(b"not a database " * 1000)
        case "other":
            path.unlink()
            with sqlite3.connect(path) as other:
                other.execute("CREATE TABLE t (x)")
    with pytest.raises(ModelFormatError, match=FILE_NAME):
        Store(folder)


@pytest.mark.parametrize(("column", "value"), [("data", b'{"id"'), ("used", b"x")])
def test_damaged_objects_are_errors_of_the_store(column: str, value: bytes) -> None:
    store = Store()
    respond(store, "resp_1")
    store._database.execute(f"UPDATE objects SET {column} = CAST(? AS TEXT)", (value,))
    with pytest.raises(StoreError):
        store.get("response", "resp_1", "anna")


def test_newer_version(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    Store(folder).close()
    with sqlite3.connect(folder / FILE_NAME) as other:
        other.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(InvalidRequestError, match=f"version {VERSION + 1}"):
        Store(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Folder of a file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no file system may be mounted")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.medium
def test_full_disk_refuses_and_loses_nothing(small_disk: Path) -> None:
    store = Store(small_disk / "data")
    respond(store, "resp_1", "a" * 100_000)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    with pytest.raises(StorageFullError, match=r"disk|cannot be written"):
        respond(store, "resp_2", "b" * 200_000)
    assert store.get("response", "resp_1", "anna").data["text"] == "a" * 100_000
    with pytest.raises(UnknownObjectError):
        store.get("response", "resp_2", "anna")
    filler.unlink()
    respond(store, "resp_2", "b" * 200_000)
    store.close()
    again = Store(small_disk / "data")
    texts = [again.get("response", f"resp_{number}", "anna").data["text"][0] for number in (1, 2)]
    assert texts == ["a", "b"]
    again.close()


@pytest.mark.slow
def test_file_that_another_program_locks(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            store.add_chunk("file_1", 0, b"a")
        other.execute("ROLLBACK")
        store.add_chunk("file_1", 0, b"a")
    assert b"".join(store.chunks("file_1")) == b"a"
    store.close()
