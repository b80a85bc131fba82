"""Pictures at remote addresses: which hosts are public, redirects, limits."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from llamacli.serve.errors import BadRequestError
from llamacli.serve.http import remote_files
from llamacli.serve.http.remote_files import fetch, is_public

PRIVATE = [
    "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2001:4860:4860::8888", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


class Handler(http.server.BaseHTTPRequestHandler):
    """Server of two files and of redirects."""

    def do_GET(self) -> None:
        if self.path == "/slow":  # a byte now and then, for ever
            with contextlib.suppress(OSError):
                for _ in range(10_000):
                    self.wfile.write(b"H")
                    time.sleep(0.02)
            return
        targets = {"/away": "http://169.254.169.254/latest", "/round": "/round", "/next": "/file", "/odd": "file:///x"}
        if self.path in targets:
            self.send_response(302)
            self.send_header("Location", targets[self.path])
            self.end_headers()
            return
        self.send_response(200 if self.path in ("/file", "/large") else 404)
        self.end_headers()
        if self.path in ("/file", "/large"):
            self.wfile.write(b"picture" * (1 if self.path == "/file" else 1000))

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def loopback_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "is_public", lambda one: one == "127.0.0.1" or is_public(one))


def refused(url: str) -> str:
    with pytest.raises(BadRequestError) as error:
        fetch(url, "messages[0]")
    assert error.value.param == "messages[0]"
    return str(error.value)


@pytest.mark.medium
def test_the_loopback_is_refused(address: str) -> None:
    assert "not a public one" in refused(f"{address}/file")
    assert "not a public one" in refused("http://localhost:1/")
    assert "not a public one" in refused("http://[::1]/")
    assert "not a public one" in refused("http://2130706433/")


@pytest.mark.parametrize(
    "url", ["http://", "http:///x", "http://user:secret@example.org/", "http://[::1", "http://x:y/"]
)
def test_wrong_addresses(url: str) -> None:
    assert "not an address" in refused(url) or "cannot be read" in refused(url)


@pytest.mark.medium
@pytest.mark.usefixtures("loopback_allowed")
def test_files_and_redirects(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch(f"{address}/file", "x") == fetch(f"{address}/next", "x") == b"picture"
    assert "status 404" in refused(f"{address}/none")
    assert "not a public one" in refused(f"{address}/away"), "redirects are checked too"
    assert "not an address" in refused(f"{address}/odd")
    assert "redirects" in refused(f"{address}/round")
    monkeypatch.setattr(remote_files, "TIMEOUT_S", 0.3)
    assert "messages[0]" in refused(f"{address}/slow")
    monkeypatch.setattr(remote_files, "TIMEOUT_S", 15.0)
    monkeypatch.setattr(remote_files, "MAX_BYTES", 100)
    assert "larger than the 100 bytes" in refused(f"{address}/large")
    monkeypatch.setattr(remote_files, "TIMEOUT_S", 0.0)
    assert "longer than 0 seconds" in refused(f"{address}/file")
