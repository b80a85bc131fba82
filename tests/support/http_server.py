"""HTTP server in a thread, and clients of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import openai

from llamacli.serve.http.server import HttpServer, listen
from llamacli.serve.http.settings import HttpSettings
from llamacli.serve.requests import Engine

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ message.tool_calls or '' }}\n"
    "{% endfor %}{% if tools %}{{ tools }}\n{% endif %}<assistant>"
)
"""Chat template for models without one."""


@attrs.frozen
class HttpReply:
    """Response: status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of server-sent events, without the end marker."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def request_json(
    port: int, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
) -> HttpReply:
    """Send a request to the loopback; `body` is bytes, or becomes JSON."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json"} if data is not None else {}
        given |= {name.lower(): value for name, value in (headers or {}).items()}
        connection.request(method or ("GET" if data is None else "POST"), path, data, given)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        try:
            content = response.read()
        except http.client.IncompleteRead as error:
            content = error.partial
            names["x-test-incomplete"] = "yes"
        return HttpReply(response.status, names, content)


@attrs.frozen
class Served:
    """Server that listens on a port of the loopback."""

    port: int
    server: HttpServer

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def send(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> HttpReply:
        return request_json(self.port, path, body, headers, method)

    def chat(self, text: str = "hi", **fields: Any) -> HttpReply:
        return self.send("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def openai(self, **options: Any) -> openai.OpenAI:
        given = {"api_key": "unused", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **given)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until a condition holds.

    `seconds` ends a hang, long after any machine is done.
    """
    for _ in range(round(seconds / 0.005)):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError(f"{condition} does not hold after {seconds:g} s")


@contextlib.contextmanager
def served(engine: Engine, **settings: Any) -> Iterator[Served]:
    """Serve an engine from a thread."""
    listening = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = HttpServer(engine, HttpSettings(**{"template": TEMPLATE, **settings}), [listening], ready.set)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(30)
        yield Served(listening.getsockname()[1], server)
    finally:
        server.stop()
        thread.join(30)
        listening.close()
        assert not thread.is_alive()
