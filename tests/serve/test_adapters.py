"""LoRA adapters of requests to the scheduler and the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters import write_adapter
from conftest import TinyGguf
from llamacli import InvalidRequestError, Model, SamplingParams, load_model
from llamacli.engine import compiled_model, default_engine
from llamacli.engine.adapters import Adapter
from llamacli.plugins import Plugins
from llamacli.serve.engine import LocalEngine
from llamacli.serve.models import ModelSource
from llamacli.serve.requests import AdapterInfo, Done, GenerationRequest, TextDelta
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings
from sessions import LONG

SCALES: list[tuple[tuple[int, float], ...]] = [(), ((0, 1.0),), ((0, 0.5),), ((0, 1.0), (1, -0.5)), ((0, 0.0),)]


@pytest.fixture(scope="module")
def model(tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[Model]:
    with load_model(tiny_gguf(), "fp32", plugins=plugins, engine=default_engine()) as model:
        yield model


@pytest.fixture(scope="module")
def files(tiny_gguf: TinyGguf, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"{seed}.gguf", tiny_gguf(), seed=seed) for seed in "ab"]


@pytest.fixture(scope="module")
def adapters(model: Model, files: list[Path]) -> list[Adapter]:
    return [model.load_adapter(file) for file in files]


def request(name: str, scales: tuple[tuple[int, float], ...], n_prompt: int = 40) -> GenerationRequest:
    return GenerationRequest(
        id=name, model="m", prompts=(tuple(LONG[:n_prompt]),), params=SamplingParams(n_probs=1), max_tokens=12,
        ignore_eos=True, adapters=scales,
    )  # fmt: skip


def run(
    model: Model,
    adapters: list[Adapter],
    wanted: list[GenerationRequest],
    preempted: set[str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Ids and log-probabilities of each request's tokens; its cached tokens.

    Names of preempted requests are added to `preempted`.
    """
    scheduler = Scheduler(model, EngineSettings(n_ctx=96, **settings), adapters=adapters)
    found: dict[str, Any] = {one.id: [] for one in wanted}
    for one in wanted:
        scheduler.submit(one)
    while scheduler.busy:
        for state, event in scheduler.step():
            if isinstance(event, TextDelta):
                found[state.message.id] += [(token.id, token.logprob) for token in event.tokens]
            elif isinstance(event, Done):
                found[f"{state.message.id} cached"] = event.usage.cached
                if preempted is not None and state.n_preempted:
                    preempted.add(state.message.id)
    scheduler.close()
    return found


def test_requests_with_different_adapters_are_as_alone(model: Model, adapters: list[Adapter]) -> None:
    wanted = [request(f"{i}-{copy}", scales, 40 - copy) for copy in range(2) for i, scales in enumerate(SCALES)]
    together = run(model, adapters, wanted, max_running=16)
    for one in wanted:
        assert together[one.id] == run(model, adapters, [one])[one.id]
    texts = {i: together[f"{i}-0"] for i in range(len(SCALES))}
    assert texts[0] == texts[4]
    assert all(texts[i] != texts[j] for i in range(4) for j in range(i))


def test_no_step_compiles_for_a_scale(model: Model, adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [request(str(i), ((0, 0.5 + i / 100), (1, -0.25))[: 1 + i % 2], 8) for i in range(20)]
    expected = run(model, adapters, wanted)
    monkeypatch.setattr(compiled_model, "adapted_program", lambda *_: pytest.fail("a step compiles a program"))
    assert run(model, adapters, wanted, max_running=32) == expected
    assert len({repr(expected[one.id]) for one in wanted}) == len(wanted)


def test_prefixes_are_cached_by_adapters(model: Model, adapters: list[Adapter]) -> None:
    wanted = [request("one", SCALES[1]), request("other", SCALES[2]), request("again", SCALES[1])]
    found = run(model, adapters, wanted, max_running=1, kv_memory=4 * model.kv_pool().layout.n_bytes(96))
    assert [found[f"{one.id} cached"] > 0 for one in wanted] == [False, False, True]
    assert found["one"] == found["again"]


def test_preemption_keeps_the_adapters(
    model: Model, tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 adapters, each of one text, with memory for a few."""
    many = [model.load_adapter(write_adapter(tmp_path / f"{i}.gguf", tiny_gguf(), seed=str(i))) for i in range(32)]
    wanted = [request(str(i), ((i, 1.0 - i % 2 / 2),), 10) for i in range(32)]
    expected, preempted = run(model, many, wanted, max_running=1), set[str]()
    monkeypatch.setattr("llamacli.serve.running.GROWTH", 0)  # texts grow into memory that others have
    found = run(model, many, wanted, preempted, max_running=32, kv_memory=model.kv_pool().layout.n_bytes(96))
    assert {one.id: found[one.id] for one in wanted} == {one.id: expected[one.id] for one in wanted}
    assert len({repr(found[one.id]) for one in wanted}) == len(wanted)
    assert preempted


@pytest.mark.parametrize("scales", [((2, 1.0),), ((-1, 1.0),), ((0, float("nan")),), ((0, "1"),)])
def test_unknown_adapters_and_wrong_scales_are_refused(scales: Any, model: Model, adapters: list[Adapter]) -> None:
    with pytest.raises(InvalidRequestError, match="LoRA adapter"):
        Scheduler(model, EngineSettings(n_ctx=96), adapters=adapters).submit(request("a", scales))


def test_the_engine_loads_adapters_and_sets_their_scales(tiny_gguf: TinyGguf, files: list[Path]) -> None:
    source = ModelSource("m", tiny_gguf(), adapters=((files[0], 0.5), (files[1], 0.0)))

    async def main() -> None:
        engine = LocalEngine([source], EngineSettings(n_ctx=96, mode="fp32"))
        try:
            (await engine.pin("m")).release()
            (info,) = engine.models()
            assert info.adapters == (AdapterInfo(0, str(files[0]), 0.5), AdapterInfo(1, str(files[1]), 0.0))
            events = [event async for event in engine.submit(request("a", info.adapter_scales))]
            assert isinstance(events[-1], Done)
            engine.set_adapters("m", ((1, 2.0),))
            assert engine.models()[0].adapter_scales == ((0, 0.0), (1, 2.0))
            with pytest.raises(InvalidRequestError, match="LoRA adapter 2 is not allowed: the model has 2 adapters"):
                engine.set_adapters("m", ((2, 1.0),))
        finally:
            engine.close()

    asyncio.run(main())
