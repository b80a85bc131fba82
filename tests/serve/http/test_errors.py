import contextlib

import pytest

from fake_engine import words
from http_server import wait_for
from llamacli.errors import ChatTemplateError, ContextOverflowError, InvalidRequestError
from llamacli.serve import errors
from llamacli.serve.http.errors import as_serve_error, openai_body
from llamacli.serve.requests import Failed
from llamacli.serve.streams import EventStream


@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (errors.UnknownModelError("x"), 404, "not_found_error", "model_not_found"),
        (errors.PromptTooLongError(600, 512), 400, "exceed_context_size_error", "context_length_exceeded"),
        (errors.QueueFullError("full", retry_after=7), 429, "rate_limit_error", "queue_full"),
        (errors.QueueTimeoutError("late", retry_after=7), 503, "unavailable_error", "queue_timeout"),
        (errors.LoadingError("soon", retry_after=7), 503, "unavailable_error", "loading"),
        (errors.ShuttingDownError("bye", retry_after=7), 503, "unavailable_error", "shutting_down"),
        (errors.NotSupportedError("no"), 501, "not_supported_error", "not_supported"),
        (errors.InternalError("oh"), 500, "server_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_come_before_the_200(error, status, type_, code, stream, http, fake) -> None:
    fake.script = lambda _: [error]
    reply = http.chat(stream=stream)
    body = reply.json["error"]
    assert (reply.status, body["type"], body["code"]) == (status, type_, code)
    assert reply.headers.get("retry-after") == (None if error.retry_after is None else "7")
    assert set(body) >= {"message", "type", "param", "code"}


def test_request_waits_for_room_and_then_gives_up(serve, fake) -> None:
    busy = [errors.LoadingError("in use", retry_after=5)] * 2

    pin = fake.pin

    async def wait(name: str):
        if busy:
            raise busy.pop()
        return await pin(name)

    fake.pin = wait
    try:
        assert serve().chat().status == 200
        busy += [errors.LoadingError("in use", retry_after=5)] * 100
        reply = serve(load_timeout=0.2).chat()
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        n_busy = len(busy)
        assert serve(load_timeout=0).send("/props").status == 503
        assert len(busy) == n_busy - 1, "it is tried once"
    finally:
        del fake.pin


def test_model_stays_loaded_until_its_request_is_submitted(http, fake) -> None:
    n_pins: list[int] = []

    def script(request):
        n_pins.append(len(fake.pins))
        return words(request)

    fake.script = script
    fake.gate.clear()
    connection = http.connect()
    connection.request("POST", "/v1/completions", '{"prompt": "a"}', {"content-type": "application/json"})
    wait_for(lambda: fake.requests and not fake.pins)
    assert n_pins == [1]
    http.server._loop.call_soon_threadsafe(fake.gate.set)
    with contextlib.closing(connection):
        assert connection.getresponse().status == 200
    assert http.send("/tokenize", {"content": "a"}).status == 200
    assert http.send("/v1/completions", {"prompt": "a", "max_tokens": 0}).status == 400
    wait_for(lambda: not fake.pins)


def test_failure_in_the_queue_comes_before_the_200(http, fake) -> None:
    fake.submit = lambda request: _failed(request, errors.QueueTimeoutError("late", retry_after=3))
    try:
        reply = http.chat(stream=True)
    finally:
        del fake.submit
    assert (reply.status, reply.headers["retry-after"]) == (503, "3")


def _failed(request, error: errors.ServeError) -> EventStream:
    stream = EventStream(request.id)
    stream.put([Failed(error)])
    return stream


def test_overflow_names_both_numbers_and_both_words(http, fake) -> None:
    fake.script = lambda _: [errors.PromptTooLongError(600, 512)]
    error = http.chat().json["error"]
    assert "maximum context length is 512 tokens" in error["message"]
    assert "exceeds the available context size" in error["message"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512)


def test_defects_are_logged_and_not_shown(http, fake, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_):
        raise RuntimeError("the secret of the pages")

    fake.script = broken
    reply = http.chat()
    assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
    assert "secret" not in reply.body.decode()
    assert "the secret of the pages" in caplog.text
    assert reply.headers["x-request-id"] in caplog.text


def test_draining_closes_connections(http, fake) -> None:
    fake.draining = True
    reply = http.chat()
    assert (reply.status, reply.headers["connection"]) == (503, "close")


def test_paths_and_methods(http) -> None:
    assert http.send("/v2/nothing").json["error"]["code"] == "not_found"
    reply = http.send("/v1/chat/completions")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert http.send("/api/nothing").json == {"error": "there is no /api/nothing"}


def test_errors_of_the_library() -> None:
    assert as_serve_error(ChatTemplateError("x"), "1").code == "chat_template_error"
    assert as_serve_error(InvalidRequestError("x"), "1").status == 400
    overflow = as_serve_error(ContextOverflowError(0, 9, 8), "1")
    assert openai_body(overflow)["error"]["n_prompt_tokens"] == 9
