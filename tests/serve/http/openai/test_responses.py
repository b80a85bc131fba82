"""Responses, by the official client of OpenAI's API."""

import openai
import pytest

from llamacli.chat.messages import ToolCall
from llamacli.serve.errors import BadRequestError, InternalError
from llamacli.serve.http.chats import as_dicts
from llamacli.serve.http.openai.responses import as_chat
from llamacli.serve.http.schemas.responses import InputItem, InputPart, ResponsesRequest
from llamacli.serve.requests import Admitted, ArgumentsDelta, Done, Finished, TextDelta, Timings, ToolCallDelta, Usage

PAINT = {"type": "function", "name": "paint", "parameters": {"type": "object", "properties": {}}, "strict": True}
DONE = Done(Usage(9, 4, 5, 2), Timings(0.0, 0.1, 0.1))


@pytest.fixture
def client(http) -> openai.OpenAI:
    with http.openai() as client:
        yield client


def test_text(client, fake) -> None:
    fake.script = lambda _: [
        Admitted(0.0), TextDelta(0, "hm", reasoning=True), TextDelta(0, "one"), TextDelta(0, " two"),
        Finished(0, "stop"), DONE,
    ]  # fmt: skip
    reply = client.responses.create(model="demo", input="hi", instructions="Be brief.", max_output_tokens=9)
    assert (reply.status, reply.output_text) == ("completed", "one two")
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    assert reply.output[0].content[0].text == "hm"
    assert (reply.usage.input_tokens, reply.usage.output_tokens_details.reasoning_tokens) == (9, 2)
    assert reply.usage.input_tokens_details.to_dict() == {"cached_tokens": 4, "cache_write_tokens": 0}
    text = fake._model.decode(fake.requests[0].prompts[0])
    assert "Be brief." in text
    assert fake.requests[0].max_tokens == 9
    stream = list(client.responses.create(model="demo", input="hi", stream=True))
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    kinds = [event.type for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    assert stream[-1].response.output_text == "one two"
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "one two"


def test_helper_for_streams(client) -> None:
    with client.responses.stream(model="demo", input="hi") as stream:
        assert stream.get_final_response().output_text == "one two three"


def test_length_is_incomplete(client, fake) -> None:
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "one"), Finished(0, "length"), DONE]
    reply = client.responses.create(model="demo", input="hi")
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_function_calls(client, fake) -> None:
    call = ToolCallDelta(0, 0, ToolCall("paint", {"c": 1}))
    fake.script = lambda _: [Admitted(0.0), call, Finished(0, "tool_calls"), DONE]
    reply = client.responses.create(model="demo", input="hi", tools=[PAINT])
    assert (reply.tools[0].name, reply.tool_choice) == ("paint", "auto")
    item = reply.output[0]
    assert (item.type, item.name, item.arguments) == ("function_call", "paint", '{"c": 1}')
    history = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": item.call_id, "name": "paint", "arguments": item.arguments},
        {"type": "function_call_output", "call_id": item.call_id, "output": "painted"},
    ]
    client.responses.create(model="demo", input=history, tools=[PAINT])
    assert "painted" in fake._model.decode(fake.requests[1].prompts[0])


def test_arguments_are_streamed(http, fake) -> None:
    parts = [ArgumentsDelta(0, 0, "paint", text) for text in ("", '{"c": ', "1")]
    ends = [ToolCallDelta(0, 0, ToolCall("paint", {"c": 1})), ToolCallDelta(0, 1, ToolCall("paint", partial="{"))]
    fake.script = lambda _: [Admitted(0.0), *parts, *ends, Finished(0, "length"), DONE]
    found = http.send("/v1/responses", {"input": "hi", "stream": True}).events
    deltas = [one for one in found if one["type"] == "response.function_call_arguments.delta"]
    assert [(one["output_index"], one["delta"]) for one in deltas] == [(0, '{"c": '), (0, "1"), (0, "}"), (1, "{")]
    output = found[-1]["response"]["output"]
    assert [(item["arguments"], item["status"]) for item in output] == [('{"c": 1}', "completed"), ("{", "incomplete")]
    assert [one["arguments"] for one in found if one["type"].endswith("arguments.done")] == ['{"c": 1}', "{"]


def test_error_in_a_stream(http, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.serve.http.call.LINGER_S", 0.0)
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "one"), InternalError("the step failed")]
    reply = http.send("/v1/responses", {"input": "hi", "stream": True})
    assert reply.events[-1]["type"] == "error"
    assert reply.events[-1]["message"] == "the step failed"
    assert reply.headers["x-test-incomplete"] == "yes"


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"prompt": {"id": "pmpt_1"}},
        {"tools": [{"type": "web_search"}]},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"content": "x"}]},
        {"tool_choice": {"type": "function"}, "tools": [PAINT]},
        {"input": []},
        {"text": {"format": {"type": "yaml"}}},
    ],
)
def test_refused_requests(fields: dict, http, fake) -> None:
    assert http.send("/v1/responses", {"input": "hi", **fields}).status == 400
    assert not fake.requests


def test_items_become_messages() -> None:
    items = [
        InputItem(role="user", content=[InputPart(type="input_text", text=text) for text in "ab"]),
        InputItem(type="reasoning", summary=[InputPart(type="summary_text", text="hm")]),
        InputItem(type="function_call", name="f", arguments="{}", call_id="1"),
        InputItem(type="function_call", name="g", arguments="{}", call_id="2"),
        InputItem(type="function_call_output", call_id="1", output="x"),
        InputItem(type="reasoning", summary=[InputPart(type="summary_text", text="so")]),
        InputItem(role="assistant", content="done"),
        InputItem(type="reasoning", content="cut"),
        InputItem(role="user", content="and?"),
    ]
    messages = as_dicts(as_chat(ResponsesRequest(input=items)).messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "assistant", "user"]
    assert messages[0]["content"] == "a\nb"
    assert [message.get("reasoning_content") for message in messages] == [None, "hm", None, "so", "cut", None]
    assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["f", "g"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (InputItem(role="user"), "input[0].content"),
        (InputItem(type="function_call_output", call_id="1"), "input[0].output"),
        (InputItem(type="reasoning"), "input"),
    ],
)
def test_items_that_lack_something(item: InputItem, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        as_chat(ResponsesRequest(input=[item]))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_errors_name_their_fields(fields: dict, param: str, http) -> None:
    reply = http.send("/v1/responses", {"input": "hi", **fields})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
