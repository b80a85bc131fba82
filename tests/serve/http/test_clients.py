"""Clients of other projects, unmodified, and mutated bodies: a fake engine answers."""

from __future__ import annotations

import asyncio
import json
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fake_engine import FakeEngine, words
from http_server import Served
from llamacli.chat.messages import ToolCall
from llamacli.serve.errors import InternalError, QueueFullError
from llamacli.serve.requests import Admitted, Done, EmbeddingRequest, Finished, TextDelta, Timings, ToolCallDelta, Usage
from suite import PROFILE

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HI = [{"role": "user", "content": "hi"}]
DONE = Done(Usage(9, 4, 5, 2), Timings(0.0, 0.25, 0.5))
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def weather(request: Any) -> list:
    """Events of a tool call."""
    call = ToolCallDelta(0, 0, ToolCall("weather", {"town": "Bern"}))
    return [Admitted(0.0), call, Finished(0, "tool_calls"), DONE]


class TestOllama:
    @pytest.fixture
    def client(self, http: Served) -> Any:
        ollama = pytest.importorskip("ollama")
        client = ollama.Client(host=f"http://127.0.0.1:{http.port}")
        yield client
        client._client.close()

    def test_chat(self, client: Any) -> None:
        assert client.chat(model="demo", messages=HI).message.content == "one two three"
        parts = list(client.chat(model="demo", messages=HI, stream=True))
        assert "".join(part.message.content for part in parts) == "one two three"
        assert parts[-1].done_reason == "stop"

    def test_generate(self, client: Any) -> None:
        assert client.generate(model="demo", prompt="x").response == "one two three"
        assert "".join(part.response for part in client.generate(model="demo", prompt="x", stream=True))

    def test_tools(self, client: Any, fake: FakeEngine) -> None:
        fake.script = weather
        message = client.chat(model="demo", messages=HI, tools=[WEATHER]).message
        assert message.tool_calls[0].function.arguments == {"town": "Bern"}
        client.chat(model="demo", messages=[*HI, message, {"role": "tool", "content": "sun", "tool_name": "weather"}])

    def test_models(self, client: Any) -> None:
        assert [model.model for model in client.list().models] == ["demo"]
        assert [model.model for model in client.ps().models] == ["demo"]
        assert client.show("demo").details.family == "llama"

    def test_errors(self, client: Any, fake: FakeEngine) -> None:
        import ollama

        with pytest.raises(ollama.ResponseError) as error:
            client.chat(model="other", messages=HI)
        assert error.value.status_code == 404
        fake.script = lambda _: [Admitted(0.0), TextDelta(0, "a"), InternalError("the step failed")]
        with pytest.raises(ollama.ResponseError, match="the step failed"):
            list(client.chat(model="demo", messages=HI, stream=True))


class TestLiteLlm:
    @pytest.fixture
    def loop(self) -> Iterator[None]:
        """Event loop of this thread."""
        # litellm asks for it, and if there is none, asyncio makes one that nobody closes.
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        yield
        asyncio.set_event_loop(None)
        loop.close()

    @pytest.fixture
    def complete(self, http: Served, loop: None) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            litellm = pytest.importorskip("litellm")

        def call(**options: Any) -> Any:
            given = {"model": "openai/demo", "messages": HI, "api_key": "x", "num_retries": 0, **options}
            return litellm.completion(base_url=f"http://127.0.0.1:{http.port}/v1", **given)

        return call

    def test_chat_and_stream(self, complete: Any) -> None:
        assert complete().choices[0].message.content == "one two three"
        parts = [part.choices[0].delta.content or "" for part in complete(stream=True)]
        assert "".join(parts) == "one two three"

    def test_reasoning_and_tools(self, complete: Any, fake: FakeEngine) -> None:
        fake.script = lambda _: [
            Admitted(0.0), TextDelta(0, "hm", reasoning=True), TextDelta(0, "yes"), Finished(0, "stop"), DONE,
        ]  # fmt: skip
        assert complete().choices[0].message.reasoning_content == "hm"
        pytest.importorskip("mcp", reason="litellm imports it for tools")
        fake.script = weather
        assert complete(tools=[WEATHER]).choices[0].message.tool_calls[0].function.name == "weather"

    def test_errors_have_their_types(self, complete: Any, fake: FakeEngine) -> None:
        import litellm

        fake.script = lambda _: [QueueFullError("full", retry_after=1)]
        with pytest.raises(litellm.RateLimitError):
            complete()
        fake.script = words
        with pytest.raises(litellm.NotFoundError):
            complete(model="openai/other")
        with pytest.raises(litellm.BadRequestError):
            complete(n=99)


class TestLangChain:
    @pytest.fixture
    def chat(self, http: Served) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = pytest.importorskip("langchain_openai")
        return module.ChatOpenAI(base_url=f"http://127.0.0.1:{http.port}/v1", api_key="x", model="demo", max_retries=0)

    def test_chat_and_stream(self, chat: Any) -> None:
        reply = chat.invoke("hi")
        assert reply.content == "one two three"
        assert reply.usage_metadata["output_tokens"] == 3
        assert "".join(part.content for part in chat.stream("hi")) == "one two three"

    def test_tools(self, chat: Any, fake: FakeEngine) -> None:
        fake.script = weather
        assert chat.bind_tools([WEATHER]).invoke("hi").tool_calls[0]["args"] == {"town": "Bern"}

    def test_structured_output(self, chat: Any, fake: FakeEngine) -> None:
        pytest.importorskip("llguidance")
        fake.script = lambda _: [Admitted(0.0), TextDelta(0, '{"town": "Bern"}'), Finished(0, "stop"), DONE]
        schema = {"title": "Town", "type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
        assert chat.with_structured_output(schema, method="json_schema").invoke("hi") == {"town": "Bern"}


def answer(request: Any) -> list:
    """Events of any request."""
    return [Admitted(0.0), DONE] if isinstance(request, EmbeddingRequest) else words(request)


N_CASES = 20_000 if PROFILE == "long" else 2_000
SEEDS: list[tuple[str, dict]] = [
    ("/v1/chat/completions", {"messages": HI, "temperature": 0.5, "stream": False, "n": 1, "stop": ["x"], "seed": 1}),
    ("/v1/chat/completions", {"messages": HI, "tools": [WEATHER], "tool_choice": "auto", "logprobs": True,
                              "top_logprobs": 2, "response_format": {"type": "json_schema", "json_schema": {
                                  "name": "x", "schema": {"type": "object"}}}}),
    ("/v1/completions", {"prompt": ["a", [1, 2]], "echo": True, "logprobs": 1, "max_tokens": 0, "suffix": None}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
                       "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}),
    ("/v1/messages", {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "name": "a"}]}],
                      "tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "auto"}, "max_tokens": 9,
                      "system": [{"type": "text", "text": "a"}], "thinking": {"type": "enabled"}}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/tokenize", {"content": "a", "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/apply-template", {"messages": HI, "chat_template_kwargs": {"a": 1}}),
    ("/api/chat", {"model": "demo", "messages": HI, "options": {"temperature": 1, "stop": ["x"]}, "format": "json"}),
    ("/api/generate", {"model": "demo", "prompt": "a", "system": "b", "raw": False, "think": True}),
    ("/api/embed", {"model": "demo", "input": "a"}),
    ("/api/show", {"model": "demo"}),
    ("/completion", {"prompt": ["a", [1, "b"]], "n_probs": 1, "n_indent": 1, "response_fields": ["content"]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "a", "filename": "b"}]}),
    ("/embedding", {"content": ["a", [1]], "embd_normalize": 2}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}),
    ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ("/v1/classify", {"input": ["a"]}),
    ("/v1/pooling", {"input": ["a"], "encoding_format": "float"}),
    ("/props", {"temperature": 1, "seed": 1, "max_tokens": 1}),
    ("/slots/0?action=save", {"filename": "a"}),
    ("/models/load", {"model": "demo"}),
    ("/api/create", {"model": "a", "from": "demo", "parameters": {"temperature": 1}, "system": "b", "template": "c"}),
    ("/api/create", {"model": "a", "modelfile": "FROM demo\nPARAMETER stop x\n", "quantize": "q8_0"}),
    ("/api/copy", {"source": "a", "destination": "b"}),
    ("/api/delete", {"model": "a"}),
]  # fmt: skip
VALUES = [
    None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, "", "x", "\ud800", "\0", "\u20ac" * 50, [], [[]],
    [None], ["a", 1], {}, {"a": {"b": {}}}, {"type": "text"}, {"type": "json_object"}, "%llguidance", "root ::= root",
    {"$ref": "#"}, {"type": "function", "function": {"name": "weather"}}, [{"role": "tool", "content": "x"}],
    {"type": "string", "pattern": "((a{1000}){1000}){1000}"}, 'root ::= (("a"{1000})*{1000}){1000} "b"{1000}{1000}',
    {"a": ["x"] * 60_000},
]  # fmt: skip


def mutated(value: Any, draw: random.Random) -> Any:
    """Copy of JSON data with one random change."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        chance = draw.random()
        if chance < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if chance < 0.15:
            return {**value, draw.choice(["n", "grammar", "json_schema", "stream", "tools", "x"]): draw.choice(VALUES)}
        return {**value, key: mutated(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [mutated(item, draw) if i == at else item for i, item in enumerate(value)]
    return draw.choice(VALUES)


@pytest.mark.parametrize("seed", range(5 if PROFILE == "long" else 1))
def test_mutated_bodies_never_fail_the_server(seed: int, http: Served, fake: FakeEngine) -> None:
    fake.script = answer
    draw = random.Random(seed)
    for number in range(N_CASES):
        path, body = draw.choice(SEEDS)
        for _ in range(draw.randint(1, 3)):
            changed = mutated(body, draw)
            body = changed if isinstance(changed, dict) else body
        data = json.dumps(body).encode()
        if draw.random() < 0.1:
            at = draw.randrange(len(data))
            data = data[:at] + bytes([draw.randrange(256)]) + data[at + draw.randint(0, 2) :]
        reply = http.send(path, data)
        assert reply.status < 500 or reply.status == 501, (number, path, data, reply.body)
        if reply.status >= 400:
            assert reply.json["error"]
        fake.requests.clear()


def test_schemathesis(http: Served, fake: FakeEngine) -> None:
    """Requests that schemathesis makes of `/openapi.json`."""
    schemathesis = pytest.importorskip("schemathesis")
    fake.script = answer
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{http.port}/openapi.json")
    limits = settings(
        max_examples=400 if PROFILE == "long" else 20, deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    n_operations = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        def check(case: Any) -> None:
            response = case.call()
            assert response.status_code < 500 or response.status_code == 501, (case.path, case.body, response.text)

        limits(given(case=operation.as_strategy())(check))()
        n_operations += 1
    assert n_operations > 20
