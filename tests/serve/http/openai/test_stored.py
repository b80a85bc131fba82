"""Stored responses and conversations, by the official client of OpenAI's API."""

import openai
import pytest

from http_server import served, wait_for
from llamacli.serve.errors import QueueFullError
from llamacli.serve.requests import Admitted, Done, Finished, TextDelta, Timings, Usage

DONE = Done(Usage(9, 4, 5, 2), Timings(0.0, 0.1, 0.1))


@pytest.fixture
def client(http) -> openai.OpenAI:
    with http.openai() as client:
        yield client


def prompt_of(fake, number: int = -1) -> str:
    return fake._model.decode(fake.requests[number].prompts[0])


def test_next_turn_has_what_was_said(client, fake) -> None:
    first = client.responses.create(model="demo", input="hello", instructions="Be brief.")
    second = client.responses.create(model="demo", input="and then", previous_response_id=first.id)
    third = client.responses.create(model="demo", input="last", previous_response_id=second.id)
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    text = prompt_of(fake)
    said = "<user>hello\n<assistant>one two three\n<user>and then\n<assistant>one two three\n<user>last\n"
    assert text == f"{said}<assistant>"
    assert "Be brief" not in text  # instructions are of one response
    assert client.responses.retrieve(first.id).output_text == "one two three"
    items = client.responses.input_items.list(third.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "last")]


@pytest.mark.parametrize("kind", ["reasoning", "function_call", "function_call_output"])
def test_text_of_every_item_is_a_part(client, kind) -> None:
    """Contents of items may be texts; once only those of messages could."""
    item = {"type": kind, "content": "thinking", "name": "f", "call_id": "1", "arguments": "{}", "output": "2"}
    said = {"role": "user", "content": "hello"}
    stored = client.conversations.create(items=[said, item])
    shown = client.conversations.items.list(stored.id, order="asc").data[1].to_dict()
    text_kind = "reasoning_text" if kind == "reasoning" else "input_text"
    assert shown["content"] == [{"type": text_kind, "text": "thinking"}]
    again = client.responses.create(model="demo", input=[said, item, said], conversation=stored.id)
    assert again.output_text == "one two three"


def test_streams_are_stored(client) -> None:
    with client.responses.stream(model="demo", input="hi") as stream:
        done = stream.get_final_response()
    assert client.responses.retrieve(done.id).output_text == "one two three"


def test_deleted_and_unstored_are_unknown(client, fake) -> None:
    kept = client.responses.create(model="demo", input="hi")
    client.responses.delete(kept.id)
    free = client.responses.create(model="demo", input="hi", store=False)
    for one in (kept, free):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(one.id)
        with pytest.raises(openai.BadRequestError) as found:
            client.responses.create(model="demo", input="x", previous_response_id=one.id)
        assert (found.value.param, found.value.code) == ("previous_response_id", "previous_response_not_found")
    assert len(fake.requests) == 2


def test_conversations(client, fake) -> None:
    made = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "my name is Anna"}], metadata={"topic": "names"}
    )
    client.responses.create(model="demo", input="hi", conversation=made.id)
    client.responses.create(model="demo", input="who am I", conversation={"id": made.id})
    text = prompt_of(fake)
    parts = ["<user>my name is Anna", "<user>hi", "<assistant>one two three", "<user>who am I"]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    items = list(client.conversations.items.list(made.id, limit=2, order="asc"))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert client.conversations.items.retrieve(items[2].id, conversation_id=made.id).content[0].text == "one two three"
    client.conversations.items.delete(items[0].id, conversation_id=made.id)
    more = client.conversations.items.create(
        made.id, items=[{"type": "message", "role": "user", "content": "one more"}]
    )
    assert more.data[0].content[0].text == "one more"
    said = client.conversations.items.create(made.id, items=[{"type": "message", "role": "assistant", "content": "ok"}])
    assert (said.data[0].content[0].text, said.data[0].content[0].annotations) == ("ok", [])
    assert client.conversations.update(made.id, metadata={"topic": "x"}).metadata == {"topic": "x"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "x"}
    client.responses.create(model="demo", input="last", conversation=made.id, store=False)
    assert "Anna" not in prompt_of(fake)
    assert "one more" in prompt_of(fake)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"conversation": "conv_0"}, 404, None),
        ({"conversation": "conv_0", "previous_response_id": "resp_0"}, 400, "conversation"),
        ({"background": True, "stream": True}, 400, "stream"),
        ({"background": True, "store": False}, 400, "store"),
    ],
)
def test_wrong_fields(http, fake, fields, status, param) -> None:
    reply = http.send("/v1/responses", {"input": "hi", **fields})
    assert (reply.status, reply.json["error"]["param"]) == (status, param)
    assert not fake.requests


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_0"])
def test_wrong_pages(http, client, query) -> None:
    made = client.conversations.create()
    reply = http.send(f"/v1/conversations/{made.id}/items?{query}")
    assert reply.status in (400, 404)
    assert reply.json["error"]["message"].startswith(query.partition("=")[0])


def test_background(client, fake, http) -> None:
    fake.gate.clear()
    made = client.responses.create(model="demo", input="hi", background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    wait_for(lambda: fake.requests)
    assert client.responses.retrieve(made.id).status in ("queued", "in_progress")
    with pytest.raises(openai.ConflictError):
        client.responses.create(model="demo", input="x", previous_response_id=made.id)
    http.server._loop.call_soon_threadsafe(fake.gate.set)
    wait_for(lambda: client.responses.retrieve(made.id).status == "completed")
    done = client.responses.retrieve(made.id)
    assert (done.output_text, done.created_at) == ("one two three", made.created_at)


def test_background_is_cancelled(client, fake) -> None:
    fake.script = lambda _: [Admitted(0.0), *[TextDelta(0, "x")] * 100_000, Finished(0, "stop"), DONE]
    made = client.responses.create(model="demo", input="hi", background=True)
    wait_for(lambda: fake.requests)
    assert client.responses.cancel(made.id).status == "cancelled"
    wait_for(lambda: fake.cancelled)
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    done = client.responses.create(model="demo", input="hi", background=True)
    client.responses.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id)


def test_background_waits_for_room_and_says_why_it_failed(client, fake) -> None:
    refusals = [QueueFullError("full", retry_after=0)] * 2
    usual = fake.script
    fake.script = lambda request: [refusals.pop()] if refusals else usual(request)
    made = client.responses.create(model="demo", input="hi", background=True)
    wait_for(lambda: client.responses.retrieve(made.id).status == "completed")
    fake.script = lambda _: [RuntimeError("defect")]
    made = client.responses.create(model="demo", input="hi", background=True)
    wait_for(lambda: client.responses.retrieve(made.id).status == "failed")
    assert client.responses.retrieve(made.id).error.message


def test_background_goes_on_after_a_restart(fake, demo, tmp_path) -> None:
    settings = {"data": tmp_path / "data", "shutdown_timeout": 0.0}
    with served(fake, **settings) as first, first.openai() as client:
        before = client.responses.create(model="demo", input="hello")
        fake.script = lambda _: [Admitted(0.0), *[TextDelta(0, "x")] * 1_000_000, Finished(0, "stop"), DONE]
        made = client.responses.create(model="demo", input="hi", background=True, previous_response_id=before.id)
        wait_for(lambda: len(fake.requests) == 2)
    fake.__init__(demo)
    with served(fake, **settings) as second, second.openai() as client:
        wait_for(lambda: client.responses.retrieve(made.id).status == "completed")
        assert client.responses.retrieve(made.id).output_text == "one two three"
    assert "<user>hello" in prompt_of(fake)


def test_clients_do_not_see_each_other(serve) -> None:
    server = serve(api_keys=("a", "b"))
    with server.openai(api_key="a") as anna, server.openai(api_key="b") as bert:
        made = anna.responses.create(model="demo", input="hi")
        assert anna.responses.retrieve(made.id).id == made.id
        with pytest.raises(openai.NotFoundError):
            bert.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError):
            bert.responses.create(model="demo", input="hi", previous_response_id=made.id)
