"""Requests as clients of other projects send them: `client_requests.json`.

LlamaIndex's were recorded with llama-index-llms-openai-like 0.8.1, llama-index-llms-ollama 0.11.0 and
llama-index-embeddings-openai 0.7.0; the others have the fields and values of the clients' public sources.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from llamacli.sampling import SamplingParams, build_chain
from llamacli.serve.requests import Admitted, Done, Embedding, EmbeddingRequest, Timings, Usage

REQUESTS = json.loads(Path(__file__).with_name("client_requests.json").read_text())


def last_part(text: str) -> Any:
    """Last line of JSON lines, or last event of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.strip() not in ("", "data: [DONE]")]
    return json.loads(lines[-1])


@pytest.fixture
def ready(fake, monkeypatch) -> Iterator[Any]:
    """A fake engine of a model with FIM tokens and vectors."""
    monkeypatch.setattr(fake._model.tokenizer, "infill_ids", (4, 5, 6))
    words = fake.script

    def script(request: Any) -> list[Any]:
        if isinstance(request, EmbeddingRequest):
            vectors = [Embedding(i, np.ones(4, np.float32)) for i in range(len(request.prompts))]
            return [Admitted(0.0), *vectors, Done(Usage(3), Timings(0.0, 0.1, 0.0))]
        if isinstance(request.params, SamplingParams):
            build_chain(request.params, fake._model.tokenizer)  # as the engine does: names of samplers are known
        return words(request)

    infos = fake.models()
    fake.script, fake.models = script, lambda: (attrs.evolve(infos[0], embeds=True),)
    yield fake
    del fake.models


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: f"{one['client']} {one['what']}")
def test_no_field_is_refused_or_unknown(request_: dict[str, Any], ready, serve) -> None:
    reply = serve(strict=True).send(request_["path"], request_["body"])
    assert reply.status == 200, reply.body
    assert "warning" not in reply.headers
    body = last_part(reply.body.decode())
    assert {*request_["has"]} <= {*body}
    if "response_fields" in request_["body"]:
        assert {*body} <= {*request_["body"]["response_fields"]}
