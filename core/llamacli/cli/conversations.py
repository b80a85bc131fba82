"""Log of conversations in an SQLite database."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from llamacli.chat.messages import Message
from llamacli.errors import InvalidRequestError
from llamacli.util.folders import user_folder

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, system TEXT NOT NULL, variables TEXT NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS messages (
    conversation_id INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    position INTEGER NOT NULL, role TEXT NOT NULL, content TEXT NOT NULL, message TEXT NOT NULL,
    PRIMARY KEY (conversation_id, position)
);
"""


@attrs.frozen
class Conversation:
    """Logged conversation.

    - `id`: number in the log, None before it is logged. `updated`: time of the last message, in seconds since 1970.
    """

    model: str
    system: str
    variables: dict[str, Any]
    messages: Sequence[Message]
    id: int | None = None
    updated: float = 0.0

    @property
    def title(self) -> str:
        """First line of the first message of the user."""
        text = next((message.content for message in self.messages if message.role == "user"), "")
        return text.strip().partition("\n")[0]


class ConversationLog:
    """Log of conversations, which can be searched and resumed.

    The file is made with the first conversation, readable for the user only. Raises InvalidRequestError for an unknown
    number or a damaged file, OSError.
    """

    def __init__(self, path: Path):
        self.path = path

    def save(self, conversation: Conversation) -> int:
        """Write a conversation, replacing that of its number, which is returned."""
        now = time.time()
        values = conversation.model, conversation.system, json.dumps(conversation.variables), now
        with self._open() as database:
            if conversation.id is None:
                insert = "INSERT INTO conversations (model, system, variables, updated, created) VALUES (?, ?, ?, ?, ?)"
                number = int(database.execute(insert, (*values, now)).lastrowid or 0)
            else:
                number = conversation.id
                update = "UPDATE conversations SET model = ?, system = ?, variables = ?, updated = ? WHERE id = ?"
                database.execute(update, (*values, number))
            database.execute("DELETE FROM messages WHERE conversation_id = ?", (number,))
            database.executemany(
                "INSERT INTO messages VALUES (?, ?, ?, ?, ?)",
                [
                    (number, position, message.role, message.content, json.dumps(message.as_dict()))
                    for position, message in enumerate(conversation.messages)
                ],
            )
        return number

    def search(self, text: str = "", limit: int = 20) -> list[Conversation]:
        """Conversations with `text` in a message, the latest first."""
        pattern = "%" + "".join(f"\\{c}" if c in "\\%_" else c for c in text) + "%"
        query = (
            "SELECT id FROM conversations WHERE ? = '%%' OR id IN "
            "(SELECT conversation_id FROM messages WHERE content LIKE ? ESCAPE '\\') "
            "ORDER BY updated DESC, id DESC LIMIT ?"
        )
        if not self.path.exists():
            return []
        with self._open() as database:
            numbers = database.execute(query, (pattern, pattern, limit)).fetchall()
            return [_read(database, number) for (number,) in numbers]

    def load(self, number: int | None = None) -> Conversation:
        """Read a conversation, by default the latest."""
        latest = self.search(limit=1)
        if not latest:
            raise InvalidRequestError(f"{self.path} has no conversations: /set log on, or run --log, records them")
        if number is None:
            return latest[0]
        with self._open() as database:
            return _read(database, number)

    def remove(self, number: int) -> None:
        """Delete a conversation."""
        self.load(number)
        with self._open() as database:
            database.execute("DELETE FROM conversations WHERE id = ?", (number,))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.touch(mode=0o600)
        try:
            with contextlib.closing(sqlite3.connect(self.path)) as database, database:
                database.execute("PRAGMA foreign_keys = ON")
                database.executescript(_SCHEMA)
                yield database
        except sqlite3.Error as error:
            raise InvalidRequestError(f"{self.path}: the log cannot be used: {error}") from error


def conversation_log() -> ConversationLog:
    """Log in the user's state folder; raises InvalidRequestError without a home."""
    folder = user_folder("state")
    if folder is None:
        raise InvalidRequestError("there is no home folder to keep a log of conversations in")
    return ConversationLog(folder / "conversations.db")


def _read(database: sqlite3.Connection, number: int) -> Conversation:
    query = "SELECT model, system, variables, updated FROM conversations WHERE id = ?"
    row = database.execute(query, (number,)).fetchone()
    if row is None:
        raise InvalidRequestError(f"there is no conversation {number} in the log; llamacli logs lists them")
    model, system, variables, updated = row
    texts = database.execute("SELECT message FROM messages WHERE conversation_id = ? ORDER BY position", (number,))
    messages = [Message.from_dict(json.loads(text)) for (text,) in texts]
    return Conversation(model, system, json.loads(variables), messages, number, updated)
