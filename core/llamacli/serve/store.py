"""SQLite store of responses, conversations, files and batches.

In memory, or in a folder that one server at a time has.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from llamacli.errors import InvalidRequestError, LlamaCliError, ModelFormatError
from llamacli.serve.errors import StorageFullError, StoreError, UnknownObjectError
from llamacli.util.files import make_own_folder
from llamacli.util.locking import locked

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Kind = Literal["response", "conversation", "file", "batch"]
Object = dict[str, Any]

FILE_NAME = "store.sqlite"
VERSION = 1

_TABLES = """
CREATE TABLE objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, owner TEXT NOT NULL,
    used REAL NOT NULL, open INTEGER NOT NULL, data TEXT NOT NULL, private TEXT NOT NULL
);
CREATE INDEX objects_by_kind ON objects (kind, owner);
CREATE TABLE items (
    number INTEGER PRIMARY KEY AUTOINCREMENT, parent TEXT NOT NULL, id TEXT NOT NULL, data TEXT NOT NULL,
    UNIQUE (parent, id)
);
CREATE TABLE chunks (file TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, number));
CREATE TABLE results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (batch, line)
);
"""
_PAGE = 4096
_LEAST_PAGES = 64
"""Pages for tables and indexes, which the limit does not count."""

_FULL = "the store is full: delete files, or give it more by --store-size"
_FRESH_S = 60
"""Seconds after which a use is noted again."""

_PREFIXES = {"response": "resp", "conversation": "conv", "file": "file", "batch": "batch"}


def new_id(prefix: str) -> str:
    """Identifier of a new object."""
    return f"{prefix}_{secrets.token_hex(16)}"


@attrs.frozen
class Found:
    """Stored object, with its owner; clients do not see `private`."""

    id: str
    owner: str
    data: Object
    private: Object


class Store:
    """Objects with owners; methods may be called from any thread.

    - `max_bytes`: limit of all that is stored. Responses and conversations that were not used for longest give way;
      what is still too much raises StorageFullError.
    - `max_age`: seconds after their last use after which objects are removed, None for never.

    An object that is open (a batch that runs) is never removed by limit or age. Errors of SQLite are StoreError.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = 256 << 20, max_age: float | None = None):
        """Open the store of a folder; one in memory for None.

        Raises InvalidRequestError if another server has the folder, or a newer version wrote it; ModelFormatError for a
        damaged file; OSError.
        """
        self.lock = threading.RLock()
        self._max_age = max_age
        self._held: int | None = None
        self.path = None if folder is None else folder / FILE_NAME
        if folder is not None:
            make_own_folder(folder)
            self._held = _held(folder / "lock")
        try:
            self._database = self._open(max_bytes)
        except BaseException:
            if self._held is not None:
                os.close(self._held)
            raise

    def _n_used(self) -> int:
        count = self._database.execute("PRAGMA page_count").fetchone()[0]
        free = self._database.execute("PRAGMA freelist_count").fetchone()[0]
        return int(count) - int(free)

    def _open(self, max_bytes: int) -> sqlite3.Connection:
        name = ":memory:" if self.path is None else str(self.path)
        database = None
        try:
            database = sqlite3.connect(name, check_same_thread=False, isolation_level=None, timeout=5)
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise InvalidRequestError(f"{name}: it is of version {version}; this program reads {VERSION}")
            found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise ModelFormatError(f"{name}: it is damaged: {found}")
            if not version:
                if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise ModelFormatError(f"{name}: it is a database of another program")
                database.execute(f"PRAGMA page_size = {_PAGE}")
                database.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
            database.execute("DELETE FROM chunks WHERE file NOT IN (SELECT id FROM objects)")  # of a killed upload
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if database is not None:
                database.close()
            told = "move it away to begin an empty one"
            raise ModelFormatError(f"{name}: it is not a store of this server: {error}; {told}") from None
        except BaseException:
            if database is not None:
                database.close()
            raise
        self._limit = _LEAST_PAGES + max_bytes // _PAGE
        return database

    @locked
    def close(self) -> None:
        """Close the file; later calls raise StoreError."""
        self._database.close()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @property
    @locked
    def n_bytes(self) -> int:
        """Bytes that the objects take, with their indexes."""
        with self._errors():
            return self._n_used() * _PAGE

    # --- objects

    @locked
    def add(
        self,
        kind: Kind,
        owner: str,
        data: Object,
        *,
        private: Object | None = None,
        items: Iterable[Object] = (),
        is_open: bool = False,
    ) -> None:
        """Add an object under its id, or replace it.

        `items` are appended to it. `private` is data that clients do not see.
        """
        with self._writing():
            given = (data["id"], kind, owner, time.time(), is_open, json.dumps(data), json.dumps(private or {}))
            self._database.execute(
                "INSERT INTO objects (id, kind, owner, used, open, data, private) VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET used = excluded.used, open = excluded.open, data = excluded.data, "
                "private = excluded.private",
                given,
            )
            self._add_items(data["id"], items)

    @locked
    def get(self, kind: Kind, name: str, owner: str | None) -> Found:
        """Object of an id; None is any owner. Raises UnknownObjectError."""
        with self._errors():
            row = self._database.execute(
                "SELECT id, owner, data, private, used FROM objects WHERE id = ? AND kind = ?", (name, kind)
            ).fetchone()
            if row is None or owner not in (None, row[1]):
                raise UnknownObjectError(f"there is no {kind} {name!a}: it was deleted, or is too old")
            now = time.time()
            if now - row[4] > _FRESH_S:
                self._database.execute("UPDATE objects SET used = ? WHERE id = ?", (now, name))
            return _found(row)

    @locked
    def update(self, name: str, data: Object, *, is_open: bool) -> bool:
        """Replace an object's data; False if it was removed."""
        with self._writing():
            given = (json.dumps(data), is_open, time.time(), name)
            return bool(
                self._database.execute("UPDATE objects SET data = ?, open = ?, used = ? WHERE id = ?", given).rowcount
            )

    @locked
    def remove(self, kind: Kind, name: str, owner: str | None) -> None:
        """Remove an object and what belongs to it. Raises UnknownObjectError."""
        self.get(kind, name, owner)
        with self._writing():
            self._remove([name])

    @locked
    def page(
        self, kind: Kind, owner: str, *, limit: int, after: str | None = None, ascending: bool = False
    ) -> tuple[list[Object], bool]:
        """Objects of an owner behind `after`, and whether more follow.

        Raises UnknownObjectError.
        """
        order, beyond = ("ASC", ">") if ascending else ("DESC", "<")
        with self._errors():
            start = self._number_after("objects", "kind", kind, after)
            where = f"AND number {beyond} ?" if start is not None else ""
            rows = self._database.execute(
                f"SELECT data FROM objects WHERE kind = ? AND owner = ? {where} ORDER BY number {order} LIMIT ?",
                (kind, owner, *([] if start is None else [start]), limit + 1),
            ).fetchall()
            return [json.loads(row[0]) for row in rows[:limit]], len(rows) > limit

    @locked
    def unfinished(self, kind: Kind) -> list[Found]:
        """Open objects, the oldest first."""
        with self._errors():
            rows = self._database.execute(
                "SELECT id, owner, data, private FROM objects WHERE kind = ? AND open ORDER BY number", (kind,)
            ).fetchall()
            return [_found(row) for row in rows]

    # --- items of responses and conversations

    @locked
    def add_items(self, parent: str, items: Iterable[Object]) -> None:
        """Append items, each with an `id`, to an object."""
        with self._writing():
            self._add_items(parent, items)

    @locked
    def items(self, parent: str) -> list[Object]:
        """All items of an object in order."""
        with self._errors():
            rows = self._database.execute("SELECT data FROM items WHERE parent = ? ORDER BY number", (parent,))
            return [json.loads(row[0]) for row in rows]

    @locked
    def page_of_items(
        self, parent: str, *, limit: int, after: str | None = None, ascending: bool = False
    ) -> tuple[list[Object], bool]:
        """Items of an object behind `after`, and whether more follow.

        Raises UnknownObjectError.
        """
        order, beyond = ("ASC", ">") if ascending else ("DESC", "<")
        with self._errors():
            start = self._number_after("items", "parent", parent, after)
            where = f"AND number {beyond} ?" if start is not None else ""
            rows = self._database.execute(
                f"SELECT data FROM items WHERE parent = ? {where} ORDER BY number {order} LIMIT ?",
                (parent, *([] if start is None else [start]), limit + 1),
            ).fetchall()
            return [json.loads(row[0]) for row in rows[:limit]], len(rows) > limit

    @locked
    def remove_item(self, parent: str, name: str) -> None:
        """Remove one item. Raises UnknownObjectError."""
        with self._writing():
            gone = self._database.execute("DELETE FROM items WHERE parent = ? AND id = ?", (parent, name)).rowcount
        if not gone:
            raise UnknownObjectError(f"{parent} has no item {name!a}")

    # --- contents of files

    @locked
    def add_chunk(self, file: str, number: int, data: bytes) -> None:
        """Add a part of a file's contents."""
        with self._writing():
            self._database.execute("INSERT INTO chunks VALUES (?, ?, ?)", (file, number, data))

    def chunks(self, file: str) -> Iterator[bytes]:
        """Parts of a file's contents in order."""
        number = 0
        while True:
            with self.lock, self._errors():
                row = self._database.execute(
                    "SELECT data FROM chunks WHERE file = ? AND number = ?", (file, number)
                ).fetchone()
            if row is None:
                return
            yield row[0]
            number += 1

    @locked
    def drop_chunks(self, file: str) -> None:
        """Remove the contents of a file that did not come whole."""
        with self._writing():
            self._database.execute("DELETE FROM chunks WHERE file = ?", (file,))

    # --- results of batches

    @locked
    def add_result(self, batch: str, line: int, data: bytes, *, failed: bool) -> None:
        """Add the result of a line, unless it is there."""
        with self._writing():
            self._database.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", (batch, line, failed, data))

    @locked
    def lines_done(self, batch: str) -> dict[int, bool]:
        """Lines that have a result, true for those that failed."""
        with self._errors():
            rows = self._database.execute("SELECT line, failed FROM results WHERE batch = ?", (batch,))
            return {line: bool(failed) for line, failed in rows}

    def results(self, batch: str, *, failed: bool | None) -> Iterator[bytes]:
        """Results by line: failed ones, others, or all for None."""
        line = -1
        while True:
            with self.lock, self._errors():
                rows = self._database.execute(
                    "SELECT line, data FROM results WHERE batch = ? AND failed IN (?, ?) AND line > ? "
                    "ORDER BY line LIMIT 64",
                    (batch, bool(failed), failed is None or failed, line),
                ).fetchall()
            if not rows:
                return
            yield from (row[1] for row in rows)
            line = rows[-1][0]

    @locked
    def n_result_bytes(self, batch: str, *, failed: bool) -> tuple[int, int]:
        """Number of results, and of their bytes."""
        with self._errors():
            row = self._database.execute(
                "SELECT count(*), coalesce(sum(length(data)), 0) FROM results WHERE batch = ? AND failed = ?",
                (batch, failed),
            ).fetchone()
        return row[0], row[1]

    @locked
    def end_batch(self, owner: str, data: Object, files: Iterable[tuple[bool, Object]]) -> None:
        """Close a batch, and make files of its results."""
        with self._writing():
            for failed, file in files:
                self.add("file", owner, file)
                self._database.execute(
                    "UPDATE results SET batch = ? WHERE batch = ? AND failed = ?", (file["id"], data["id"], failed)
                )
            self.update(data["id"], data, is_open=False)

    # --- limits

    @locked
    def expire(self) -> int:
        """Remove what is too old; the number of objects."""
        if self._max_age is None:
            return 0
        with self._writing():
            rows = self._database.execute(
                "SELECT id FROM objects WHERE used < ? AND NOT open", (time.time() - self._max_age,)
            ).fetchall()
            self._remove([row[0] for row in rows])
        return len(rows)

    def _evict(self) -> bool:
        """Remove responses and conversations of longest ago; False if there are none."""
        rows = self._database.execute(
            "SELECT id FROM objects WHERE kind IN ('response', 'conversation') AND NOT open ORDER BY used LIMIT 16"
        ).fetchall()
        self._remove([row[0] for row in rows])
        return bool(rows)

    def _remove(self, names: Sequence[str]) -> None:
        marks = ", ".join("?" * len(names))
        for table, column in (("objects", "id"), ("items", "parent"), ("chunks", "file"), ("results", "batch")):
            self._database.execute(f"DELETE FROM {table} WHERE {column} IN ({marks})", names)

    def _add_items(self, parent: str, items: Iterable[Object]) -> None:
        rows = [(parent, item["id"], json.dumps(item)) for item in items]
        try:
            self._database.executemany("INSERT INTO items (parent, id, data) VALUES (?, ?, ?)", rows)
        except sqlite3.IntegrityError:
            raise InvalidRequestError(f"{parent}: two items have the same id") from None

    def _number_after(self, table: str, column: str, value: str, after: str | None) -> int | None:
        if after is None:
            return None
        found = self._database.execute(
            f"SELECT number FROM {table} WHERE {column} = ? AND id = ?", (value, after)
        ).fetchone()
        if found is None:
            raise UnknownObjectError(f"after: there is no {after!a}")
        number: int = found[0]
        return number

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except LlamaCliError:  # some are ValueError too
            raise
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise StorageFullError("the disk of the store is full") from None
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
                raise StorageFullError(f"the store cannot be written: {error}") from None
            raise StoreError(f"the store failed: {error}") from error
        except (sqlite3.Error, ValueError, TypeError) as error:  # numbers and texts of a damaged file
            raise StoreError(f"the store failed: {error}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Transaction; the oldest objects make room for it."""
        with self._errors():
            if self._database.in_transaction:
                yield
                return
            self._database.execute("BEGIN IMMEDIATE")
            try:
                before = self._n_used()
                yield
                while (used := self._n_used()) > self._limit:
                    if not self._evict():
                        break
                if used > max(self._limit, before):
                    raise StorageFullError(_FULL)
                self._database.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a full disk has ended it
                    self._database.execute("ROLLBACK")
                raise


def _found(row: Sequence[Any]) -> Found:
    return Found(row[0], row[1], json.loads(row[2]), json.loads(row[3]))


def _held(path: Path) -> int:
    """Descriptor of a locked file, which keeps other servers from a folder."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # Python's descriptors are not inherited
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            told = "another process has this folder: end it, or take another one"
            raise InvalidRequestError(f"{path.parent}: {told}") from None
        raise
    return descriptor


def object_id(kind: Kind) -> str:
    """Identifier of a new object of a kind."""
    return new_id(_PREFIXES[kind])


def shown_page(data: Sequence[Mapping[str, Any]], more: bool) -> Object:
    """List object of OpenAI's API."""
    return {
        "object": "list",
        "data": [*data],
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }
