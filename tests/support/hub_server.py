"""Fake Hugging Face hub: listings and files, as downloads need them."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Repos = dict[str, dict[str, bytes]]
GATED = "gated/model"


class HubServer(ThreadingHTTPServer):
    """HTTP server of `repos`, files by repository and path; logs `requests`.

    `about` has further fields of a repository's listing.
    """

    def __init__(self, repos: Repos):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.requests = repos, list[str]()
        self.about: dict[str, dict[str, object]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repo: str) -> str:
        """Revision of a repository, a hash of its files."""
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.server.requests.append(path)
        parts = path.split("/")
        if parts[:2] == ["api", "models"] and len(parts) == 4:
            self._list("/".join(parts[2:]))
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._send(404, b"")

    def _list(self, repo: str) -> None:
        if repo == GATED:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if repo not in self.server.repos:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.server.repos[repo].items()]
        answer = {"id": repo, "sha": self.server.commit(repo), "siblings": siblings} | self.server.about.get(repo, {})
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, name: str) -> None:
        data = self.server.repos[repo].get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self._send(200, data, {"ETag": etag, "X-Repo-Commit": self.server.commit(repo), "Accept-Ranges": "bytes"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serving(repos: Repos) -> Iterator[HubServer]:
    """Serve repositories from a thread."""
    with HubServer(repos) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
