"""Connections: disconnects, slow readers, limits of bodies, pings, errors after the 200."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from http.client import HTTPConnection

import pytest

from fake_engine import words
from http_server import Served, wait_for
from llamacli.serve.errors import InternalError, QueueFullError
from llamacli.serve.requests import Admitted, Done, Finished, TextDelta, Timings, Usage

MESSAGES = [{"role": "user", "content": "hi"}]


def begin(http: Served, **fields) -> http.client.HTTPConnection:
    """Send a chat request and return the connection, with no response read."""
    connection = http.connect()
    body = json.dumps({"messages": MESSAGES, **fields})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_events", [0, 1, 3])
def test_disconnect_cancels_in_every_phase(stream: bool, n_events: int, http, fake) -> None:
    fake.script = lambda request: words(request)[: max(1, n_events)]  # no end comes
    if not n_events:
        fake.gate.clear()
    connection = begin(http, stream=stream)
    wait_for(lambda: fake.requests)
    connection.close()
    wait_for(lambda: fake.cancelled)
    assert fake.cancelled == [fake.requests[0].id]
    http.server._loop.call_soon_threadsafe(fake.gate.set)
    wait_for(lambda: not fake._tasks)


def test_disconnect_ends_the_wait_for_a_model(http, fake, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "llamacli.serve")
    waiting = threading.Event()

    async def pin(name: str) -> None:
        waiting.set()
        await asyncio.sleep(60)

    fake.pin = pin
    try:
        connection = begin(http)
        assert waiting.wait(10)
        connection.close()
        wait_for(lambda: "POST /v1/chat/completions disconnected" in caplog.text)
    finally:
        del fake.pin
    assert not fake.requests


def test_long_texts_wait_for_each_other_and_for_nobody_else(
    http, fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamacli.serve")
    free, texts = threading.Event(), []

    def tokenized(request, *_) -> list[int]:
        texts.append(request.content[:1])
        if texts == ["a"]:
            free.wait(30)
        return [len(request.content)]

    def post(letter: str) -> HTTPConnection:
        connection = http.connect()
        body = json.dumps({"content": letter * (300 << 10)})
        connection.request("POST", "/tokenize", body, {"content-type": "application/json"})
        return connection

    monkeypatch.setattr("llamacli.serve.http.local._tokenized", tokenized)
    first = post("a")
    try:
        wait_for(lambda: texts)
        leaving, waiting = post("b"), post("c")
        assert http.send("/tokenize", {"content": "short"}).json["tokens"] == [5]
        time.sleep(0.1)
        leaving.close()
        wait_for(lambda: "POST /tokenize disconnected" in caplog.text)
    finally:
        free.set()
    for connection in (first, waiting):
        assert connection.getresponse().read() == b'{"tokens":[%d]}' % (300 << 10)
        connection.close()
    assert texts == ["a", "s", "c"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/api/generate"])
def test_full_queue_refuses_before_the_body_is_parsed(path: str, http, fake) -> None:
    fake.refusal = QueueFullError("too many requests", retry_after=3)
    connection = http.connect()
    for body in ("not JSON", json.dumps({"prompt": "a" * (4 << 20)})):  # the second on the same connection
        connection.request("POST", path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        assert (reply.status, reply.headers["retry-after"]) == (429, "3")
    connection.close()
    assert http.send("/tokenize", {"content": "a"}).status == 200
    assert http.send("/health").status == 200
    assert not fake.requests


def test_a_whole_response_cancels_nothing(http, fake) -> None:
    http.chat()
    http.chat(stream=True)
    assert fake.cancelled == []


def test_error_after_the_200_is_an_event_and_a_cut(http, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.serve.http.call.LINGER_S", 0.0)
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "one"), InternalError("the step failed")]
    reply = http.chat(stream=True)
    assert reply.status == 200
    assert reply.headers["x-test-incomplete"] == "yes"
    assert reply.events[-1]["error"]["message"] == "the step failed"
    assert b"[DONE]" not in reply.body


def test_clients_have_time_to_read_the_error(
    http, fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection stays until the client closes it, or ten minutes."""
    monkeypatch.setattr("llamacli.serve.http.call.LINGER_S", 600.0)
    caplog.set_level("INFO", "llamacli.serve")
    fake.script = lambda _: [Admitted(0.0), InternalError("the step failed")]
    connection = begin(http, stream=True)
    response = connection.getresponse()
    while b"the step failed" not in response.readline():
        pass
    time.sleep(0.1)
    assert "POST" not in caplog.text
    response.close()
    connection.close()
    wait_for(lambda: "POST" in caplog.text)


def test_error_after_admission_without_stream_has_its_status(http, fake) -> None:
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "one"), InternalError("the step failed")]
    assert http.chat().status == 500


def test_stream_headers_and_end(http) -> None:
    reply = http.chat(stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert "x-test-incomplete" not in reply.headers


def test_pings_in_silence(serve, fake) -> None:
    http = serve(ping_interval=0.02)
    fake.script = lambda _: [Admitted(0.0)]
    connection = begin(http, stream=True)
    response = connection.getresponse()
    lines = [response.readline() for _ in range(6)]
    assert lines[2:4] == [b": ping\n", b"\n"]
    response.close()
    connection.close()
    wait_for(lambda: fake.cancelled)


def test_large_body_is_refused_by_its_length_and_while_it_comes(serve) -> None:
    http = serve(max_body=1000)
    reply = http.send("/v1/chat/completions", b" " * 1001)
    assert (reply.status, reply.json["error"]["code"], reply.headers["connection"]) == (413, "body_too_large", "close")
    connection = http.connect()
    chunks = (b" " * 100 for _ in range(20))
    connection.request("POST", "/v1/completions", chunks, {"content-type": "application/json"}, encode_chunked=True)
    with contextlib.closing(connection), connection.getresponse() as response:
        assert response.status == 413
    assert http.send("/v1/chat/completions", b" " * 999).status == 400


def test_refusals_are_read_by_clients_that_send_on(serve) -> None:
    http = serve(max_body=1000, api_keys=("secret",))
    for headers, status in (({}, 401), ({"authorization": "Bearer secret"}, 413)):
        assert http.send("/v1/chat/completions", b" " * 3_000_000, headers).status == status


def test_slow_body_times_out(serve) -> None:
    http = serve(read_timeout=0.05)
    with socket.create_connection(("127.0.0.1", http.port), timeout=10) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_other_media_types_are_refused(content_type: str, http) -> None:
    reply = http.send("/v1/chat/completions", {"messages": MESSAGES}, {"Content-Type": content_type})
    assert reply.status == 415


def test_missing_media_type_is_json_except_from_web_pages(http) -> None:
    def send(headers: dict) -> int:
        connection = http.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES}), headers)
        with contextlib.closing(connection), connection.getresponse() as response:
            return response.status

    assert send({}) == 200
    assert send({"Origin": "https://page.example"}) == 415
    assert send({"Content-Type": "application/json; charset=utf-8"}) == 200


def test_slow_reader_is_cut_and_slows_nobody(serve, fake) -> None:
    http = serve(write_timeout=0.5)
    text = "x" * 100_000
    fake.script = lambda _: [
        Admitted(0.0), *[TextDelta(0, text)] * 300, Finished(0, "stop"), Done(Usage(1), Timings(0.0, 0.0, 0.0)),
    ]  # fmt: skip
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", http.port))
        body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        slow.sendall(head + body)
        wait_for(lambda: fake.requests)
        fake.script = words
        assert http.chat().status == 200
        wait_for(lambda: fake.cancelled or not fake._tasks)
        assert not _received(slow).endswith(b"0\r\n\r\n")


def _received(client: socket.socket) -> bytes:
    """Receive until the connection ends or is reset."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while chunk := client.recv(1 << 20):
            received += chunk
    return received


def test_access_log_has_numbers_and_no_texts(http, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "llamacli.serve")
    http.chat("a very private question", seed=7)
    wait_for(lambda: "POST" in caplog.text)
    line = next(record.getMessage() for record in caplog.records if record.name.endswith(".access"))
    assert line.startswith("POST /v1/chat/completions 200 ")
    assert {"seed=7", "finish=stop", "generated=3", "model=demo"} <= set(line.split())
    assert "private" not in caplog.text


def test_texts_are_logged_if_asked_for(serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "llamacli.serve")
    serve(log_texts=True).chat("a very private question")
    assert "a very private question" in caplog.text


def test_keys_separate_clients_and_are_not_logged(serve, fake, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    http = serve(api_keys=("secret-one", "secret-two"))
    for key in ("secret-one", "secret-two"):
        http.send("/v1/chat/completions", {"messages": MESSAGES}, {"Authorization": f"Bearer {key}"})
    assert len({request.key for request in fake.requests}) == 2
    assert "secret-" not in caplog.text
    assert not any("secret-" in request.key for request in fake.requests)
