"""Cache memory under a scheduler: pages, sliding windows, recurrent states."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from conftest import LoadTiny, TinyGguf
from llamacli import DraftModel, InvalidRequestError, Model, MtpHead
from llamacli.engine import Engine, default_engine
from llamacli.generation.drafts import Drafts
from llamacli.kv import N_BATCH, PAGE
from llamacli.kv.pool import PageLog
from llamacli.plugins import Plugins
from llamacli.sampling import SamplingParams
from llamacli.serve import running
from llamacli.serve.cache import CacheMemory
from llamacli.serve.drafts import DraftSource
from llamacli.serve.errors import NotSupportedError, PromptTooLongError
from llamacli.serve.requests import Done, Embedding, EmbeddingRequest, Event, GenerationRequest, TextDelta
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings
from llamacli.tools.embedding import Pooler, load_embedder
from sessions import LONG

PARAMS = SamplingParams(temperature=1.5, n_probs=1)


def vectors(one: Scheduler, prompts: list[list[int]]) -> list[list[float]]:
    """Embeddings of prompts, which come in one request."""
    one.submit(EmbeddingRequest(id="a", model="m", prompts=tuple(map(tuple, prompts))))
    found = {}
    while one.busy:
        for _, event in one.step():
            if isinstance(event, Embedding):
                found[event.prompt] = event.vector.tolist()
    return [found[i] for i in range(len(prompts))]


def requests() -> list[GenerationRequest]:
    """Requests some of which begin alike, or continue others."""
    prompts = [LONG[:70], LONG[:40], LONG[7:60], LONG[:70] + LONG[:9], LONG[20:21], LONG[3:90]]
    return [
        GenerationRequest(
            id=str(i), model="m", prompts=(tuple(prompts[i % 6]),), params=PARAMS, seed=i % 4, n=1 + i % 2,
            max_tokens=12 + 6 * (i % 3), ignore_eos=True,
        )
        for i in range(10)
    ]  # fmt: skip


def run(
    model: Model, wanted: list[GenerationRequest], drafts: DraftSource | None = None, **settings: Any
) -> tuple[Scheduler, dict[str, list[Event]]]:
    one = Scheduler(model, EngineSettings(n_ctx=128, max_queue=100, **settings), drafts=drafts)
    events: dict[str, list[Event]] = {request.id: [] for request in wanted}
    for request in wanted:
        one.submit(request)
    for _ in range(3000):
        if not one.busy:
            return one, events
        for state, event in one.step():
            events[state.message.id].append(event)
    raise AssertionError("requests are still running")


def tokens(events: list[Event]) -> dict[int, list[Any]]:
    """Tokens of each choice with their log-probabilities, bit for bit."""
    assert isinstance(events[-1], Done), events[-1]
    found: dict[int, list[Any]] = {}
    for event in events:
        if isinstance(event, TextDelta):
            found.setdefault(event.index, []).extend((token.id, token.logprob) for token in event.tokens)
    return found


@pytest.mark.parametrize("variant", ["gqa", "gemma3", "olmo2_sliding", "qwen35", "mamba2", "jamba", "moe_4_1"])
@pytest.mark.parametrize("engine", [pytest.param(default_engine, id="default")], indirect=True)
def test_texts_are_the_same_alone_together_and_short_of_memory(variant: str, load_tiny: LoadTiny) -> None:
    wanted = requests()
    model, alone = load_tiny(variant), {}
    for request in wanted:
        one, events = run(model, [request], step_ms=0)
        alone[request.id] = tokens(events[request.id])
        one.close()
    layout = model.kv_pool().layout
    for settings in (
        {"step_ms": 0, "max_running": 16},
        {"step_ms": 0.2, "max_running": 6},
        {"step_ms": 0.2, "max_running": 16, "kv_memory": 2 * layout.n_bytes(128)},
    ):
        with patch.object(running, "GROWTH", 0):
            one, events = run(model, wanted, **settings)
        assert {name: tokens(found) for name, found in events.items()} == alone, settings
        pool = one.memory.pool
        assert pool.n_used_bytes <= (pool.max_bytes or 0)
        assert one.counters.prefix_tokens["true"] > 0 or not one.memory.shares_anywhere
        one.close()
        assert pool.n_used_bytes == 0


@pytest.mark.medium
@pytest.mark.parametrize(("variant", "drafter"), [("glm4moe_nextn", "head"), ("qwen35_nextn", "draft model")])
@pytest.mark.parametrize("engine", [pytest.param(default_engine, id="default")], indirect=True)
def test_drafters_have_a_part_of_the_memory(variant: str, drafter: str, load_tiny: LoadTiny) -> None:
    """Serve with memory for few contexts and their drafts.

    Texts are those without drafts, and the pages of both caches stay within the limit.
    """
    model, wanted = load_tiny(variant, n_layer=3), requests()
    one, plain = run(model, wanted, step_ms=0)
    one.close()
    if drafter == "head":
        source = DraftSource(partial(MtpHead, model, min_probability=0.0), reads_prompts=True, pool=model.nextn_pool())
    else:
        draft = load_tiny(variant, n_layer=2)
        source = DraftSource(partial(DraftModel, draft, min_probability=0.0), pool=draft.kv_pool())
    assert source.pool is not None
    layouts = model.kv_pool().layout, source.pool.layout
    context = sum(layout.n_bytes(128) for layout in layouts)
    with pytest.raises(
        InvalidRequestError, match=f"128 tokens takes {context} bytes of KV cache, and {context - 1} are"
    ):
        run(model, wanted, source, kv_memory=context - 1)
    for kv_memory in (context, 3 * context):
        always = patch.object(Drafts, "_best_length", lambda _self, _draft, limit, *_: limit)  # whatever time it takes
        with patch.object(running, "GROWTH", 0), always:
            one, events = run(model, wanted, source, step_ms=0, max_running=8, kv_memory=kv_memory)
        pools = one.memory.pool, source.pool
        assert sum(pool.max_bytes or 0 for pool in pools) == kv_memory
        assert all((pool.max_bytes or 0) >= layout.n_bytes(128) for pool, layout in zip(pools, layouts, strict=True))
        assert {name: tokens(found) for name, found in events.items()} == {
            name: tokens(found) for name, found in plain.items()
        }
        assert one.counters.draft_tokens > 0
        one.close()


@pytest.mark.parametrize("variant", ["bert", "nomic_bert", "gqa", "qwen35"])
@pytest.mark.parametrize("engine", [pytest.param(default_engine, id="default")], indirect=True)
def test_embeddings_equal_those_of_a_model_loaded_for_them(
    variant: str, load_tiny: LoadTiny, tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine
) -> None:
    prompts = [LONG[:n] for n in (1, 30, 17, 60)]
    with load_embedder(tiny_gguf(variant), "fp32", plugins=plugins, engine=engine) as embedder:
        expected = [embedder.embed(prompt).tolist() for prompt in prompts]
    model = load_tiny(variant)
    one = Scheduler(model, EngineSettings(step_ms=0.2), pooling=Pooler.of(model))
    assert vectors(one, prompts) == expected
    one.close()
    assert one.memory.pool.n_used_bytes == 0


@pytest.mark.parametrize("variant", ["bert_classes", "qwen3_rank"])
@pytest.mark.parametrize("engine", [pytest.param(default_engine, id="default")], indirect=True)
def test_scores_equal_those_of_a_reranker(
    variant: str, load_tiny: LoadTiny, tiny_gguf: TinyGguf, plugins: Plugins, engine: Engine
) -> None:
    prompts = [LONG[:n] for n in (1, 30, 17, 60)]
    with load_embedder(tiny_gguf(variant), "fp32", plugins=plugins, engine=engine) as embedder:
        expected = [embedder.classify(prompt) for prompt in prompts]
    model = load_tiny(variant)
    one = Scheduler(model, EngineSettings(step_ms=0.2), pooling=Pooler.of(model))
    assert vectors(one, prompts) == expected
    one.close()


@pytest.mark.parametrize("engine", [pytest.param(default_engine, id="default")], indirect=True)
def test_encoders_generate_no_text_and_take_a_batch_at_most(load_tiny: LoadTiny) -> None:
    model = load_tiny("bert")
    one = Scheduler(model, EngineSettings(), pooling=Pooler.of(model))
    with pytest.raises(NotSupportedError, match="generates no text"):
        one.submit(GenerationRequest(id="a", model="m", prompts=((1, 2),)))
    with pytest.raises(PromptTooLongError):
        one.submit(EmbeddingRequest(id="a", model="m", prompts=((1,) * (N_BATCH + 1),)))


@pytest.mark.parametrize("engine", [pytest.param(default_engine, id="default")], indirect=True)
def test_memory_of_contexts_and_prefixes(load_tiny: LoadTiny) -> None:
    model = load_tiny("gqa")
    layout = model.kv_pool().layout
    size, page = layout.n_bytes(2 * PAGE), layout.n_bytes(PAGE)
    memory = CacheMemory(model, EngineSettings(n_ctx=2 * PAGE, kv_memory=3 * size))
    assert (memory.max_bytes, memory.page_bytes, memory.free_bytes) == (3 * size, page, 3 * size)
    assert [memory.n_bytes(n) for n in (-1, 0, 1, PAGE, PAGE + 1, 9 * PAGE)] == [0, 0, page, page, size, size]
    sequence = memory.new_sequence()
    sequence.reserve(0, 2 * PAGE)
    sequence.tokens += range(2 * PAGE)
    memory.keep(sequence)
    assert memory.free_bytes == 2 * size
    sequence.close()
    assert memory.free_bytes == 3 * size
    assert not memory.spare(3 * size + 1)
    assert memory.spare(2 * size)
    assert memory.free_bytes - memory.prefixes.evictable_bytes == 2 * size, "nothing was evicted"
    assert memory.spare(2 * size + 1)
    assert memory.prefixes.evictable_bytes == 0
    assert not memory.evict(3 * size + 1)
    memory.pool.log = PageLog([(0, 0, 0, 0, 0)])
    memory.forget_all()
    assert memory.pool.log == PageLog()
    memory.close()


@pytest.mark.parametrize("engine", [pytest.param(default_engine, id="default")], indirect=True)
@pytest.mark.parametrize(("n_pages", "more", "most"), [(1, 0, 1), (3, 0, 3), (4, -1, 3), (3, 1, 3)])
def test_context_is_the_largest_that_fits(n_pages: int, more: int, most: int, load_tiny: LoadTiny) -> None:
    model = load_tiny("gqa")
    memory = CacheMemory(model, EngineSettings(kv_memory=model.kv_pool().layout.n_bytes(n_pages * PAGE) + more))
    assert memory.n_ctx == most * PAGE
    memory.close()
