"""Static files of the web page.

Their types, cache rules and content-security policy.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

PAGE = Path(__file__).parents[1] / "page"
"""Folder of the web page that comes with the server."""

POLICY = "; ".join(
    (
        "default-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",  # pictures of messages
        "media-src data:",  # sound of messages
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content-security policy: nothing from other hosts, no inline code, no markup made of text."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # a browser asks each time, and gets 304 by the ETag unless the file has changed
}

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Content types by suffix: those of the system may be wrong, and modules of another type are refused by browsers."""


class Page:
    """ASGI app of static files.

    The content-security policy is for the own page alone.
    """

    def __init__(self, folder: Path):
        self._files = StaticFiles(directory=folder, html=True)
        own = folder == PAGE
        self._headers = {name: value for name, value in HEADERS.items() if own or name != "content-security-policy"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        content_type = TYPES.get(PurePosixPath(scope["path"]).suffix)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(self._headers)
                if content_type is not None and message["status"] == 200:
                    headers["content-type"] = content_type
            await send(message)

        await self._files(scope, receive, send_with_headers)
