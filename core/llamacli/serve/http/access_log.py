"""Access log: a line per request, without texts."""

from __future__ import annotations

import logging
import time
from typing import Any

_log = logging.getLogger("llamacli.serve.access")


class AccessLine:
    """Line of one request in the log.

    Its record has the attribute `fields` for structured logs.
    `fields` are numbers and names that the endpoint adds, such as tokens and times.
    """

    def __init__(self, method: str, path: str, request_id: str):
        self.method, self.path, self.request_id = method, path, request_id
        self.started = time.monotonic()
        self.status: int | None = None
        self.fields: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self.started

    def write(self) -> None:
        """Log the line."""
        details = "".join(f" {name}={_shown(value)}" for name, value in self.fields.items())
        status = self.status or "disconnected"
        name = _shown(self.request_id)
        seconds = self.seconds
        given = {"method": self.method, "path": self.path, "status": status, "seconds": round(seconds, 6)}
        extra = {"fields": {**given, "id": self.request_id, **self.fields}}
        text = "%s %s %s %.3fs id=%s%s"
        _log.info(text, self.method, _shown(self.path), status, seconds, name, details, extra=extra)


def _shown(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)
