"""Slow draws, as with an ambiguous grammar, run beside the steps."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import TinyGguf
from llamacli import Model, SamplingParams, load_model
from llamacli.engine import default_engine
from llamacli.plugins import Plugins
from llamacli.sampling import Candidates, Draw, Sampler, SamplerChain
from llamacli.serve import scheduler as scheduler_module
from llamacli.serve.requests import Failed, GenerationRequest, TextDelta
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings


class Slow(Sampler):
    """Sampler that takes CPU time."""

    def __init__(self, seconds: float = 0.02):
        self.seconds = seconds

    def apply(self, candidates: Candidates) -> None:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            sum(range(100))


@pytest.fixture(scope="module")
def model(tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[Model]:
    with load_model(tiny_gguf(), "fp32", plugins=plugins, engine=default_engine()) as model:
        yield model


def request(name: str, *samplers: Sampler, n: int = 1, max_tokens: int = 6) -> GenerationRequest:
    params = SamplerChain([*samplers, Draw()]) if samplers else SamplingParams(temperature=1.0, top_k=0)
    return GenerationRequest(
        id=name,
        model="m",
        prompts=((5, 9, 33, 64),),
        params=params,
        max_tokens=max_tokens,
        n=n,
        seed=3,
        ignore_eos=True,
    )


def run(model: Model, *wanted: GenerationRequest, **settings: Any) -> tuple[dict[str, list[tuple[str, int]]], int]:
    """Texts of each choice with their steps, and the number of steps."""
    scheduler = Scheduler(model, EngineSettings(n_ctx=64, **settings))
    found: dict[str, list[tuple[str, int]]] = {}
    for one in wanted:
        scheduler.submit(one)
    n_steps = 0
    while scheduler.busy:
        n_steps += 1
        for state, event in scheduler.step():
            if isinstance(event, TextDelta):
                found.setdefault(f"{state.message.id} {event.index}", []).append((event.text, n_steps))
            elif isinstance(event, Failed):
                found.setdefault(f"{state.message.id} 0", []).append((str(event.error), n_steps))
    scheduler.close()
    return found, n_steps


def texts(found: dict[str, list[tuple[str, int]]]) -> dict[str, str]:
    return {name: "".join(text for text, _ in parts) for name, parts in found.items()}


def test_others_go_on_while_a_slow_draw_runs(model: Model) -> None:
    found, _ = run(model, request("slow", Slow()), request("plain", max_tokens=40))
    steps = [step for _, step in found["slow 0"]]
    between = [sum(a < step < b for _, step in found["plain 0"]) for a, b in itertools.pairwise(steps)]
    assert max(between) >= 2, "the other text waits for each slow draw"
    for name, n in (("slow", 6), ("plain", 40)):
        samplers = [Slow()] if name == "slow" else []
        assert texts(found)[f"{name} 0"] == texts(run(model, request(name, *samplers, max_tokens=n))[0])[f"{name} 0"]


def test_texts_are_those_of_quick_draws(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [request(str(i), Slow(0.006), n=1 + i % 2) for i in range(4)]
    beside, _ = run(model, *wanted, kv_memory=6 * model.kv_pool().layout.n_bytes(64))
    monkeypatch.setattr(scheduler_module, "SLOW_DRAW_S", 1e9)
    assert texts(beside) == texts(run(model, *wanted)[0])
    assert len(beside) == 6


def test_a_step_without_other_work_waits_for_the_draw(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_WAIT_S", 60.0)  # a busy machine has its time
    _, n_steps = run(model, request("slow", Slow(0.04)))
    assert n_steps <= 2 * 6 + 2  # a step draws, or waits for the draw


def test_a_cancelled_text_ends_while_its_draw_runs(model: Model) -> None:
    scheduler = Scheduler(model, EngineSettings(n_ctx=64))
    state = scheduler.submit(request("slow", Slow(0.05), max_tokens=30))
    while not scheduler._drawing:
        scheduler.step()
    scheduler.cancel(state)
    scheduler.step()
    assert not scheduler.busy
    scheduler.close()


def test_a_text_whose_draws_take_too_long_fails(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_MAX_DRAWS_S", 0.05)
    found, _ = run(model, request("slow", Slow(0.03), max_tokens=30), request("plain"))
    assert "the grammar takes too long: 0 s for" in found["slow 0"][-1][0]
    assert len(found["slow 0"]) < 5
    assert texts(found)["plain 0"] == texts(run(model, request("plain"))[0])["plain 0"]
