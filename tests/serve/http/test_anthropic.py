"""Anthropic's API: translation, blocks, streams, errors, and its own client."""

from typing import Any

import pytest

from llamacli.chat.messages import ToolCall
from llamacli.serve.errors import InternalError, QueueFullError
from llamacli.serve.http.anthropic import MessagesRequest, as_chat
from llamacli.serve.http.bodies import convert
from llamacli.serve.http.chats import as_dicts
from llamacli.serve.requests import Admitted, Done, Finished, TextDelta, Timings, ToolCallDelta, Usage

HI = [{"role": "user", "content": "hi"}]
DONE = Done(Usage(9, 4, 5, 2), Timings(0.0, 0.25, 0.5))
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
WEATHER = {"name": "weather", "description": "Weather of a town.", "input_schema": SCHEMA}
CALLS = [
    Admitted(0.0), TextDelta(0, "hm", reasoning=True), TextDelta(0, "I "), TextDelta(0, "look."),
    ToolCallDelta(0, 0, ToolCall("weather", {"town": "Bern"})), Finished(0, "tool_calls"), DONE,
]  # fmt: skip


def post(http, **fields) -> Any:
    return http.send("/v1/messages", {"model": "demo", "max_tokens": 20, "messages": HI, **fields})


def chat_of(**fields) -> Any:
    return as_chat(convert({"messages": HI, **fields}, MessagesRequest))


def test_message(http, fake) -> None:
    reply = post(http, system=[{"type": "text", "text": "Be kind."}], temperature=0.5, top_k=7, stop_sequences=["X"])
    body = reply.json
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "demo")
    assert body["content"] == [{"type": "text", "text": "one two three"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    (request,) = fake.requests
    assert (request.max_tokens, request.stop) == (20, ("X",))
    assert (request.params.temperature, request.params.top_k) == (0.5, 7)
    prompt = fake._model.tokenizer.decode(request.prompts[0])
    assert "<system>Be kind.\n<user>hi\n<assistant>" in prompt
    n = len(request.prompts[0])
    counts = {"input_tokens": n, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 3}
    assert body["usage"] == counts
    assert http.send("/v1/messages/count_tokens", {"messages": HI}).json["input_tokens"] < n


@pytest.mark.parametrize(
    ("finished", "reason", "text"),
    [
        (Finished(0, "length"), "max_tokens", None),
        (Finished(0, "stop", "X"), "stop_sequence", "X"),
        (Finished(0, "tool_calls"), "tool_use", None),
    ],
)
def test_reasons_of_the_end(finished: Finished, reason: str, text: str | None, http, fake) -> None:
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "a"), finished, DONE]
    body = post(http).json
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, text)
    assert body["usage"]["input_tokens"] == 5
    assert body["usage"]["cache_read_input_tokens"] == 4


def test_messages_of_blocks() -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a1", "name": "weather", "input": {"town": "Bern"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a1", "content": [{"type": "text", "text": "sun"}]},
            {"type": "tool_result", "tool_use_id": "a2", "content": "rain", "is_error": True},
            {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    chat = chat_of(messages=messages, tools=[WEATHER])
    _, assistant, sun, rain, user = as_dicts(chat.messages)
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    (call,) = assistant["tool_calls"]
    assert (call["id"], call["function"]["arguments"]) == ("a1", {"town": "Bern"})
    assert [(one["role"], one["content"], one["tool_call_id"]) for one in (sun, rain)] == [
        ("tool", "sun", "a1"), ("tool", "rain", "a2")
    ]  # fmt: skip
    assert (user["role"], user["content"]) == ("user", "so?")
    assert chat.tools[0].function.parameters == SCHEMA
    assert not chat.continue_final_message
    begun = [*HI, {"role": "assistant", "content": "The"}]
    assert chat_of(messages=begun).continue_final_message
    assert not chat_of(messages=[*begun[:1], messages[1]]).continue_final_message


def test_options() -> None:
    assert chat_of(tool_choice={"type": "any"}, tools=[WEATHER]).tool_choice == "required"
    named = chat_of(tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True})
    assert (named.tool_choice.function.name, named.parallel_tool_calls) == ("weather", False)
    assert chat_of(thinking={"type": "disabled"}).enable_thinking is False
    thinking = chat_of(thinking={"type": "enabled", "budget_tokens": 9})
    assert (thinking.enable_thinking, thinking.thinking_budget_tokens) == (True, 9)
    wanted = {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    chat = chat_of(output_config=wanted)
    assert (chat.reasoning_effort, chat.response_format.schema) == ("low", SCHEMA)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: it is required"),
        ({"system": [{"type": "text"}]}, "system[0].text: it is required"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_errors_have_their_own_form(fields: dict, text: str, http, fake) -> None:
    reply = post(http, **fields)
    assert reply.status == 400
    assert (reply.json["type"], reply.json["error"]["type"]) == ("error", "invalid_request_error")
    assert text in reply.json["error"]["message"]
    assert not fake.requests


@pytest.mark.parametrize(
    ("source", "address"),
    [
        ({"type": "url", "url": "data:;base64,AA=="}, "data:;base64,AA=="),
        ({"type": "base64", "data": "AA==", "url": "x"}, "data:;base64,AA=="),
    ],
)
def test_sources_of_pictures(source: dict[str, str], address: str) -> None:
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    (part,) = chat_of(messages=[message]).messages[0].content
    assert part.image_url == address


def test_errors_of_the_server(http, serve, fake) -> None:
    assert http.send("/v1/messages", method="GET").json["type"] == "error"
    assert post(http, model="x").json["error"]["type"] == "not_found_error"
    fake.script = lambda _: [QueueFullError("full", retry_after=1)]
    reply = post(http)
    assert (reply.status, reply.json["error"]["type"]) == (429, "rate_limit_error")
    assert post(serve(api_keys=("k",))).json["error"]["type"] == "authentication_error"


def test_stream(http, fake) -> None:
    fake.script = lambda _: CALLS
    reply = post(http, stream=True, tools=[WEATHER])
    names = [line[7:] for line in reply.body.decode().splitlines() if line.startswith("event: ")]
    events = reply.events
    assert names == [one["type"] for one in events]
    opened = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == [
        "message_start", opened[0], opened[1], *opened[1:], opened[0], opened[1], *opened[1:], *opened,
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len(fake.requests[0].prompts[0])
    starts = [one for one in events if one["type"] == "content_block_start"]
    assert [(one["index"], one["content_block"]["type"]) for one in starts] == [
        (0, "thinking"), (1, "text"), (2, "tool_use")
    ]  # fmt: skip
    indices = [one["index"] for one in events if one["type"] != "content_block_start" and "index" in one]
    assert indices == [0, 0, 0, 1, 1, 1, 2, 2]
    assert starts[2]["content_block"]["input"] == {}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 5


def test_stream_of_a_call_alone(http, fake) -> None:
    fake.script = lambda _: [Admitted(0.0), *CALLS[4:]]
    deltas = [
        one["delta"] for one in post(http, stream=True, tools=[WEATHER]).events if "index" in one and "delta" in one
    ]
    assert deltas == [{"type": "input_json_delta", "partial_json": '{"town": "Bern"}'}]


def test_thinking_that_is_omitted(http, fake) -> None:
    fake.script = lambda _: CALLS
    body = post(http, thinking={"type": "adaptive", "display": "omitted"}).json
    assert [block["type"] for block in body["content"]] == ["text", "tool_use"]


def test_errors_after_the_beginning_are_events(http, fake) -> None:
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "a"), InternalError("the step failed")]
    reply = post(http, stream=True)
    assert reply.events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the step failed"}}
    assert "x-test-incomplete" in reply.headers


class TestClient:
    @pytest.fixture
    def client(self, http) -> Any:
        anthropic = pytest.importorskip("anthropic")
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{http.port}", api_key="x", max_retries=0) as client:
            yield client

    def test_message_and_count(self, client: Any) -> None:
        message = client.messages.create(model="demo", max_tokens=9, messages=HI)
        assert message.content[0].text == "one two three"
        assert client.messages.count_tokens(model="demo", messages=HI).input_tokens > 0

    def test_stream_helper(self, client: Any, fake) -> None:
        fake.script = lambda _: CALLS
        with client.messages.stream(model="demo", max_tokens=9, messages=HI, tools=[WEATHER]) as stream:
            assert "".join(stream.text_stream) == "I look."
            message = stream.get_final_message()
        thinking, text, use = message.content
        assert (thinking.thinking, text.text, use.input) == ("hm", "I look.", {"town": "Bern"})
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (5, 4)
        again = [*HI, {"role": "assistant", "content": message.content}]
        answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sun"}]}
        client.messages.create(model="demo", max_tokens=9, messages=[*again, answer], tools=[WEATHER])
        assert "sun" in fake._model.tokenizer.decode(fake.requests[1].prompts[0])

    def test_tool_runner(self, client: Any, fake) -> None:
        import anthropic

        @anthropic.beta_tool
        def weather(town: str) -> str:
            """Weather of a town."""
            return f"sun in {town}"

        last = [Admitted(0.0), TextDelta(0, "done"), Finished(0, "stop"), DONE]
        fake.script = lambda _: last if len(fake.requests) else CALLS
        runner = client.beta.messages.tool_runner(model="demo", max_tokens=9, messages=HI, tools=[weather])
        assert runner.until_done().content[0].text == "done"
        prompt = fake._model.tokenizer.decode(fake.requests[1].prompts[0])
        assert "sun in Bern" in prompt
        assert "<user>hi" in prompt

    def test_errors(self, client: Any) -> None:
        import anthropic

        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(model="other", max_tokens=9, messages=HI)


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_refused_so_that_the_client_sends_all(http, fake, thread) -> None:
    reply = post(http, thread=thread)
    error = reply.json["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert not fake.requests
