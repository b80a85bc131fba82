"""Random requests together on tiny real models, against each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import attrs
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from adapters import write_adapter
from conftest import TinyGguf
from llamacli import Model, PromptLookup, SamplingParams, load_model
from llamacli.engine import Prompts, default_engine
from llamacli.engine.adapters import Adapter
from llamacli.generation.drafts import Drafts
from llamacli.kernels.isa import isa
from llamacli.plugins import Plugins
from llamacli.serve import running
from llamacli.serve.drafts import DraftSource
from llamacli.serve.requests import (
    Done,
    Embedding,
    EmbeddingRequest,
    Event,
    Finished,
    GenerationRequest,
    PromptLogprobs,
    Request,
    TextDelta,
)
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings
from llamacli.tools.embedding import Pooler
from sessions import LONG
from suite import examples

N_CTX = 96
LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 33, 48])


@attrs.frozen
class Spec:
    """Request to come.

    Its prompt continues the first `n_kept` tokens of an earlier one and of its text.
    """

    parent: int
    n_kept: int
    n_new: int
    fields: dict[str, Any]
    scale: float
    embeds: bool
    arrives: int
    cancelled: int | None


SPECS = st.lists(
    st.builds(
        Spec,
        parent=st.integers(0, 5),
        n_kept=st.integers(0, 60),
        n_new=LENGTHS,
        fields=st.fixed_dictionaries(
            {
                "n": st.integers(1, 2),
                "max_tokens": st.sampled_from([0, 1, 9, 20, 30]),
                "seed": st.integers(0, 2),
                "prompt_logprobs": st.sampled_from([None, None, None, 1]),
                "params": st.sampled_from([SamplingParams(n_probs=1), SamplingParams(temperature=1.5, n_probs=1)]),
                "ignore_eos": st.booleans(),
                "stop": st.sampled_from([(), (), ("e",)]),
            }
        ),
        scale=st.sampled_from([0.0, 0.0, 1.0]),
        embeds=st.sampled_from([False, False, False, True]),
        arrives=st.integers(0, 20),
        cancelled=st.sampled_from([None, None, None, 1, 4, 15]),
    ),
    min_size=1,
    max_size=6,
)
LOADS = st.fixed_dictionaries(
    {
        "step_ms": st.sampled_from([0, 0.2]),
        "max_running": st.sampled_from([2, 8]),
        "contexts": st.sampled_from([1, 2, 8]),
        "drafts": st.booleans(),
    }
)


class Trial:
    """Scheduler with the events of its requests."""

    def __init__(self, model: Model, adapters: list[Adapter], *, contexts: int = 8, drafts: bool = False, **given: Any):
        settings = EngineSettings(
            n_ctx=N_CTX, max_queue=100, draft_max=6, kv_memory=contexts * model.kv_pool().layout.n_bytes(N_CTX), **given
        )
        source = DraftSource(partial(PromptLookup, min_ngram=1)) if drafts else None
        self.scheduler = Scheduler(model, settings, pooling=Pooler.of(model), adapters=adapters, drafts=source)
        self.n_adapters = len(adapters)
        self.events: dict[str, list[Event]] = {}

    def submit(self, request: Request) -> Any:
        self.events[request.id] = []
        return self.scheduler.submit(request)

    def step(self) -> None:
        for state, event in self.scheduler.step():
            self.events[state.message.id].append(event)

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.busy:
                return
            self.step()
        raise AssertionError("requests are still running")

    def result(self, name: str) -> tuple[Any, ...]:
        """Parts of a reply that must not depend on other requests."""
        texts: dict[int, tuple[str, list[Any]]] = {}
        others: list[Any] = []
        for event in self.events[name]:
            match event:
                case TextDelta():
                    text, tokens = texts.get(event.index, ("", []))
                    texts[event.index] = text + event.text, tokens + [(one.id, one.logprob) for one in event.tokens]
                case Embedding():
                    others.append((event.prompt, event.vector.tolist()))
                case Finished() | PromptLogprobs():
                    others.append(event)
        usage = self.events[name][-1].usage  # type: ignore[union-attr]
        return texts, sorted(others, key=repr), usage.prompt, usage.generated


def requests(specs: list[Spec], start: Callable[..., Trial]) -> list[tuple[Request, Any]]:
    """Requests, each with the result that it has alone."""
    found: list[tuple[Request, Any]] = []
    for i, spec in enumerate(specs):
        kept: tuple[int, ...] = ()
        if found:
            parent, reply = found[spec.parent % len(found)]
            kept = (*parent.prompts[0], *(token for token, _ in reply[0].get(0, ("", []))[1]))[: spec.n_kept]
        prompt = (*kept, *LONG[: spec.n_new])[: N_CTX - 1]
        alone = start(step_ms=0)
        adapters = ((0, spec.scale),) if alone.n_adapters else ()
        if spec.embeds:
            one: Request = EmbeddingRequest(id=str(i), model="m", prompts=(prompt, prompt[:9]), adapters=adapters)
        else:
            one = GenerationRequest(id=str(i), model="m", prompts=(prompt,), adapters=adapters, **spec.fields)
        alone.submit(one)
        alone.run()
        found.append((one, alone.result(one.id)))
        alone.scheduler.close()
    return found


TILES = pytest.mark.skipif(isa() != "amx", reason="the instruction set in use has no tiles")


@pytest.fixture(
    scope="module",
    params=[
        ("gqa", "fp32", "registers"),
        ("gemma3", "fp32", "registers"),
        ("qwen35", "fp32", "registers"),
        *(pytest.param((name, "q8", "tiles"), marks=TILES) for name in ("gqa", "gemma3", "qwen35")),
    ],
    ids="-".join,
)
def start(
    request: pytest.FixtureRequest, tiny_gguf: TinyGguf, plugins: Plugins, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Trial]]:
    """Start a trial of a model, with these settings."""
    variant, mode, prompts = request.param
    engine = default_engine(prompts=Prompts(prompts))
    with load_model(tiny_gguf(variant), mode, plugins=plugins, engine=engine) as model:
        adapters = []
        if variant == "gqa":
            file = write_adapter(tmp_path_factory.mktemp("adapter") / "a.gguf", tiny_gguf(), seed="a")
            adapters.append(model.load_adapter(file))
        yield lambda **given: Trial(model, adapters, **given)


@given(specs=SPECS, load=LOADS, preempted=st.sets(st.integers(0, 40)))
@examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_replies_are_those_alone(
    specs: list[Spec], load: dict[str, Any], preempted: set[int], start: Callable[..., Trial]
) -> None:
    """Continue texts of other requests, cancel some, preempt sequences."""
    wanted = requests(specs, start)
    always = patch.object(Drafts, "_best_length", lambda _self, _draft, limit, *_: limit)
    with always, patch.object(running, "GROWTH", 0):
        together, states = start(**load), {}
        for step in range(40):
            for (one, _), spec in zip(wanted, specs, strict=True):
                if spec.arrives == step:
                    states[one.id] = together.submit(one)
                if spec.cancelled is not None and spec.arrives + spec.cancelled == step:
                    together.scheduler.cancel(states[one.id])
            sequences = together.scheduler.running.sequences
            if step in preempted and len(sequences) > 1:
                together.scheduler.running.preempt(sequences[-1])
            together.step()
        together.run()
    for (one, alone), spec in zip(wanted, specs, strict=True):
        if isinstance((together.events[one.id] or [None])[-1], Done):
            assert together.result(one.id) == alone
        else:
            assert spec.cancelled is not None
    together.scheduler.close()
    assert together.scheduler.memory.pool.n_used_bytes == 0
