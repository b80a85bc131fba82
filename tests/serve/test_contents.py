"""Prompts of embeddings in the engine: texts, prefixes, loads, replicas, refusals."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from conftest import LoadTiny, TinyGguf
from http_server import served
from llamacli import InvalidRequestError, Model, load_model
from llamacli.inputs import Contents, Inputs
from llamacli.plugins import Plugins
from llamacli.sampling import SamplingParams
from llamacli.serve import planning
from llamacli.serve.checks import check_request, with_encoder_inputs
from llamacli.serve.engine import LocalEngine
from llamacli.serve.errors import NotSupportedError, PromptTooLongError
from llamacli.serve.models import ModelSource
from llamacli.serve.ray.blocks import BLOCK, chain_hashes
from llamacli.serve.ray.messages import portable, route_of
from llamacli.serve.requests import Done, EmbeddingRequest, GenerationRequest, TextDelta, Usage
from llamacli.serve.settings import EngineSettings
from tiny_variants import write

IDS = [5, 6, 7, 8, 9]
N = 40


def rows(model: Model, seed: int = 1, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, (n, model.config.n_embd)).astype(np.float32)


def request(inputs: Inputs, **fields: Any) -> GenerationRequest:
    contents = Contents()
    given = {"id": "x", "params": SamplingParams(), "max_tokens": 12, "model": "tiny"} | fields
    return GenerationRequest(prompts=(tuple(contents.add(inputs)),), contents=contents, **given)


Start = Callable[..., contextlib.AbstractContextManager[LocalEngine]]


@pytest.fixture
def start(tiny_gguf: TinyGguf) -> Start:
    """Start an engine with a model."""

    @contextlib.contextmanager
    def started(model: Model, variant: str, **settings: Any) -> Iterator[LocalEngine]:
        def load(*_: Any, **__: Any) -> Model:
            return Model(model.config, model.tokenizer, model.metadata, model.program, model.mode)

        given = EngineSettings(**{"threads": 1, "n_ctx": 128, **settings})
        engine = LocalEngine((ModelSource("tiny", tiny_gguf(variant)),), given, load)
        try:
            yield engine
        finally:
            engine.close()

    return started


async def reply(engine: LocalEngine, one: GenerationRequest) -> tuple[str, Usage]:
    text = ""
    (await engine.pin("tiny")).release()
    async for event in engine.submit(one):
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, Done):
            return text, event.usage
    raise AssertionError(event)


def replies(engine: LocalEngine, *requests: GenerationRequest) -> list[tuple[str, Usage]]:
    async def main() -> list[tuple[str, Usage]]:
        return list(await asyncio.gather(*(reply(engine, one) for one in requests)))

    return asyncio.run(main())


def alone(model: Model, prompt: Inputs | list[int]) -> str:
    text: str = model.create_completion(prompt, max_tokens=12, temperature=0.0)["choices"][0]["text"]
    return text


VARIANTS = ["gqa", "gemma3", "qwen3next", "qwen2vl"]
"""Plain, with sliding windows, with recurrent states, with positions of several components."""


@pytest.mark.medium
@pytest.mark.parametrize("variant", VARIANTS)
def test_texts_are_those_of_create_completion(variant: str, load_tiny: LoadTiny, start: Start) -> None:
    model = load_tiny(variant)
    given = [Inputs.of(embeddings=rows(model, seed)) for seed in (1, 2, 3)]
    expected = [alone(model, inputs) for inputs in given]
    assert len({*expected}) > 1
    for settings in ({}, {"step_ms": 0.1}, {"max_running": 2, "step_ms": 0.5}, {"lookup": True}):
        with start(model, variant, **settings) as engine:
            found = replies(engine, *(request(inputs, id=str(i)) for i, inputs in enumerate(given)))
            assert [text for text, _ in found] == expected, settings


@pytest.mark.medium
def test_preempted_prompts_are_evaluated_again(
    load_tiny: LoadTiny, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = load_tiny("gqa"), planning.Planner.plan
    given = [Inputs.of(embeddings=rows(model, seed)) for seed in (1, 2, 3)]

    def preempting(self: planning.Planner) -> Any:
        if self.n_steps % 3 == 2 and len(self.running.sequences) > 1:
            self.running.preempt(self.running.sequences[-1])
        return plan(self)

    monkeypatch.setattr(planning.Planner, "plan", preempting)
    with start(model, "gqa", step_ms=0.5) as engine:
        found = replies(engine, *(request(inputs, id=str(i)) for i, inputs in enumerate(given)))
    assert [text for text, _ in found] == [alone(model, inputs) for inputs in given]


@pytest.mark.medium
def test_prefixes_are_shared_by_content(load_tiny: LoadTiny, start: Start) -> None:
    model = load_tiny("gqa")
    first, other = rows(model), rows(model)
    other[20:] += 0.5
    with start(model, "gqa") as engine:
        cached = []
        for table in (first, first.copy(), other, rows(model, 2)):
            ((text, usage),) = replies(engine, request(Inputs.of(embeddings=table)))
            assert text == alone(model, Inputs.of(embeddings=table))
            assert usage.prompt == N
            cached.append(usage.cached)
    assert cached == [0, N - 1, 20, 0]


@pytest.mark.medium
def test_ids_and_embeddings_share_what_is_equal(load_tiny: LoadTiny, start: Start) -> None:
    model = load_tiny("gqa")
    mixed = Inputs.of([*IDS, 0, 0, *IDS], embeddings=rows(model, n=2), rows=[5, 6])
    with start(model, "gqa") as engine:
        ((_, plain),) = replies(engine, request(Inputs.of([*IDS, 1])))
        ((text, usage),) = replies(engine, request(mixed))
    assert (plain.cached, usage.cached) == (0, len(IDS))
    assert text == alone(model, mixed)


@pytest.mark.medium
def test_requests_over_http(load_tiny: LoadTiny, start: Start) -> None:
    model, file = load_tiny("gqa"), io.BytesIO()
    table = rows(model)
    np.save(file, table)
    body = {"prompt_embeds": base64.b64encode(file.getvalue()).decode(), "max_tokens": 12, "temperature": 0}
    with start(model, "gqa") as engine, served(engine) as server:
        answer = server.send("/v1/completions", body).json
        assert answer["choices"][0]["text"] == alone(model, Inputs.of(embeddings=table))
        assert answer["usage"]["prompt_tokens"] == N
        listed = server.send("/v1/completions", body | {"prompt_embeds": [body["prompt_embeds"]], "prompt": [IDS]}).json
        texts = [choice["text"] for choice in listed["choices"]]
        assert texts == [alone(model, Inputs.of(embeddings=table)), alone(model, IDS)]
        file = io.BytesIO()
        np.save(file, np.zeros((129, table.shape[1]), np.float32))
        long = server.send("/v1/completions", {"prompt_embeds": base64.b64encode(file.getvalue()).decode()})
        assert long.json["error"]["code"] == "context_length_exceeded"


@pytest.mark.medium
def test_texts_of_encoder_decoder_models(load_tiny: LoadTiny, start: Start) -> None:
    model = load_tiny("t5")
    texts = [[*IDS, 77, 30], [*IDS, 77, 31], list(range(20, 70)), [*IDS, 77, 30]]
    expected = [alone(model, ids) for ids in texts]
    assert len({*expected}) == 3
    given = [
        GenerationRequest(id=str(i), model="tiny", prompts=(tuple(ids),), params=SamplingParams(), max_tokens=12)
        for i, ids in enumerate(texts)
    ]
    for settings in ({}, {"step_ms": 0.01}, {"max_running": 1}, {"lookup": True}):
        with start(model, "t5", **settings) as engine:
            found = replies(engine, *given)
            assert [text for text, _ in found] == expected, settings
            ((_, usage),) = replies(engine, given[2])
            assert (usage.prompt, usage.cached) == (51, 50), "the text and the start token, of which the text is cached"


@pytest.mark.medium
def test_encoder_decoder_models_over_http(plugins: Plugins, tmp_path: Path, start: Start) -> None:
    keys = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 2}
    model = load_model(write(tmp_path / "t5.gguf", "t5", tokenizer="spm", metadata=keys), plugins=plugins, threads=1)
    with model, start(model, "t5") as engine, served(engine) as server:
        body = {"prompt": "a b", "max_tokens": 12, "temperature": 0}
        answer = server.send("/v1/completions", body)
        ids = model.encode_prompt("a b")
        assert ids[-1] == model.tokenizer.eos_id
        assert answer.json["choices"][0]["text"] == alone(model, ids) != alone(model, ids[:-1])
        assert server.send("/v1/completions", body | {"prompt": ids}).json["choices"] == answer.json["choices"]
        refused = server.send("/v1/completions", body | {"echo": True, "logprobs": 1})
        assert (refused.status, "prompt_logprobs" in refused.json["error"]["message"]) == (400, True)
        vectors = server.send("/v1/embeddings", {"input": "a"})
        assert (vectors.status, vectors.json["error"]["code"]) == (501, "not_supported")


def test_what_an_encoder_does_not_read_is_refused(load_tiny: LoadTiny) -> None:
    model = load_tiny("t5")
    with pytest.raises(NotSupportedError, match="has an encoder, which reads text: it takes no embeddings"):
        with_encoder_inputs(request(Inputs.of(embeddings=rows(model))), model)
    long = GenerationRequest(id="x", model="tiny", prompts=((1,) * 513,))
    with pytest.raises(InvalidRequestError, match="the encoder takes at most 512 tokens at once, not 513"):
        with_encoder_inputs(long, model)
    with pytest.raises(NotSupportedError, match="its encoder is a model of its own"):
        check_request(
            EmbeddingRequest(id="x", model="tiny", prompts=((1,),)), model, n_ctx=64, max_running=1, embeds=True
        )


def check(model: Model, one: GenerationRequest) -> None:
    check_request(one, model, n_ctx=64, max_running=4, embeds=False)


def test_what_a_model_cannot_evaluate_is_refused(load_tiny: LoadTiny) -> None:
    model = load_tiny("qwen2vl")
    table = rows(model)
    check(model, request(Inputs.of(embeddings=table)))
    with pytest.raises(InvalidRequestError, match=r"embeddings have rows of 7 numbers, and the model has"):
        check(model, request(Inputs.of(embeddings=np.zeros((3, 7)))))
    with pytest.raises(PromptTooLongError):
        check(model, request(Inputs.of(embeddings=rows(model, n=64))))
    with pytest.raises(InvalidRequestError, match="token -5 is not allowed"):
        check(model, attrs.evolve(request(Inputs.of(embeddings=table)), prompts=((1, -5),)))
    with pytest.raises(InvalidRequestError, match="token 99999 is not an id"):
        check(model, request(Inputs.of([99999, 0], embeddings=table[:1], rows=[1])))
    with pytest.raises(InvalidRequestError, match="prompt_logprobs of embeddings"):
        check(model, request(Inputs.of(embeddings=table), prompt_logprobs=1))
    for inputs in (
        Inputs.of(embeddings=table, spans=[(0, 4)]), Inputs.of(embeddings=table, positions=np.arange(N) + 3)
    ):  # fmt: skip
        check(model, request(inputs))


def test_replicas_get_the_contents(load_tiny: LoadTiny) -> None:
    model = load_tiny("gqa")
    one = request(Inputs.of(embeddings=rows(model, n=2 * BLOCK)))
    sent = pickle.loads(pickle.dumps(portable(one)))
    (keys,) = sent.prompts
    assert sent.prompts == one.prompts
    assert route_of(sent, "i/1").hashes == chain_hashes(list(keys))
    assert len(route_of(sent, "i/1").hashes) == 2
    read, expected = (some.contents.slice(list(keys)).embeddings for some in (sent, one))
    np.testing.assert_array_equal(read, expected)
    assert chain_hashes([keys[0] & 0xFFFFFFFF, *keys[1:]]) != chain_hashes(list(keys)), "all bits of a key count"
