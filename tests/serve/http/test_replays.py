"""Streams that outlive their clients, as llama-server's `/v1/stream`."""

import contextlib
import json
from collections.abc import Iterator
from http.client import HTTPConnection, IncompleteRead

import pytest

from http_server import Served, served, wait_for
from llamacli.serve.errors import InternalError
from llamacli.serve.http import recordings
from llamacli.serve.requests import Admitted, Done, Failed, Finished, TextDelta, Timings, Usage

NAME = "chat::user/repo:Q8_0"
QUERY = "/v1/stream?conv_id=chat%3A%3Auser%2Frepo%3AQ8_0"
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
HEADERS = {"X-Conversation-Id": NAME}
DONE = Done(Usage(9, 4, 5, 2), Timings(0.0, 0.1, 0.1))


@pytest.fixture(autouse=True)
def no_stream(http: Served) -> None:
    http.send(QUERY, method="DELETE")


@contextlib.contextmanager
def begun(server: Served, headers: dict[str, str] = HEADERS) -> Iterator[HTTPConnection]:
    """Connection of a request whose response is not read yet."""
    body = json.dumps(BODY)
    with contextlib.closing(server.connect()) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json", **headers})
        yield connection


def states(server: Served, *names: str) -> list[dict]:
    return server.send("/v1/streams/lookup", {"conversation_ids": list(names)}).json


def set_gate(http: Served, fake, *, is_open: bool) -> None:
    http.server._loop.call_soon_threadsafe(fake.gate.set if is_open else fake.gate.clear)
    wait_for(lambda: fake.gate.is_set() is is_open)


def test_ended_stream_is_sent_again(http) -> None:
    sent = http.send("/v1/chat/completions", BODY, HEADERS)
    again = http.send(QUERY)
    assert (again.status, again.body) == (200, sent.body)
    assert again.headers["content-type"] == sent.headers["content-type"]
    assert "x-test-incomplete" not in again.headers
    assert http.send(f"{QUERY}&from=100").body == sent.body[100:]
    assert http.send(f"{QUERY}&from=1000000").body == b""
    (state,) = states(http, "chat", "other")
    assert (state["conversation_id"], state["is_done"], state["total_bytes"]) == (NAME, True, len(sent.body))
    assert state["completed_at"] >= state["started_at"] > 0
    stopped = http.send(QUERY, method="DELETE")
    assert (stopped.status, stopped.body) == (204, b"")
    assert "content-length" not in stopped.headers
    assert http.send(QUERY, method="DELETE").status == 204
    assert http.send(QUERY).status == 404
    assert states(http, NAME) == []


def test_stream_goes_on_without_its_client(http, fake) -> None:
    set_gate(http, fake, is_open=False)
    with begun(http):
        wait_for(lambda: fake.requests)
        early = http.send(QUERY)
        assert (early.status, early.json["error"]["code"]) == (503, "loading")
        assert "retry-after" in early.headers
    set_gate(http, fake, is_open=True)
    wait_for(lambda: states(http, NAME)[0]["is_done"])
    assert not fake.cancelled
    texts = [event["choices"][0]["delta"].get("content") or "" for event in http.send(QUERY).events]
    assert "".join(texts) == "one two three"


def test_stream_is_read_while_it_runs(http, fake) -> None:
    with begun(http) as connection:
        assert b"role" in connection.getresponse().readline()
        replay = http.send(QUERY)
    assert replay.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_stopped_stream_frees_its_place(http, fake, has_begun, replaced) -> None:
    usual = fake.script
    fake.script = lambda _: [Admitted(0.0), *[TextDelta(0, "x")] * 1_000_000, Finished(0, "stop"), DONE]
    if not has_begun:
        set_gate(http, fake, is_open=False)
    with begun(http) as connection:
        wait_for(lambda: fake.requests)
        if has_begun:
            wait_for(lambda: states(http, NAME)[0]["total_bytes"] > 1000)
        fake.script = usual
        with begun(http) if replaced else contextlib.nullcontext():
            if not replaced:
                assert http.send(QUERY, method="DELETE").status == 204
            wait_for(lambda: fake.cancelled)
            response = connection.getresponse()
            if has_begun:
                assert response.status == 200
                with pytest.raises(IncompleteRead):
                    response.read()
            else:
                assert response.status == 400
                assert json.loads(response.read())["error"]["code"] == "cancelled"
    set_gate(http, fake, is_open=True)
    wait_for(lambda: len(fake.requests) == 1 + replaced)
    if replaced:
        wait_for(lambda: states(http, NAME)[0]["is_done"])
        assert http.send(QUERY).body.endswith(b"data: [DONE]\n\n")
    else:
        assert http.send(QUERY).status == 404


@pytest.mark.parametrize("fields", [{"stream": False}, {"temperature": -1}])
def test_whole_and_refused_replies_are_not_kept(http, fields) -> None:
    http.send(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}, HEADERS
    )
    assert http.send(QUERY).status == 404


def test_failed_stream_is_cut_again(http, fake) -> None:
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "x"), Failed(InternalError("defect"))]
    sent = http.send("/v1/chat/completions", BODY, HEADERS)
    again = http.send(QUERY)
    assert sent.headers["x-test-incomplete"] == again.headers["x-test-incomplete"] == "yes"
    assert again.body == sent.body


def test_first_bytes_of_a_long_stream_are_lost(http, monkeypatch) -> None:
    monkeypatch.setattr(recordings, "MAX_BYTES", 300)
    sent = http.send("/v1/chat/completions", BODY, HEADERS)
    lost = http.send(QUERY)
    assert (lost.status, lost.json["error"]["code"]) == (400, "offset_lost")
    n = len(sent.body) - 300
    assert http.send(f"{QUERY}&from={n}").body == sent.body[n:]
    assert http.send(f"{QUERY}&from={n - 1}").status == 400


def test_oldest_ended_streams_make_room(http, monkeypatch) -> None:
    def send(name: str) -> None:
        http.send("/v1/completions", {"prompt": "x", "stream": True}, {"X-Conversation-Id": name})

    send("first")
    (state,) = states(http, "first")
    monkeypatch.setattr(recordings, "MAX_ENDED_BYTES", 2 * state["total_bytes"] + 10)
    send("second")
    send("third")
    assert [one["conversation_id"] for one in states(http, "first", "second", "third")] == ["second", "third"]
    for name in ("second", "third"):
        http.send(f"/v1/stream?conv_id={name}", method="DELETE")


def test_streams_expire(http, monkeypatch) -> None:
    monkeypatch.setattr(recordings, "KEPT_S", 0.0)
    http.send("/v1/completions", {"prompt": "x", "stream": True}, HEADERS)
    wait_for(lambda: http.send(QUERY).status == 404)


def test_streams_belong_to_a_key(fake) -> None:
    with served(fake, api_keys=("one", "two")) as server:
        key = {"authorization": "Bearer one"}
        server.send("/v1/completions", {"prompt": "x", "stream": True}, HEADERS | key)
        assert server.send(QUERY, headers=key).status == 200
        other = {"authorization": "Bearer two"}
        assert server.send(QUERY, headers=other).status == 404
        assert server.send("/v1/streams/lookup", {"conversation_ids": [NAME]}, other).json == []
        assert server.send(QUERY, headers=other, method="DELETE").status == 204
        assert server.send(QUERY, headers=key).status == 200


@pytest.mark.parametrize(
    "query", ["", "?conv_id=", "?conv_id=x&from=-1", "?conv_id=x&from=a", f"?conv_id={'x' * 1001}"]
)
def test_wrong_queries(http, query) -> None:
    reply = http.send(f"/v1/stream{query}")
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_value")
    long = http.send("/v1/completions", {"prompt": "x", "stream": True}, {"X-Conversation-Id": "x" * 1001})
    assert (long.status, long.json["error"]["param"]) == (400, "x-conversation-id")
