import socket
import threading
import time

import pytest

from http_server import served
from llamacli.errors import InvalidRequestError
from llamacli.serve.http.server import listen

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
