"""Timeout for heads of requests, with fake connections and with sockets."""

import contextlib
import json
import socket
import time

import attrs
import pytest

from http_server import Served
from llamacli.serve.http.heads import HeadTimeout

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Transport:
    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


@attrs.define(eq=False)
class Cycle:
    response_complete: bool = False


@attrs.define(eq=False)
class FakeConnection:
    transport: Transport = attrs.field(factory=Transport)
    cycle: Cycle | None = None
    timeout_keep_alive_task: object = None


def test_late_heads_are_refused_once() -> None:
    connection = FakeConnection()
    heads = HeadTimeout(lambda: [connection], 2.0)
    for now in (0.0, 1.9):
        heads.look(now)
    assert not connection.transport.closed
    for now in (2.0, 4.0):
        heads.look(now)
    head, _, body = connection.transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"Connection: close" in head
    assert b"Content-Length: %d" % len(body) in head
    assert json.loads(body)["error"]["code"] == "head_timeout"
    assert connection.transport.closed


def test_time_begins_anew_with_each_head() -> None:
    connection = FakeConnection()
    heads = HeadTimeout(lambda: [connection], 2.0)
    heads.look(0.0)
    connection.cycle = Cycle()
    heads.look(1.0)  # a request runs
    connection.cycle.response_complete, connection.timeout_keep_alive_task = True, object()
    heads.look(9.0)  # silence
    connection.timeout_keep_alive_task = None  # the first byte of the next head
    heads.look(10.0)
    heads.look(11.9)
    assert not connection.transport.closed
    heads.look(12.0)
    assert connection.transport.closed


def test_connections_that_end_are_left_alone() -> None:
    connection = FakeConnection()
    heads = HeadTimeout(lambda: [connection, FakeConnection(transport=None)], 0.0)
    connection.transport.closed = True
    heads.look(1.0)
    assert not connection.transport.written


@pytest.mark.parametrize("begin", [b"", b"GET /health HT", REQUEST + b"GET /hea"], ids=["none", "part", "second"])
def test_slow_heads_time_out(begin: bytes, serve) -> None:
    http: Served = serve(read_timeout=0.2)
    with socket.create_connection(("127.0.0.1", http.port), timeout=10) as client:
        client.sendall(begin)
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := client.recv(1000):
                received += chunk
                with contextlib.suppress(OSError):
                    client.sendall(b"x")  # bytes that come do not prolong the time
    assert b"HTTP/1.1 408 " in received
    assert received.startswith(b"HTTP/1.1 200 ") == begin.startswith(REQUEST)


def test_silence_between_requests_is_no_slow_head(serve) -> None:
    http: Served = serve(read_timeout=0.1)
    connection = http.connect()
    with contextlib.closing(connection):
        for _ in range(2):
            connection.request("GET", "/health")
            with connection.getresponse() as response:
                assert response.read()
                assert response.status == 200
            time.sleep(0.3)
