"""Engine thread with the demo model: determinism under load, ends, several models."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import llamacli
from llamacli import Model, load_model
from llamacli.engine.packed_copies import folder
from llamacli.errors import InvalidRequestError, ModelFormatError
from llamacli.sampling import SamplingParams
from llamacli.serve import planning, running
from llamacli.serve.engine import LocalEngine
from llamacli.serve.errors import (
    BadRequestError,
    InternalError,
    LoadingError,
    QueueFullError,
    ShuttingDownError,
    UnknownModelError,
)
from llamacli.serve.models import ModelSource
from llamacli.serve.requests import (
    Admitted,
    Done,
    Embedding,
    EmbeddingRequest,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Preset,
    TextDelta,
)
from llamacli.serve.sequences import SequenceState
from llamacli.serve.settings import EngineSettings
from llamacli.tools.embedding import load_embedder

DEMO = Path(llamacli.__file__).parent / "data" / "demo.gguf"
PROMPTS = (
    "Once upon a time",
    "The fox",
    "One day a small bear went to the",
    "Once upon a time there was a cat",
    "Wind",
)


@pytest.fixture(scope="module")
def demo() -> Iterator[Model]:
    with load_model(DEMO, threads=1) as model:
        yield model


class Shared:
    """Loader of models that share one program."""

    def __init__(self, model: Model):
        self.model = model
        self.paths: list[str] = []
        self.closed: list[str] = []

    def __call__(self, path: Path, mode: str, **options: Any) -> Model:
        self.paths.append(path.name)
        one = self.model
        model = Model(one.config, one.tokenizer, one.metadata, one.program, one.mode, identity=one.identity)
        close = model.close

        def closed() -> None:
            self.closed.append(path.name)
            close()

        model.close = closed  # type: ignore[method-assign]
        return model


def run(
    demo: Model,
    use: Callable[[LocalEngine], Awaitable[Any]],
    sources: tuple[ModelSource, ...] = (ModelSource("demo", DEMO),),
    load: Any = None,
    **settings: Any,
) -> Any:
    """Run a coroutine with an engine that has loaded the demo model."""

    async def main() -> Any:
        engine = LocalEngine(sources, EngineSettings(**{"threads": 1, **settings}), load or Shared(demo))
        try:
            if load is None:
                await loaded(engine, sources[0].name)
            return await asyncio.wait_for(use(engine), 120)
        finally:
            engine.close()

    return asyncio.run(main())


async def loaded(engine: LocalEngine, name: str) -> None:
    """Load a model, and keep no pin of it."""
    (await engine.pin(name)).release()


def request(demo: Model, name: str, text: str = PROMPTS[0], **fields: Any) -> GenerationRequest:
    given = {"params": SamplingParams(temperature=0.9, top_p=0.95), "max_tokens": 24, "seed": 1, "model": "demo"}
    return GenerationRequest(id=name, prompts=(tuple(demo.tokenizer.encode_prompt(text)),), **{**given, **fields})


async def events_of(engine: LocalEngine, wanted: Any) -> list[Event]:
    return [event async for event in engine.submit(wanted)]


def result(events: list[Event]) -> tuple[Any, ...]:
    """Parts of a reply that must not depend on the load."""
    texts: dict[int, str] = {}
    tokens: dict[int, tuple[Any, ...]] = {}
    for event in events:
        if isinstance(event, TextDelta):
            texts[event.index] = texts.get(event.index, "") + event.text
            tokens[event.index] = tokens.get(event.index, ()) + event.tokens
    ends = sorted(repr(event) for event in events if isinstance(event, Finished))
    assert isinstance(events[0], Admitted)
    assert isinstance(events[-1], Done)
    return texts, tokens, ends, events[-1].usage.generated


def mixed(model: Model) -> list[GenerationRequest]:
    """Requests with samplers of all kinds, lengths and shared beginnings."""
    schema = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}'
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.9, top_p=0.95, n_probs=2),
        SamplingParams(temperature=1.1, repeat_penalty=1.2, min_p=0.05),
        SamplingParams(temperature=0.8, json_schema=schema),
        SamplingParams(temperature=1.0, mirostat=2),
    ]
    stories = [model.tokenizer.encode_prompt(text) for text in PROMPTS]
    long = (stories[0] + stories[2] * 12)[:150]
    prompts = [*stories, long, [*long, *stories[4]], long[:70]]
    return [
        GenerationRequest(
            id=str(i),
            model="demo",
            prompts=(tuple(prompts[i % len(prompts)]),),
            params=params[i % len(params)],
            seed=i % 3,
            n=1 + (i % 4 == 1),
            max_tokens=(8, 40, 60)[i % 3],
            ignore_eos=i % 5 != 3,
            stop=((), ("the ", "\n"))[i % 2],
            key="ab"[i % 2],
        )
        for i in range(20)
    ]


@pytest.mark.medium
def test_replies_are_the_same_alone_and_under_any_load(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(running, "GROWTH", 0)  # admits more texts than there are pages for, so that some give way
    requests = mixed(demo)

    async def one_by_one(engine: LocalEngine) -> list[Any]:
        return [result(await events_of(engine, one)) for one in requests]

    async def together(engine: LocalEngine) -> list[Any]:
        found = await asyncio.gather(*(events_of(engine, one) for one in requests))
        stats = engine.stats().models["demo"]
        return [*map(result, found), stats]

    expected = run(demo, one_by_one, max_running=2)
    plan = planning.Planner.plan

    def preempting(self: planning.Planner) -> list[tuple[SequenceState, int]]:
        """Plan a step, and every fifth time preempt the latest sequence first."""
        if self.n_steps % 5 == 4 and len(self.running.sequences) > 1:
            self.running.preempt(self.running.sequences[-1])
        return plan(self)

    page = demo.kv_pool().layout.n_bytes(16)
    loads: list[dict[str, Any]] = [
        {"step_ms": 0, "max_running": 16},
        {"step_ms": 0.5, "max_running": 8},
        {"step_ms": 0, "max_running": 2, "lookup": True},
        {"step_ms": 20, "max_running": 12, "n_ctx": 224, "kv_memory": 14 * page, "lookup": True},
        {"step_ms": 40, "max_running": 2, "extra_running": 30},
        {"step_ms": 20, "max_running": 12},
    ]
    n_drafted = 0
    for load in loads:
        if load is loads[-1]:
            monkeypatch.setattr(planning.Planner, "plan", preempting)
        *found, stats = run(demo, together, max_queue=100, **load)
        assert found == expected, load
        n_drafted += stats.draft_tokens
        assert stats.running == stats.waiting == 0
        assert sum(stats.finished.values()) == sum(one.n for one in requests)
    assert stats.preemptions > 0
    assert stats.prefix_tokens["true"] > 0
    assert n_drafted > 0


def test_text_equals_that_of_a_session(demo: Model) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95)
    with demo.create_session(seed=5) as session:
        prompt = demo.tokenizer.encode_prompt(PROMPTS[1])
        expected = "".join(token.piece for token in session.generate(prompt, params, max_tokens=40))

    async def use(engine: LocalEngine) -> str:
        wanted = request(demo, "a", PROMPTS[1], params=params, max_tokens=40, seed=5)
        return result(await events_of(engine, wanted))[0][0]

    assert run(demo, use) == expected


def test_embeddings_equal_those_of_a_model_loaded_for_them(demo: Model) -> None:
    prompts = tuple(tuple(demo.tokenizer.encode_prompt(text)) for text in PROMPTS)
    with load_embedder(DEMO, threads=1) as embedder:
        expected = [embedder.embed(prompt).tolist() for prompt in prompts]

    async def use(engine: LocalEngine) -> list[Any]:
        text = asyncio.create_task(events_of(engine, request(demo, "text")))
        events = await events_of(engine, EmbeddingRequest(id="a", model="demo", prompts=prompts))
        await text
        found = {event.prompt: event.vector.tolist() for event in events if isinstance(event, Embedding)}
        return [found[i] for i in range(len(prompts))]

    assert run(demo, use, step_ms=0.5) == expected


def test_cancelled_requests_leave_at_once_and_others_go_on(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        kept = asyncio.create_task(events_of(engine, request(demo, "kept", max_tokens=100)))
        streams = [engine.submit(request(demo, f"cancelled {i}", seed=i, max_tokens=400)) for i in range(10)]
        for i, stream in enumerate(streams):
            if i % 2:
                async for event in stream:
                    if isinstance(event, TextDelta):
                        break
            stream.cancel()
            assert [event async for event in stream] == []
        await kept
        while engine.stats().models["demo"].running:
            await asyncio.sleep(0.005)
        assert sum(engine.stats().models["demo"].cancelled.values()) == 10

    run(demo, use, max_running=4)


@pytest.mark.parametrize("n", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_disconnects_lose_no_reply_mix_up_none_and_leave_no_page(n: int, demo: Model) -> None:
    """Each reply carries its own number, which its grammar demands."""
    pytest.importorskip("llguidance")
    random = np.random.default_rng(n)

    async def client(engine: LocalEngine, i: int, delay: float | None) -> str | None:
        """Text of a request, None if it was cancelled after a delay."""
        params = SamplingParams(temperature=1.0, grammar=f'root ::= "number {i} of many" [a-z ]+')
        wanted = request(demo, str(i), PROMPTS[i % 5] * (1 + i % 7), params=params, seed=i, key=str(i % 3))
        while True:
            try:
                stream = engine.submit(wanted)
                break
            except QueueFullError:
                await asyncio.sleep(0.01)
        text = ""

        async def read() -> None:
            nonlocal text
            async for event in stream:
                assert not isinstance(event, Failed), event
                text += event.text if isinstance(event, TextDelta) else ""

        try:
            await asyncio.wait_for(read(), delay)
        except TimeoutError:
            stream.cancel()
            return None
        return text

    async def use(engine: LocalEngine) -> None:
        delays = [float(random.uniform(0, 0.2)) if random.random() < 0.4 else None for _ in range(n)]
        texts = []
        for start in range(0, n, 50):
            batch = range(start, min(n, start + 50))
            texts += await asyncio.gather(*(client(engine, i, delays[i]) for i in batch))
        for i, (text, delay) in enumerate(zip(texts, delays, strict=True)):
            assert text is not None or delay is not None
            assert text is None or text.startswith(f"number {i} of many")
        while engine.stats().models["demo"].running:
            await asyncio.sleep(0.005)
        stats = engine.stats().models["demo"]
        n_cancelled, n_finished = sum(stats.cancelled.values()), sum(stats.finished.values())
        assert n_cancelled + n_finished == n
        assert 0 < n_cancelled <= sum(text is None for text in texts)
        loaded: Any = engine._entries["demo"].loaded
        loaded.scheduler.memory.prefixes.clear()
        assert loaded.scheduler.memory.pool.n_used_bytes == 0

    run(demo, use, max_running=8, max_queue=30)


def test_unknown_models_and_names(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        with pytest.raises(UnknownModelError, match="'nothing' does not exist: the server has demo"):
            engine.submit(request(demo, "a", model="nothing"))
        with pytest.raises(UnknownModelError):
            await loaded(engine, "nothing")
        assert result(await events_of(engine, request(demo, "a", model="other name")))
        (info,) = engine.models()
        assert (info.name, info.aliases, info.loaded, info.embeds) == ("demo", ("other name",), True, True)
        assert info.n_params == 2_755_008
        assert info.fingerprint.startswith("llamacli-")

    run(demo, use, (ModelSource("demo", DEMO, ("other name",)),))


def test_grammars_that_exceed_limits_later_are_client_errors(demo: Model) -> None:
    pytest.importorskip("llguidance")
    names = [f"r{i}" for i in range(3000)]
    rules = "\n".join(f'{name}: "a" "{name}"' for name in names)
    params = SamplingParams(grammar=f'%llguidance {{}}\nstart: "a" ({" | ".join(names)})\n{rules}')

    async def use(engine: LocalEngine) -> None:
        failed = (await events_of(engine, request(demo, "a", max_tokens=5, params=params)))[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, BadRequestError)
        assert (failed.error.code, "has 3001 items" in str(failed.error)) == ("invalid_schema", True)

    run(demo, use)


def test_drain_ends_what_runs_and_refuses_the_rest(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        running = asyncio.create_task(events_of(engine, request(demo, "running", max_tokens=30)))
        waiting = asyncio.create_task(events_of(engine, request(demo, "waiting", seed=2)))
        while not engine.stats().models["demo"].running:
            await asyncio.sleep(0.001)
        await engine.drain(20)
        assert result(await running)
        (failed,) = await waiting
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, ShuttingDownError)
        assert engine.stats().status == "draining"
        with pytest.raises(ShuttingDownError):
            engine.submit(request(demo, "late"))

    run(demo, use, max_running=1)


def test_drain_without_time_ends_running_texts_with_an_error(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        stream = engine.submit(request(demo, "running", max_tokens=480, ignore_eos=True))
        events = []
        async for event in stream:
            events.append(event)
            if len(events) == 2:
                await engine.drain(0)
        assert isinstance(events[-1], Failed)
        assert isinstance(events[-1].error, ShuttingDownError)

    run(demo, use)


def test_close_fails_what_is_left(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        task = asyncio.create_task(events_of(engine, request(demo, "a", max_tokens=480, ignore_eos=True)))
        await asyncio.sleep(0.01)
        engine.close()
        assert isinstance((await task)[-1], Failed)
        with pytest.raises(ShuttingDownError):
            engine.submit(request(demo, "late"))

    run(demo, use)
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("llamacli-engine", "llamacli-watchdog", "llamacli-load"))}


def test_reader_that_does_not_read_delays_nobody(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        slow = engine.submit(request(demo, "slow", max_tokens=60, ignore_eos=True))
        await events_of(engine, request(demo, "fast", max_tokens=100, ignore_eos=True))
        while engine.stats().models["demo"].running:
            await asyncio.sleep(0.005)
        events = [event async for event in slow]
        assert [type(event) for event in events] == [Admitted, TextDelta, Finished, Done]

    run(demo, use)


# --- several models


def two(names: str = "ab") -> tuple[ModelSource, ...]:
    return tuple(ModelSource(name, DEMO.with_name(name)) for name in names)


@pytest.fixture(autouse=True)
def no_file_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of these tests have no files of their own."""
    monkeypatch.setattr("llamacli.serve.models._n_params", lambda source: 2_755_008)


def test_models_take_turns_and_their_replies_stay_their_own(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        for name in "ab":
            await loaded(engine, name)
        wanted = [request(demo, f"{i}", seed=i, model="ab"[i % 2], max_tokens=40) for i in range(8)]
        found = await asyncio.gather(*(events_of(engine, one) for one in wanted))
        alone = [await events_of(engine, one) for one in wanted]
        assert list(map(result, found)) == list(map(result, alone))
        steps = [sum(engine.stats().models[name].histograms["step_rows"].counts) for name in "ab"]
        assert min(steps) > 0

    run(demo, use, two(), models_max=2)


def test_least_recently_used_model_gives_way_when_idle(demo: Model) -> None:
    shared = Shared(demo)

    async def use(engine: LocalEngine) -> None:
        for name in "abac":
            await loaded(engine, name)
        assert shared.paths == ["a", "b", "c"]
        assert shared.closed == ["b"]
        assert [info.loaded for info in engine.models()] == [True, False, True]
        with pytest.raises(LoadingError) as error:
            engine.submit(request(demo, "late", model="b"))
        assert error.value.retry_after
        await loaded(engine, "b")
        assert result(await events_of(engine, request(demo, "later", model="b")))

    run(demo, use, two("abc"), shared, models_max=2)


def test_busy_models_are_not_unloaded(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        stream = engine.submit(request(demo, "a", model="a", max_tokens=480, ignore_eos=True))
        with pytest.raises(LoadingError, match="in use"):
            await loaded(engine, "b")
        stream.cancel()
        while not engine.models()[1].loaded:
            try:
                await loaded(engine, "b")
            except LoadingError:
                await asyncio.sleep(0.005)

    run(demo, use, two(), models_max=1)


def test_pinned_models_are_not_unloaded(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        pin = await engine.pin("a")
        with pytest.raises(LoadingError, match="in use"):
            await engine.pin("b")
        engine.unload("a")
        await asyncio.sleep(0.1)  # twice as long as a model without requests stays
        assert [info.loaded for info in engine.models()] == [True, False]
        assert result(await events_of(engine, request(demo, "a", model="a")))
        pin.release()
        pin.release()
        await loaded(engine, "b")
        assert [entry.n_pins for entry in engine._entries.values()] == [0, 0]

    run(demo, use, two(), models_max=1, idle_unload=0.05)


def test_pins_of_failed_and_cancelled_loads_are_released(demo: Model) -> None:
    gate, shared = threading.Event(), Shared(demo)

    def load(path: Path, mode: str, **options: Any) -> Model:
        gate.wait(30)
        return shared(path, mode)

    async def use(engine: LocalEngine) -> None:
        waiting = asyncio.create_task(engine.pin("a"))
        await asyncio.sleep(0.01)
        assert engine._entries["a"].n_pins == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert engine._entries["a"].n_pins == 0
        gate.set()
        await loaded(engine, "a")

    run(demo, use, two("a"), load)


def test_idle_models_are_unloaded(demo: Model) -> None:
    shared = Shared(demo)

    async def use(engine: LocalEngine) -> None:
        await loaded(engine, "a")
        while engine.models()[0].loaded:
            await asyncio.sleep(0.01)
        assert shared.closed == ["a"]

    run(demo, use, two("a"), shared, idle_unload=0.05)


def test_counters_outlive_an_unloaded_model(demo: Model) -> None:
    async def use(engine: LocalEngine) -> None:
        for n in (1, 2):
            await loaded(engine, "a")
            assert [event async for event in engine.submit(request(demo, str(n), model="a", max_tokens=3))]
            while engine.models()[0].loaded:
                await asyncio.sleep(0.01)
            stats = engine.stats().models["a"]
            assert (stats.generation_tokens, stats.running, stats.finished) == (3 * n, 0, {"length": n})
            assert "b" not in engine.stats().models

    run(demo, use, two(), Shared(demo), idle_unload=0.05)


def test_slow_load_is_told_and_goes_on(demo: Model) -> None:
    gate = threading.Event()
    shared = Shared(demo)

    def load(path: Path, mode: str, **options: Any) -> Model:
        gate.wait(30)
        return shared(path, mode)

    async def use(engine: LocalEngine) -> None:
        with pytest.raises(LoadingError, match="'a' is being loaded"):
            await loaded(engine, "a")
        assert engine.stats().status == "loading"
        with pytest.raises(LoadingError):
            engine.submit(request(demo, "early", model="a"))
        gate.set()
        while not engine.models()[0].loaded:
            await asyncio.sleep(0.005)
        assert engine.stats().status == "ok"
        assert shared.paths == ["a"]

    run(demo, use, two("a"), load, load_timeout=0.02)


def test_failed_load_is_an_error_and_is_tried_again(demo: Model, caplog: pytest.LogCaptureFixture) -> None:
    shared, broken = Shared(demo), [True]

    def load(path: Path, mode: str, **options: Any) -> Model:
        if broken.pop():
            raise ModelFormatError("/secret/folder/why.gguf is broken")
        return shared(path, mode)

    async def use(engine: LocalEngine) -> None:
        with pytest.raises(InternalError, match=r"cannot be loaded: why\.gguf is broken"):
            await loaded(engine, "a")
        broken.append(False)
        await loaded(engine, "a")

    run(demo, use, two("a"), load)
    assert "/secret/folder/why.gguf is broken" in caplog.text


# --- faults


def test_watchdog_reports_a_stuck_step_once(demo: Model, caplog: pytest.LogCaptureFixture) -> None:
    gate, shared = threading.Event(), Shared(demo)

    def load(path: Path, mode: str, **options: Any) -> Model:
        model = shared(path, mode)
        program: Any = model.program

        class Waiting:
            def __getattr__(self, name: str) -> Any:
                return getattr(program, name)

            def forward(self, *args: Any, **options: Any) -> Any:
                gate.wait(30)
                return program.forward(*args, **options)

        model._program = Waiting()
        return model

    async def use(engine: LocalEngine) -> None:
        await loaded(engine, "a")
        task = asyncio.create_task(events_of(engine, request(demo, "a", model="a")))
        while engine.stats().status != "stuck":
            await asyncio.sleep(0.01)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            await asyncio.sleep(0.01)
        gate.set()
        await task
        assert engine.stats().status == "ok"

    with caplog.at_level(logging.CRITICAL):
        run(demo, use, two("a"), load, stuck_after=0.1)
    assert caplog.text.count("no step for 0.1 seconds") == 1
    assert "gate.wait" in caplog.text


def test_defect_of_the_scheduler_fails_its_requests_and_the_engine_goes_on(
    demo: Model, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(engine: LocalEngine) -> None:
        broken: Any = engine._entries["demo"].loaded.scheduler._planner  # type: ignore[union-attr]
        plan = broken.plan
        broken.plan = lambda: 1 / 0
        (*_, failed) = await events_of(engine, request(demo, "a"))
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, InternalError)
        broken.plan = plan
        assert result(await events_of(engine, request(demo, "b")))

    run(demo, use)
    assert "a step failed" in caplog.text


def test_models_are_added_and_removed_while_the_server_runs(demo: Model, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(DEMO.read_bytes())
    source = ModelSource("added", copy, preset=Preset(system="Be brief."), is_fixed=False)

    async def use(engine: LocalEngine) -> None:
        engine.add(source)
        assert [(info.name, info.preset) for info in engine.models()][1:] == [("added", source.preset)]
        pin = await engine.pin("added")
        pin.release()
        stream = engine.submit(attrs.evolve(request(demo, "a", max_tokens=40), model="added"))
        engine.remove("added")
        copy.unlink()
        assert [info.name for info in engine.models()] == ["demo"]
        with pytest.raises(UnknownModelError):
            engine.submit(attrs.evolve(request(demo, "b"), model="added"))
        events = [event async for event in stream]
        assert isinstance(events[-1], Done)
        for _ in range(500):
            if "added" not in engine.stats().models:
                break
            await asyncio.sleep(0.01)
        assert "added" not in engine.stats().models
        with pytest.raises(InvalidRequestError, match="'demo' was named when the server was started"):
            engine.remove("demo")
        with pytest.raises(InvalidRequestError, match="'demo' was named when the server was started"):
            engine.add(attrs.evolve(source, name="demo"))
        with pytest.raises(UnknownModelError):
            engine.remove("added")

    run(demo, use, models_max=2)


def test_a_model_is_known_while_its_file_is_replaced() -> None:
    engine = LocalEngine((), EngineSettings(threads=1))
    versions = [[ModelSource("demo", DEMO, tags=(tag,), is_fixed=False)] for tag in ("old", "new")]
    engine.offer(versions[0])

    def replace() -> None:
        for i in range(2000):
            engine.offer(versions[i % 2])

    thread = threading.Thread(target=replace)
    try:
        sys.setswitchinterval(1e-6)
        thread.start()
        while thread.is_alive():
            engine.keep_alive("demo", 60.0)
        engine.remove("demo")
        with pytest.raises(UnknownModelError, match=r"the server has $"):
            engine.keep_alive("demo", 60.0)
    finally:
        thread.join()
        engine.close()


@pytest.mark.parametrize("change", ["cut", "damaged"])
def test_a_model_whose_file_was_cut_is_loaded_again(change, demo, tmp_path, monkeypatch, caplog) -> None:
    """Its requests end with an error, those that follow are served."""
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path)

    async def use(engine: LocalEngine) -> None:
        await loaded(engine, "demo")
        before = result(await events_of(engine, request(demo, "a")))
        (copy,) = (tmp_path / "packed").iterdir()
        pin = await engine.pin("demo")  # a call that still needs the model that is lost
        if change == "cut":
            os.truncate(copy, 4096)
        else:  # its index is as it was
            with copy.open("r+b") as file:
                file.seek(copy.stat().st_size // 4)
                file.write(bytes(copy.stat().st_size // 2))
        failed = (await events_of(engine, request(demo, "b")))[-1]
        assert isinstance(failed, Failed)
        assert str(failed.error).startswith(f"a part of the model is lost, try again: {copy.name} was cut or changed")
        await loaded(engine, "demo")
        assert result(await events_of(engine, request(demo, "c"))) == before
        assert [one.name for one in engine.models()] == ["demo"]
        assert not pin.model.closed
        program = weakref.ref(pin.model.program)
        pin.release()
        for _ in range(500):
            if program() is None:
                break
            await asyncio.sleep(0.01)
        assert pin.model.closed
        assert program() is None  # though an error of the step refers to it

    file = shutil.copy(DEMO, tmp_path)  # no other model shares its weights
    run(demo, use, (ModelSource("demo", Path(file)),), load=load_model, load_mode="map")
    assert f"the model 'demo' is loaded again: {tmp_path}/packed/" in caplog.text
