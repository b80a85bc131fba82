"""Embeddings, by the official client of OpenAI's API."""

import attrs
import numpy as np
import openai
import pytest

from llamacli.serve.requests import Admitted, Done, Embedding, EmbeddingRequest, Timings, Usage


@pytest.fixture
def embedding(fake):
    """Make the fake engine embed: vectors are the prompts' lengths."""
    infos = fake.models()
    fake.models = lambda: (attrs.evolve(infos[0], embeds=True),)

    def script(request):
        assert isinstance(request, EmbeddingRequest)
        vectors = [Embedding(i, np.full(3, len(prompt), np.float32)) for i, prompt in enumerate(request.prompts)]
        n_prompt = sum(map(len, request.prompts))
        return [Admitted(0.0), *reversed(vectors), Done(Usage(n_prompt), Timings(0.0, 0.1, 0.0))]

    fake.script = script
    yield
    del fake.models


@pytest.mark.usefixtures("embedding")
@pytest.mark.parametrize("encoding", ["float", "base64", openai.omit])
def test_vectors_in_both_formats(encoding, http) -> None:
    with http.openai() as client:
        reply = client.embeddings.create(model="demo", input=["a b c d", "a"], encoding_format=encoding)
        ids = client.embeddings.create(model="demo", input=[[5, 6, 7]], encoding_format=encoding)
    assert [one.index for one in reply.data] == [0, 1]
    if encoding == "base64":
        assert isinstance(reply.data[0].embedding, str)
    else:
        assert reply.data[0].embedding[0] > reply.data[1].embedding[0]
        assert ids.data[0].embedding == [3.0, 3.0, 3.0]
    assert ids.usage.prompt_tokens == ids.usage.total_tokens == 3


@pytest.mark.usefixtures("embedding")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 1 << 20}, "dimensions"),
        ({}, "input"),
    ],
)
def test_refused_requests(fields: dict, param: str, http, fake) -> None:
    reply = http.send("/v1/embeddings", fields)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not fake.requests


@pytest.mark.usefixtures("embedding")
def test_inputs_of_ids_and_texts_and_shorter_vectors(http, fake) -> None:
    tokenizer = fake._model.tokenizer
    http.send("/v1/embeddings", {"input": [5, " fox", 6], "truncate_prompt_tokens": 2})
    assert fake.requests[0].prompts == (tuple([5, *tokenizer.encode(" fox", add_special=False), 6][-2:]),)
    assert http.send("/v1/embeddings", {"input": ["", "a"]}).status == 200
    reply = http.send("/v1/embeddings", {"input": [[5, 6, 7]], "dimensions": 2})
    assert reply.json["data"][0]["embedding"] == pytest.approx([0.5**0.5] * 2)


def test_model_without_embeddings(http) -> None:
    reply = http.send("/v1/embeddings", {"input": "a"})
    assert (reply.status, reply.json["error"]["type"]) == (501, "not_supported_error")


@pytest.mark.usefixtures("embedding")
def test_ollamas_vectors(http) -> None:
    body = http.send("/api/embed", {"model": "demo", "input": ["a", "b"]}).json
    assert len(body["embeddings"]) == 2
    assert body["prompt_eval_count"] > 0
