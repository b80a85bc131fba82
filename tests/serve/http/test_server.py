import http.client
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from certificate import write_certificate
from http_server import served
from llamacli.errors import InvalidRequestError
from llamacli.serve.http.server import HttpServer, expect_certificate, listen, listening
from llamacli.serve.http.settings import HttpSettings

pytestmark = pytest.mark.medium


def test_address_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(InvalidRequestError, match=rf"cannot listen on 127\.0\.0\.1:{port}: "):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no such host", "256.0.0.1"])
def test_unknown_hosts_are_named(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot listen on"):
        listen(host, 0)


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with listen("::1", 0) as listening:
        assert listening.family == socket.AF_INET6


def test_several_addresses_have_one_port(fake) -> None:
    with listening(["127.0.0.1", "127.0.0.2"], 0) as sockets:
        addresses = [one.getsockname() for one in sockets]
        assert [host for host, _ in addresses] == ["127.0.0.1", "127.0.0.2"]
        assert addresses[0][1] == addresses[1][1]
        ready = threading.Event()
        server = HttpServer(fake, HttpSettings(hosts=("127.0.0.1", "127.0.0.2")), sockets, ready.set)
        thread = threading.Thread(target=server.run)
        thread.start()
        assert ready.wait(30)
        for host, port in addresses:
            connection = http.client.HTTPConnection(host, port, timeout=30)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
        server.stop()
        thread.join(30)


def test_no_address_is_kept_if_one_is_wrong() -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with pytest.raises(InvalidRequestError, match="cannot listen on 256"), listening(["127.0.0.1", "256.0.0.1"], port):
        pass
    listen("127.0.0.1", port).close()


def test_tls(fake, tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    expect_certificate(files)
    with served(fake, ssl=files) as server:
        context = ssl.create_default_context(cafile=str(files[0]))
        connection = http.client.HTTPSConnection("localhost", server.port, timeout=30, context=context)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            server.send("/health")


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"key.pem and .*certificate.pem are not a certificate and its key"):
        expect_certificate((key, certificate))
    with pytest.raises(OSError, match=r"none.pem"):
        expect_certificate((certificate, tmp_path / "none.pem"))


def test_running_requests_end_before_the_server(fake) -> None:
    fake.gate.clear()
    with served(fake) as http:
        replies = []
        client = threading.Thread(target=lambda: replies.append(http.chat(stream=True)))
        client.start()
        while not fake.requests:
            time.sleep(0.005)
        http.server.stop()
        while not fake.draining:
            time.sleep(0.005)
        refused = http.chat()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert http.send("/health").status == 503
        http.server._loop.call_soon_threadsafe(fake.gate.set)
        client.join(10)
    assert replies[0].body.endswith(b"data: [DONE]\n\n")
    assert fake.closed
