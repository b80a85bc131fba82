"""Files and batches, by the official client of OpenAI's API."""

import io
import json
import threading
import time
from collections.abc import Callable

import openai
import pytest

from http_server import served, wait_for
from llamacli.serve.errors import StorageFullError
from llamacli.serve.http import batches, generation
from llamacli.serve.http.batches import split_lines
from llamacli.serve.requests import Admitted, Done, Finished, TextDelta, Timings, Usage
from llamacli.serve.store import Store
from llamacli.util.cancellation import is_cancelled

pytest.importorskip("python_multipart")

DONE = Done(Usage(9, 4, 5, 2), Timings(0.0, 0.1, 0.1))
PATH = "/v1/chat/completions"


@pytest.fixture
def client(http) -> openai.OpenAI:
    with http.openai() as client:
        yield client


def line(name: str, **fields) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": name}], **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": PATH, "body": body})


def begin(client, lines) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")


def ended(client, batch) -> openai.types.Batch:
    wait_for(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled"))
    return client.batches.retrieve(batch.id)


def results(client, file_id) -> list[dict]:
    return [json.loads(one) for one in client.files.content(file_id).read().splitlines()]


def test_files(client) -> None:
    data = bytes(range(256)) * 20_000
    made = client.files.create(file=("some.bin", io.BytesIO(data)), purpose="user_data")
    assert (made.filename, made.bytes, made.purpose) == ("some.bin", len(data), "user_data")
    assert client.files.content(made.id).read() == data
    assert made.id in [one.id for one in client.files.list(purpose="user_data")]
    assert made.id not in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


def test_contents_have_the_described_type(client, http) -> None:
    made = client.files.create(file=("some.bin", b"some"), purpose="user_data")
    described = http.send("/openapi.json").json["paths"]["/v1/files/{id}/content"]["get"]["responses"]["200"]
    assert [http.send(f"/v1/files/{made.id}/content").headers["content-type"]] == list(described["content"])


def test_wrong_files(http, client) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"x"), purpose="other")
    form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=B"}
    assert http.send("/v1/files", form, kind).json["error"]["param"] == "file"
    assert http.send("/v1/files", b"--C\r\n", kind).json["error"]["code"] == "invalid_form"
    assert http.send("/v1/files", form, {**kind, "origin": "http://evil.example"}).status == 415
    assert http.send("/v1/files", {"purpose": "batch"}).status == 415


def test_batch_with_broken_lines(client, fake) -> None:
    lines = [line(f"r{i}") for i in range(50)]
    lines[10], lines[20], lines[30] = "{broken", line("r5"), line("r30", temperature="x")
    lines[40] = line("r40", stream=True)
    batch = ended(client, begin(client, lines))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (50, 46, 4)
    found = results(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == [f"r{i}" for i in range(50) if i not in (10, 20, 30, 40)]
    assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in found} == {"one two three"}
    assert all(request.background for request in fake.requests)
    broken, twice, wrong, streams = results(client, batch.error_file_id)
    assert (broken["error"]["line"], broken["error"]["code"], broken["response"]) == (11, "invalid_json", None)
    assert "there twice" in twice["error"]["message"]
    assert wrong["response"]["status_code"] == 400
    assert streams["error"]["param"] == "body.stream"


def test_batch_of_slow_schemas_holds_up_no_client(serve, tmp_path, monkeypatch) -> None:
    begun, compiled = threading.Event(), generation.chain

    def slow(model, params):
        if "slow" in params.json_schema:
            begun.set()
            while not is_cancelled():
                time.sleep(0.005)
        return compiled(model, params)

    monkeypatch.setattr(generation, "chain", slow)

    def shape(name: str) -> dict:
        return {"type": "json_schema", "json_schema": {"name": name, "schema": {"required": [name]}}}

    lines = [line(f"r{i}", response_format=shape(f"slow{i}")) for i in range(3)]
    server = serve(data=tmp_path, schema_timeout=0.3)
    with server.openai() as client:
        batch = begin(client, [*lines, line("r3", response_format=shape("quick")), line("r4")])
        assert begun.wait(30)
        assert server.chat(response_format=shape("quick")).status == 200
        assert client.batches.retrieve(batch.id).status == "in_progress"
        batch = ended(client, batch)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 3)
        codes = [one["response"]["body"]["error"]["code"] for one in results(client, batch.error_file_id)]
    assert codes == ["invalid_schema"] * 3


def test_batch_waits_while_the_store_is_full(client, fake, monkeypatch, caplog) -> None:
    monkeypatch.setattr(batches, "_FULL_S", 0.0)
    full = dict.fromkeys(("update", "add_result", "end_batch"), 3)

    def fails_first(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments, **options) -> None:
            full[name] -= 1
            if full[name] >= 0:
                raise StorageFullError("the disk of the store is full")
            method(*arguments, **options)

        return call

    for name in full:
        monkeypatch.setattr(Store, name, fails_first(name, getattr(Store, name)))
    batch = ended(client, begin(client, [line("r0"), line("r1")]))
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    assert max(full.values()) < 0
    assert sum("waits" in record.message for record in caplog.records) <= 4


def test_cancelled_batch_keeps_its_results(client, fake) -> None:
    usual = fake.script
    endless = [Admitted(0.0), *[TextDelta(0, "x")] * 1_000_000, Finished(0, "stop"), DONE]
    fake.script = lambda request: usual(request) if len(fake.requests) < 5 else endless
    batch = begin(client, [line(f"r{i}") for i in range(50)])
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 5)
    done = client.batches.cancel(batch.id)
    assert (done.status, done.request_counts.completed) == ("cancelled", 5)
    assert len(results(client, done.output_file_id)) == 5
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.batches.list().data[0].id == batch.id


def test_batch_goes_on_after_a_restart(fake, demo, tmp_path) -> None:
    settings = {"data": tmp_path / "data", "shutdown_timeout": 0.0}
    usual = fake.script
    endless = [Admitted(0.0), *[TextDelta(0, "x")] * 1_000_000, Finished(0, "stop"), DONE]
    with served(fake, **settings) as first, first.openai() as client:
        fake.script = lambda request: usual(request) if len(fake.requests) < 20 else endless
        batch = begin(client, [line(f"r{i}") for i in range(50)])
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 20)
    fake.__init__(demo)
    with served(fake, **settings) as second, second.openai() as client:
        batch = ended(client, batch)
        assert sorted(one["custom_id"] for one in results(client, batch.output_file_id)) == sorted(
            f"r{i}" for i in range(50)
        )
        assert len(fake.requests) == 30


def test_split_lines() -> None:
    text = b"one\ntwo two\n\nthree"
    for size in range(1, 8):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        assert list(split_lines(chunks, 100)) == [b"one", b"two two", b"", b"three"]
        assert list(split_lines(chunks, 3)) == [b"one", b"two ", b"", b"thre"]
