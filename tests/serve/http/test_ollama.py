"""ollama's API, as its clients use it."""

import json

import attrs
import numpy as np
import pytest

from llamacli.chat.messages import ToolCall
from llamacli.serve.catalogue import parse_modelfile
from llamacli.serve.errors import InternalError
from llamacli.serve.http.bodies import convert
from llamacli.serve.http.ollama import OllamaMessage, _message
from llamacli.serve.requests import (
    Admitted,
    Done,
    Embedding,
    Finished,
    Preset,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

HI = [{"role": "user", "content": "hi"}]
DONE = Done(Usage(9, 4, 5, 2), Timings(0.0, 0.25, 0.5))


def lines(reply) -> list:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.splitlines()]


def test_chat_is_a_stream_by_default(http) -> None:
    found = lines(http.send("/api/chat", {"model": "demo", "messages": HI}))
    assert "".join(line["message"]["content"] for line in found) == "one two three"
    assert [line["done"] for line in found] == [*[False] * (len(found) - 1), True]
    assert found[-1]["done_reason"] == "stop"
    assert {"created_at", "total_duration", "eval_count"} <= found[-1].keys()


def test_whole_chat(http, fake) -> None:
    call = ToolCallDelta(0, 0, ToolCall("paint", {"c": 1}))
    fake.script = lambda _: [
        Admitted(0.0), TextDelta(0, "hm", reasoning=True), TextDelta(0, "yes"), call, Finished(0, "length"), DONE,
    ]  # fmt: skip
    body = http.send("/api/chat", {"model": "demo:latest", "messages": HI, "stream": False}).json
    assert body["message"] == {
        "role": "assistant", "content": "yes", "thinking": "hm",
        "tool_calls": [{"function": {"name": "paint", "arguments": {"c": 1}}}],
    }  # fmt: skip
    assert (body["done"], body["done_reason"], body["prompt_eval_count"]) == (True, "length", 9)
    assert (body["prompt_eval_duration"], body["eval_duration"]) == (250_000_000, 500_000_000)
    streamed = lines(http.send("/api/chat", {"model": "demo", "messages": HI}))
    assert [line["message"].get("thinking") for line in streamed] == ["hm", None, None, None]
    assert streamed[2]["message"]["tool_calls"] == body["message"]["tool_calls"]


def test_options(http, fake) -> None:
    options = {"num_predict": 5, "temperature": 0.5, "top_k": 3, "seed": 7, "stop": ["x"], "num_ctx": 100, "numa": True}
    http.send("/api/chat", {"model": "demo", "messages": HI, "options": options, "think": False})
    request = fake.requests[0]
    assert (request.max_tokens, request.seed, request.stop) == (5, 7, ("x",))
    assert (request.params.temperature, request.params.top_k) == (0.5, 3)
    http.send("/api/chat", {"model": "demo", "messages": HI, "options": {"num_predict": -1}})
    assert fake.requests[1].max_tokens is None


def test_log_probabilities(http, fake) -> None:
    token = TokenLogprob(1, b"a", -1.0, ((1, b"a", -1.0), (2, b"b", -2.0)))
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "a", tokens=(token,)), Finished(0, "stop"), DONE]
    for n in (0, 1, 2):
        body = {"model": "demo", "messages": HI, "stream": False, "logprobs": True, "top_logprobs": n}
        (found,) = http.send("/api/chat", body).json["logprobs"]
        assert (found["token"], found["logprob"]) == ("a", -1.0)
        assert [one["token"] for one in found["top_logprobs"]] == ["a", "b"][:n]


def test_calls_of_earlier_messages() -> None:
    call = {"function": {"name": "paint", "arguments": {"c": 1}}}
    given = {"role": "assistant", "content": "", "tool_calls": [call]}
    (made,) = _message(convert(given, OllamaMessage), "messages[0]").tool_calls
    assert (made.function.name, made.function.arguments) == ("paint", {"c": 1})
    assert _message(convert({**given, "tool_calls": []}, OllamaMessage), "messages[0]").tool_calls is None


def test_generate_uses_the_template_unless_raw(http, fake) -> None:
    found = lines(http.send("/api/generate", {"model": "demo", "prompt": "Once", "system": "Be brief."}))
    assert "".join(line["response"] for line in found) == "one two three"
    http.send("/api/generate", {"model": "demo", "prompt": "Once", "raw": True, "stream": False})
    texts = [fake._model.decode(request.prompts[0]) for request in fake.requests]
    assert texts[0].endswith("<system>Be brief.\n<user>Once\n<assistant>")
    assert texts[1] == "Once"


def test_generate_without_a_template_completes(serve, fake) -> None:
    serve(template=None).send("/api/generate", {"model": "demo", "prompt": "Once"})
    assert fake._model.decode(fake.requests[0].prompts[0]) == "Once"


@pytest.mark.parametrize(("path", "kind"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_request_without_text_loads(path: str, kind: str, http, fake) -> None:
    body = http.send(path, {"model": "demo"}).json
    assert (body["done"], body["done_reason"]) == (True, "load")
    assert kind in body
    assert not fake.requests


def test_request_with_keep_alive_0_unloads(http, fake) -> None:
    body = http.send("/api/generate", {"model": "demo:latest", "keep_alive": 0}).json
    assert body["done_reason"] == "unload"
    assert fake.unloaded == ["demo"]
    assert http.send("/api/chat", {"model": "other", "keep_alive": 0}).status == 404


@pytest.mark.parametrize("raw", [False, True])
def test_formats(raw: bool, http, fake) -> None:
    pytest.importorskip("llguidance")
    for given in ("json", {"type": "object", "properties": {}}):
        http.send("/api/generate", {"model": "demo", "prompt": "x", "format": given, "raw": raw})
        sampler = fake.requests[-1].params.clone()
        for token in fake._model.tokenizer.encode_run("{", continues=True):
            sampler.accept(token)
    assert http.send("/api/generate", {"model": "demo", "prompt": "x", "format": "yaml"}).status == 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": HI, "options": {"num_ctx": 2048}}),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}),
        ("/api/generate", {"prompt": "x", "context": [1]}),
        ("/api/generate", {"prompt": "x", "images": ["x"]}),
        ("/api/generate", {"prompt": "x", "template": "x"}),
        ("/api/chat", {"messages": HI, "options": {"tfs_z": 0.5}}),
    ],
)
def test_refused_requests(path: str, fields: dict, http, fake) -> None:
    reply = http.send(path, {"model": "demo", **fields})
    assert reply.status == 400
    assert isinstance(reply.json["error"], str)
    assert not fake.requests


def test_error_in_a_stream_is_a_line(http, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamacli.serve.http.call.LINGER_S", 0.0)
    fake.script = lambda _: [Admitted(0.0), TextDelta(0, "one"), InternalError("the step failed")]
    reply = http.send("/api/chat", {"model": "demo", "messages": HI})
    assert json.loads(reply.body.splitlines()[-1]) == {"error": "the step failed"}
    assert reply.headers["x-test-incomplete"] == "yes"


def test_models(http) -> None:
    assert http.send("/api/ps").json["models"][0]["context_length"] == 1024
    shown = http.send("/api/show", {"model": "demo"}).json
    [tag] = http.send("/api/tags").json["models"]
    assert tag["name"] == "demo"
    for details in (shown["details"], tag["details"]):
        assert (details["family"], details["families"], details["quantization_level"]) == ("llama", ["llama"], "Q8_0")
        assert details["parameter_size"] == "2.76M"
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["capabilities"] == ["completion", "tools"]
    assert http.send("/api/show", {"model": "other"}).status == 404
    assert "version" in http.send("/api/version").json


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}),
        ("/api/generate", {"prompt": "x", "images": ["x"]}),
    ],
)
def test_images_are_refused_with_the_reason(path: str, fields: dict, http) -> None:
    reply = http.send(path, {"model": "demo", **fields})
    assert reply.status == 400
    assert reply.json["error"].endswith("images: not supported, this model reads text only")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/api/pull"), ("POST", "/api/create"), ("DELETE", "/api/delete")]
)
def test_changes_of_the_store_are_not_supported(method: str, path: str, http) -> None:
    assert http.send(path, {"model": "x"}, method=method).status == 501


def test_curl_of_ollamas_documentation(http) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert http.send("/api/chat", {"model": "demo", "messages": HI}, form).status == 200
    assert http.send("/api/chat", {"model": "demo", "messages": HI}, {**form, "origin": "https://x"}).status == 415


@pytest.mark.parametrize("raw", [False, True])
def test_large_schemas_are_refused(raw: bool, http) -> None:
    body = {"model": "demo", "prompt": "a", "raw": raw, "format": {"type": "object", "description": "x" * (1 << 20)}}
    reply = http.send("/api/generate", body)
    assert reply.status == 400
    assert "1048576 are allowed" in reply.json["error"]


def test_digests_tell_models_apart_before_they_are_loaded(http, fake, monkeypatch) -> None:
    info = fake.models()[0]
    others = [
        attrs.evolve(info, fingerprint=""), attrs.evolve(info, name="a"), attrs.evolve(info, path="/models/b.gguf"),
        attrs.evolve(info, created=1), attrs.evolve(info, preset=Preset(system="Be brief.")),
        attrs.evolve(info, path="/models/blobs/sha256-1"),
    ]  # fmt: skip
    monkeypatch.setattr(fake, "models", lambda: (info, *others), raising=False)
    tags = http.send("/api/tags").json["models"]
    digests = [tag["digest"] for tag in tags]
    assert all(len(digest) == 64 for digest in digests)
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests)) == len(digests) - 2
    assert {tag["details"]["format"] for tag in tags} == {"gguf"}


def test_the_modelfile_of_a_model_makes_it_again(http, fake, monkeypatch) -> None:
    assert http.send("/api/show", {"model": "demo"}).json["modelfile"] == "FROM demo\n"
    preset = Preset(system="Be\nbrief.", template="{{ messages }}", sampling={"top_k": 5}, stop=("x", "y"), seed=3)
    infos = fake.models()
    monkeypatch.setattr(fake, "models", lambda: (attrs.evolve(infos[0], preset=preset),), raising=False)
    assert parse_modelfile(http.send("/api/show", {"model": "demo"}).json["modelfile"]) == {
        "from": "demo", "system": "Be\nbrief.", "template": "{{ messages }}", "adapters": [],
        "parameters": {"top_k": 5, "stop": ["x", "y"], "seed": 3},
    }  # fmt: skip


def test_models_that_pool_their_tokens_embed_and_complete_nothing(http, demo, monkeypatch) -> None:
    get = type(demo.metadata).get
    pooled = {"llama.pooling_type": 1}
    monkeypatch.setattr(type(demo.metadata), "get", lambda self, key: pooled.get(key, get(self, key)))
    assert http.send("/api/show", {"model": "demo"}).json["capabilities"] == ["embedding", "tools"]


def test_the_older_form_of_embeddings(http, fake, monkeypatch) -> None:
    infos = fake.models()
    monkeypatch.setattr(fake, "models", lambda: (attrs.evolve(infos[0], embeds=True),), raising=False)
    vector = Embedding(0, np.array([0.5, 0.25], np.float32))
    fake.script = lambda _: [Admitted(0.0), vector, Done(Usage(1), Timings(0.0, 0.0, 0.0))]
    reply = http.send("/api/embeddings", {"model": "demo", "prompt": "a", "keep_alive": "5m"})
    assert (reply.json, reply.headers.get("warning")) == ({"embedding": [0.5, 0.25]}, None)
    assert http.send("/api/show", {"model": "demo"}).json["capabilities"] == ["completion", "tools"]
    assert http.send("/", method="HEAD").status == 200
