"""Requests of the server to itself, for work that outlives clients."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
from starlette.types import Message, Scope

from llamacli.serve.http.access_log import AccessLine


@attrs.define(eq=False)
class Exchange:
    """POST request of the server to itself, and its response.

    - `path`, `body`: of the request; `key`: client whose turn it takes; `owner`: client whose objects it sees.
    - `background`: it gives way to requests of clients.
    - `status`, `content`: of the response, None and b"" before it.
    """

    path: str
    body: bytes
    request_id: str
    key: str = ""
    owner: str = ""
    background: bool = False
    status: int | None = None
    content: bytes = b""
    _sent: bool = False

    @property
    def scope(self) -> Scope:
        """Scope of ASGI."""
        access = AccessLine("POST", self.path, self.request_id)
        return {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": {"request_id": self.request_id, "access": access, "exchange": self},
        }

    async def receive(self) -> Message:
        """The body; then nothing, as of a client that stays."""
        if self._sent:
            await asyncio.Event().wait()
        self._sent = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Any) -> None:
        """Take a part of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.content += message.get("body", b"")
