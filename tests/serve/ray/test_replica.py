"""Replica without a cluster: its calls, reports and refusals."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest

from adapters import write_adapter
from conftest import TinyGguf
from llamacli import Model, load_model
from llamacli.chat.context import plan
from llamacli.chat.media import marked, media_inputs, prompt_of_pictures, with_pictures
from llamacli.chat.template import Rendering
from llamacli.hub.demo import demo_path
from llamacli.inputs import Contents, Inputs
from llamacli.media.encoder import Medium
from llamacli.media.pictures import Picture
from llamacli.media.sound import Sound
from llamacli.sampling import SamplingParams
from llamacli.serve.compilers import Compilers
from llamacli.serve.errors import BadRequestError, InternalError, PromptTooLongError
from llamacli.serve.http.local import version
from llamacli.serve.ray import replica as module
from llamacli.serve.ray.blocks import BLOCK, chain_hashes
from llamacli.serve.ray.errors import MismatchError
from llamacli.serve.ray.messages import Hello, Route, Setup, route_of
from llamacli.serve.ray.replica import Replica, expect_version, file_digest
from llamacli.serve.ray.tokenizing import load_unweighted
from llamacli.serve.requests import Done, Event, Failed, GenerationRequest, TextDelta
from llamacli.serve.settings import EngineSettings
from llamacli.testing.tiny_media import drawn, tone
from media_cases import write_mmproj, write_text
from sessions import LONG
from sound_cases import write_hearing


def setup_of(identity: str) -> Setup:
    settings = attrs.asdict(EngineSettings(n_ctx=256, max_running=2, threads=1))
    return Setup(identity, str(demo_path()), "demo", settings, 0.5, (1, 1), 30.0)


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with load_model(demo_path()) as model:
        made = Replica(setup_of(model.identity), "r1")
    yield made
    made.close()


def request(n_prompt: int = 5, **fields: object) -> GenerationRequest:
    given = {"id": "x", "model": "demo", "prompts": (tuple(range(300, 300 + n_prompt)),), "max_tokens": 4}
    return GenerationRequest(**{**given, **fields})


async def answers(replica: Replica, one: GenerationRequest, call: str = "i/1/0") -> list[Hello | list[Event]]:
    return [answer async for answer in replica.generate(one, route_of(one, call))]


def events(found: list[Hello | list[Event]]) -> list[Event]:
    return [event for answer in found if isinstance(answer, list) for event in answer]


def test_a_call_begins_with_the_name_and_ends_with_its_last_event(replica: Replica) -> None:
    found = asyncio.run(answers(replica, request()))
    assert found[0] == Hello("r1")
    assert isinstance(events(found)[-1], Done)


def test_prompts_of_embeddings(replica: Replica) -> None:
    with load_model(demo_path()) as model:
        inputs = Inputs.of(embeddings=np.random.default_rng(1).normal(0, 0.3, (9, model.config.n_embd)))
        text = model.create_completion(inputs, max_tokens=8, temperature=0.0)["choices"][0]["text"]
    contents = Contents()
    one = request(prompts=(tuple(contents.add(inputs)),), contents=contents, max_tokens=8)
    found = events(asyncio.run(answers(replica, pickle.loads(pickle.dumps(one)))))
    assert "".join(event.text for event in found if isinstance(event, TextDelta)) == text


@pytest.mark.parametrize("medium", [Picture.of(drawn(40, 30)), Sound.of(tone())], ids=["picture", "sound"])
def test_media(medium: Medium, tmp_path: Path) -> None:
    """Replicas encode the tiles that come with a request."""
    if isinstance(medium, Picture):
        text = write_text(tmp_path / "text.gguf", "gemma3")
        mmproj = write_mmproj(tmp_path / "mmproj-text.gguf", "gemma3")
    else:
        text, mmproj = write_hearing(tmp_path, "qwen3a"), tmp_path / "mmproj-text.gguf"
    messages, shown = marked([{"role": "user", "content": [medium, "What?"]}])

    def rendered(model: Model) -> Rendering:
        encoder = model.media_encoder()
        layouts = {marker: encoder.layout(one) for marker, one in shown.items()}
        return with_pictures(model.create_chat_codec().render(messages), layouts, encoder, model.tokenizer)

    with load_model(text, "fp32", mmproj=mmproj, threads=1) as model:
        parts = plan([], rendered(model).parts, model.create_chat_codec().template.encode).parts
        inputs = media_inputs(parts, 0, model.media_encoder)
        expected = model.create_completion(inputs, max_tokens=6, temperature=0.0)["choices"][0]["text"]
    with load_unweighted(text, "fp32", mmproj=mmproj) as ingress:
        encode = ingress.create_chat_codec().template.encode
        ids, contents, tiles = prompt_of_pictures(rendered(ingress).parts, encode, ingress.media_encoder())
        identity = ingress.identity
    settings = attrs.asdict(EngineSettings(n_ctx=256, max_running=2, threads=1, mode="fp32"))
    setup = Setup(identity, str(text), "see", settings, 0.5, (1, 1), 30.0, mmproj=(str(mmproj), file_digest(mmproj)))
    replica = Replica(setup, "r1")
    try:
        params = SamplingParams(temperature=0.0)
        one = request(model="see", prompts=(tuple(ids),), contents=contents, tiles=tiles, max_tokens=6, params=params)
        found = events(asyncio.run(answers(replica, pickle.loads(pickle.dumps(one)))))
        assert "".join(event.text for event in found if isinstance(event, TextDelta)) == expected
        info = asyncio.run(replica.describe(Route()))[0]
        assert (info.sees, info.hears) == (isinstance(medium, Picture), isinstance(medium, Sound))
    finally:
        replica.close()
    with pytest.raises(MismatchError, match=r"mmproj-text\.gguf: this node has another encoder than the ingress"):
        Replica(attrs.evolve(setup, mmproj=(str(mmproj), "0" * 64)), "r2")


def test_errors_of_the_request_are_events(replica: Replica) -> None:
    (failed,) = events(asyncio.run(answers(replica, request(300))))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, PromptTooLongError)


def test_grammars_are_compiled_here(replica: Replica) -> None:
    params = SamplingParams(grammar='root ::= "yes"')
    found = events(asyncio.run(answers(replica, request(params=params))))
    assert "".join(event.text for event in found if isinstance(event, TextDelta)) == "yes"


def test_slow_grammars_are_refused(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chain", lambda *_: time.sleep(0.3))
    monkeypatch.setattr(replica, "_compilers", Compilers(0.02))
    (failed,) = events(asyncio.run(answers(replica, request(params=SamplingParams(grammar='root ::= "yes"')))))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BadRequestError)
    assert "longer than 0.02 seconds" in str(failed.error)


def test_reports_have_the_cached_blocks_and_the_calls(replica: Replica) -> None:
    one = request(2 * BLOCK)
    asyncio.run(answers(replica, one, "i/7/0"))
    report = replica.report()
    assert set(chain_hashes(one.prompts[0])) <= report.load.blocks
    assert "i/7/0" in report.received
    assert (report.status, report.load.running, report.load.slots) == ("ok", 0, 2)
    assert report.load.row_s
    assert report.stats.generation_tokens > 0


def test_calls_that_their_ingress_has_no_more_end(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)

    async def run() -> None:
        endless = request(max_tokens=None, ignore_eos=True, params=SamplingParams(temperature=1.0), n=2)
        answers = replica.generate(endless, route_of(endless, "lost/1/0"))
        await anext(answers)
        await anext(answers)
        await replica.beat("other", [], Route())
        await replica.beat("lost", ["lost/1/0"], Route())
        assert replica._open.keys() == {"lost/1/0"}
        await asyncio.sleep(0.05)
        await replica.beat("lost", [], Route())
        rest = events([answer async for answer in answers])
        assert not any(isinstance(event, Done) for event in rest)
        assert not replica._open

    asyncio.run(run())


def test_calls_end_when_nothing_is_heard_of_their_ingress(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(module, "SILENCE_S", 0.05)

    async def run() -> None:
        replica._watch = None
        blocked = request(max_tokens=None, ignore_eos=True, n=2)
        replica._engine._wake.acquire()  # the engine makes no step, as one of a slow machine
        try:
            stream = replica.generate(blocked, route_of(blocked, "silent/1/0"))
            assert await anext(stream) == Hello("r1")
            async with asyncio.timeout(60):
                while [answer async for answer in stream if not answer]:
                    pass
        finally:
            replica._engine._wake.release()
        assert not replica._open
        assert replica._watch is not None
        replica._watch.cancel()

    asyncio.run(run())


def test_a_replica_drafts_with_the_head_of_its_model(tiny_gguf: TinyGguf) -> None:
    file = tiny_gguf("glm4moe_nextn", n_layer=2)
    with load_model(file) as model:
        setup = attrs.evolve(setup_of(model.identity), path=str(file), mtp=True)
    one = Replica(setup, "r3")
    source = one._loaded.scheduler._drafts._source
    assert source is not None
    assert source.reads_prompts
    assert isinstance(events(asyncio.run(answers(one, request(prompts=((5, 6, 7),)))))[-1], Done)
    one.close()


def test_another_model_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"demo\.gguf: this node has another file"):
        Replica(setup_of("other"), "r2")


def test_adapters_are_applied_and_kept_apart(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    path = tiny_gguf()
    file = write_adapter(tmp_path / "adapter.gguf", path, seed="a")
    with load_model(path) as model:
        setup = attrs.evolve(setup_of(model.identity), path=str(path), adapters=((str(file), file_digest(file)),))
    adapted = Replica(setup, "r3")
    try:
        plain, scaled = (
            request(BLOCK + 1, prompts=(tuple(LONG[: BLOCK + 1]),), ignore_eos=True, adapters=adapters)
            for adapters in ((), ((0, 1.0),))
        )
        first, second = (events(asyncio.run(answers(adapted, one))) for one in (plain, scaled))
        assert isinstance(second[-1], Done)
        assert second[-1].usage.cached == 0
        assert [event for event in first if isinstance(event, TextDelta)] != [
            event for event in second if isinstance(event, TextDelta)
        ]
        blocks = adapted.report().load.blocks
        assert {*route_of(plain, "i/1").hashes, *route_of(scaled, "i/2").hashes} <= blocks
    finally:
        adapted.close()


def test_another_adapter_is_refused(replica: Replica, tmp_path: Path) -> None:
    file = tmp_path / "adapter.gguf"
    file.write_bytes(b"one")
    digest = file_digest(file)
    file.write_bytes(b"another")
    identity = replica._setup.identity
    with pytest.raises(MismatchError, match=r"adapter\.gguf: this node has another adapter"):
        Replica(attrs.evolve(setup_of(identity), adapters=((str(file), digest),)), "r2")


def test_another_version_is_refused() -> None:
    expect_version(version())
    with pytest.raises(MismatchError, match=r"this node has llamacli .*, the ingress 9\.9"):
        expect_version("9.9")


def test_a_stuck_engine_is_reported_as_ill(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(replica.check_health())
    monkeypatch.setattr(replica._engine, "_is_stuck", lambda: True)
    with pytest.raises(InternalError, match="does not advance"):
        asyncio.run(replica.check_health())
