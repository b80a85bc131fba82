"""Scheduler over a fake program: steps, fairness, memory, determinism."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from fake_serving import EOS, PAGE_BYTES, Simulation, alone, kinds, last, prompt_of, request
from llamacli.engine.base import Prompts
from llamacli.errors import InvalidRequestError
from llamacli.sampling import SamplingParams
from llamacli.serve import running
from llamacli.serve.errors import (
    NotSupportedError,
    PromptTooLongError,
    QueueFullError,
    QueueTimeoutError,
)
from llamacli.serve.requests import (
    Admitted,
    Done,
    Embedding,
    EmbeddingRequest,
    Finished,
    GenerationRequest,
    PromptLogprobs,
    PromptProgress,
    TextDelta,
    TokenTimings,
)
from llamacli.serve.sequences import seed_of_choice
from llamacli.tools.embedding import Pooling, pool_states
from suite import examples

# --- one request


def test_events_of_one_request() -> None:
    simulation = Simulation()
    simulation.submit(request("a", progress=True))
    simulation.run()
    events = kinds(simulation, "a")
    assert events[0] is Admitted
    assert events[1:3] == [PromptProgress] * 2  # before the prompt and after it
    assert set(events[3:-2]) == {TextDelta}
    assert events[-2:] == [Finished, Done]
    done = last(simulation, "a")
    assert (done.usage.prompt, done.usage.cached) == (20, 0)
    assert simulation.program.calls[0] == [20]
    assert all(call == [1] for call in simulation.program.calls[1:])
    assert done.usage.generated in (len(simulation.program.calls), len(simulation.program.calls) - 1)


def test_times_of_each_token() -> None:
    simulation = Simulation()
    simulation.submit(request("a", timed=True, max_tokens=4, params=SamplingParams(), ignore_eos=True))
    simulation.run()
    times = [event for event in simulation.events["a"] if isinstance(event, TokenTimings)]
    assert [one.usage.generated for one in times] == [1, 2, 3, 4]
    seconds = [one.timings.generate_s for one in times]
    assert (seconds[0], sorted(set(seconds))) == (0.0, seconds)
    assert last(simulation, "a").timings.generate_s >= seconds[-1]


def test_long_prompt_comes_in_pieces_with_progress() -> None:
    simulation = Simulation()
    simulation.submit(request("other", max_tokens=400, params=SamplingParams(), ignore_eos=True))
    simulation.run(until=lambda: TextDelta in kinds(simulation, "other"))
    simulation.submit(request("a", 400, seed=1, progress=True, max_tokens=1))
    simulation.run(until=lambda: "a" in simulation.events and Done in kinds(simulation, "a"))
    seen = [event.processed for event in simulation.events["a"] if isinstance(event, PromptProgress)]
    assert seen == sorted(set(seen))
    assert len(seen) > 2
    assert seen[-1] == 400


def test_zero_tokens_evaluate_the_prompt_only() -> None:
    simulation = Simulation()
    simulation.submit(request("a", max_tokens=0, prompt_logprobs=3, n=2))
    simulation.run()
    assert kinds(simulation, "a") == [Admitted, PromptLogprobs, Finished, Finished, Done]
    tokens = simulation.events["a"][1].tokens
    assert len(tokens) == 20
    assert tokens[0].logprob is None
    assert all(len(token.top) == 3 and token.logprob <= token.top[0][2] <= 0 for token in tokens[1:])


def test_prompt_logprobs_do_not_depend_on_pieces_or_cached_prefixes() -> None:
    wanted = request("a", 300, max_tokens=2, prompt_logprobs=2)
    expected = alone(wanted)
    simulation = Simulation()
    simulation.submit(request("before", 300, max_tokens=1))
    simulation.submit(request("running", seed=3, max_tokens=100, ignore_eos=True))
    simulation.run(until=lambda: Done in kinds(simulation, "before"))
    simulation.submit(wanted)
    simulation.run()
    assert simulation.result("a") == expected


def test_choices_share_the_prompt_and_choice_0_is_that_of_one() -> None:
    simulation = Simulation()
    simulation.submit(request("three", n=3))
    simulation.run()
    assert simulation.program.calls[0] == [20]
    assert max(len(call) for call in simulation.program.calls) == 3
    texts = simulation.texts("three")
    assert len(set(texts.values())) == 3
    simulation.submit(request("one"))
    simulation.run()
    assert simulation.texts("one")[0] == texts[0]
    assert last(simulation, "three").usage.prompt == 20


def test_several_prompts_are_independent_and_numbered_in_order() -> None:
    simulation = Simulation()
    prompts = (prompt_of(1, 5), prompt_of(2, 9))
    simulation.submit(request("both", prompts=prompts, n=2))
    for name, prompt in (("first", prompts[0]), ("second", prompts[1])):
        simulation.submit(request(name, prompts=(prompt,), n=2))
    simulation.run()
    first, second = simulation.texts("first"), simulation.texts("second")
    assert simulation.texts("both") == {0: first[0], 1: first[1], 2: second[0], 3: second[1]}
    assert last(simulation, "both").usage.prompt == 14


def test_text_ends_at_the_end_of_the_context() -> None:
    simulation = Simulation(n_ctx=64)
    simulation.submit(request("a", 60, max_tokens=None, ignore_eos=True))
    simulation.run()
    assert simulation.events["a"][-2].reason == "length"
    assert last(simulation, "a").usage.generated == 4


def test_limit_of_tokens() -> None:
    simulation = Simulation(max_tokens=3)
    simulation.submit(request("a", max_tokens=None, ignore_eos=True))
    simulation.submit(request("b", max_tokens=2, ignore_eos=True))
    simulation.run()
    assert [last(simulation, name).usage.generated for name in "ab"] == [3, 2]


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.LAST, Pooling.CLS, Pooling.NONE])
def test_embeddings_are_the_pooled_states(pooling: Pooling) -> None:
    simulation = Simulation(pooling=pooling)
    prompts = (prompt_of(1, 30), prompt_of(2, 4))
    simulation.submit(request("text", max_tokens=30, ignore_eos=True))
    simulation.submit(EmbeddingRequest(id="a", model="m", prompts=prompts))
    simulation.run()
    vectors = {event.prompt: event.vector for event in simulation.events["a"] if isinstance(event, Embedding)}
    for i, prompt in enumerate(prompts):
        rows = [simulation.program.row(prompt[: n + 1], True) for n in range(len(prompt))]
        np.testing.assert_array_equal(vectors[i], pool_states(np.array(rows, np.float32), pooling))
    assert last(simulation, "a").usage.prompt == 34


# --- refusals


def test_what_a_model_does_not_allow_is_refused() -> None:
    simulation = Simulation(max_running=4)
    for wrong in (
        {"prompts": ()},
        {"prompts": ((),)},
        {"prompts": ((1, 100_000),)},
        {"prompts": ((-1,),)},
        {"n": 0},
        {"n": 5},
        {"max_tokens": -1},
        {"params": SamplingParams(samplers=("nonsense",))},
    ):
        with pytest.raises(InvalidRequestError):
            simulation.submit(request("a", **wrong))
    with pytest.raises(PromptTooLongError, match=r"maximum context length is 512 tokens.*512") as error:
        simulation.submit(request("a", 512))
    assert error.value.details == {"n_prompt_tokens": 512, "n_ctx": 512}
    simulation.submit(request("b", 512, max_tokens=0))
    assert simulation.scheduler.queue.n_requests == 1


def test_queue_limits() -> None:
    simulation = Simulation(max_queue=1, max_queue_tokens=100, max_running=1)
    simulation.submit(request("a", 90))
    with pytest.raises(QueueFullError, match="100 tokens are allowed"):
        simulation.submit(request("b", 11))
    simulation.submit(request("b", 9))
    with pytest.raises(QueueFullError, match="2 requests wait already, 1 are allowed") as error:
        simulation.submit(request("c", 1))
    assert 1 <= (error.value.retry_after or 0) <= 60
    simulation.step()
    with pytest.raises(QueueFullError, match="1 requests wait already"):
        simulation.submit(request("c", 1))
    with pytest.raises(QueueFullError, match="1 requests wait already"):
        simulation.scheduler.expect_room()
    simulation.run()
    simulation.submit(request("c", 1))
    simulation.run()
    assert all(Done in kinds(simulation, name) for name in "abc")
    assert simulation.scheduler.stats().refused == {"queue_full": 4}


def test_a_lone_request_may_exceed_the_queue_tokens() -> None:
    simulation = Simulation(max_queue_tokens=10)
    simulation.submit(request("a", 50))
    simulation.run()
    assert Done in kinds(simulation, "a")


def test_share_of_a_key() -> None:
    simulation = Simulation(max_per_key=2)
    for name in "ab":
        simulation.submit(request(name, key="k"))
    with pytest.raises(QueueFullError, match="of this key"):
        simulation.submit(request("c", key="k"))
    simulation.submit(request("d", key="other"))
    simulation.run()
    simulation.submit(request("c", key="k"))
    simulation.run()
    assert Done in kinds(simulation, "c")


def test_models_without_embeddings() -> None:
    simulation = Simulation()
    simulation.scheduler.pooling = None
    with pytest.raises(NotSupportedError):
        simulation.scheduler.submit(EmbeddingRequest(id="a", model="m", prompts=((1, 2),)))


# --- sharing


def test_keys_take_turns() -> None:
    simulation = Simulation(max_running=1, max_queue=100)
    for i in range(10):
        simulation.submit(request(f"greedy {i}", seed=i, key="greedy", max_tokens=2))
    simulation.submit(request("modest", seed=99, key="modest", max_tokens=2))
    simulation.run()
    order = sorted(simulation.times, key=lambda name: simulation.times[name][0])
    assert order.index("modest") <= 1


def test_second_turn_of_a_conversation_shares_the_first() -> None:
    simulation = Simulation()
    simulation.submit(request("first", 300, max_tokens=5, ignore_eos=True))
    simulation.run()
    simulation.submit(request("second", prompts=((*prompt_of(0, 300), *prompt_of(1, 10)),), max_tokens=5))
    simulation.run()
    assert last(simulation, "second").usage.cached >= 300


# --- memory


def test_memory_for_few_requests_serves_many_with_equal_texts() -> None:
    wanted = [request(str(i), 100, seed=i, max_tokens=100, ignore_eos=True) for i in range(8)]
    simulation = Simulation(n_ctx=256, kv_memory=PAGE_BYTES * 32)  # two and a half of 200 tokens
    for one in wanted:
        simulation.submit(one)
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    assert sum(last(simulation, one.id).timings.n_preempted for one in wanted) > 0
    for one in wanted:
        assert simulation.result(one.id) == alone(one)
    assert simulation.pool.n_used_bytes <= PAGE_BYTES * 32


def test_context_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=f"{32 * PAGE_BYTES} bytes of KV cache, and {PAGE_BYTES} are"):
        Simulation(n_ctx=512, kv_memory=PAGE_BYTES)
    assert Simulation(kv_memory=PAGE_BYTES * 3).scheduler.memory.n_ctx == 48


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings of a scheduler, and requests that come and are cancelled."""
    pressed = draw(st.booleans())  # memory for a single context, and long texts
    given = {
        "step_ms": draw(st.sampled_from([0, 20, 60, 150])),
        "max_running": 8 if pressed else draw(st.sampled_from([2, 4, 8])),
        "extra_running": draw(st.sampled_from([0, 4])),
        "n_ctx": 128,
        "kv_memory": PAGE_BYTES * (8 if pressed else draw(st.sampled_from([8, 10, 17, 40, 200]))),
        "max_queue": 100,
        "growth": 0 if pressed else 64,
        "draft_max": draw(st.sampled_from([0, 3, 16])),
    }
    requests = []
    for i in range(draw(st.integers(5 if pressed else 1, 12))):
        n = draw(st.integers(1, 2))
        requests.append(
            {
                "id": str(i),
                "seed": draw(st.integers(0, 3)),
                "prompts": tuple(
                    (
                        *prompt_of(draw(st.integers(0, 5 if pressed else 1)), 8 * draw(st.integers(0, 9))),
                        draw(st.integers(300, 303)),
                    )
                    for _ in range(draw(st.sampled_from([1, 1, 2])))
                ),
                "n": n,
                "max_tokens": draw(st.sampled_from([40, 55] if pressed else [0, 1, 5, 30, 55])),
                "ignore_eos": pressed or draw(st.booleans()),
                "key": draw(st.sampled_from("kl")),
                "params": attrs_params(draw(st.sampled_from([0.0, 1.0])), draw(st.sampled_from([0, 2]))),
                "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
                "stop": draw(st.sampled_from([(), ("a",), ("th", "o")])),
                "arrives": draw(st.integers(0, 12)),
                "cancelled": draw(st.sampled_from([None, None, None, 1, 5, 20])),
            }
        )
    return given, requests


def built(spec: dict[str, Any]) -> GenerationRequest:
    fields = {name: value for name, value in spec.items() if name not in ("id", "arrives", "cancelled")}
    return request(spec["id"], **fields)


def attrs_params(temp: float, n_probs: int) -> SamplingParams:
    return SamplingParams(temperature=temp, n_probs=n_probs, repeat_penalty=1.1)


@pytest.mark.medium
@examples(60)
@given(loads())
def test_any_load_gives_each_request_its_own_result_and_returns_all_pages(
    load: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    given, specs = load
    growth = given.pop("growth")
    with patch.object(running, "GROWTH", growth):
        simulation = Simulation(**given)
        requests = {spec["id"]: built(spec) for spec in specs}
        tickets: dict[str, Any] = {}
        for step in range(60):
            for spec in specs:
                if spec["arrives"] == step:
                    tickets[spec["id"]] = simulation.submit(requests[spec["id"]])
                if spec["cancelled"] is not None and spec["arrives"] + spec["cancelled"] == step:
                    simulation.scheduler.cancel(tickets[spec["id"]])
            simulation.step()
            assert simulation.pool.n_used_bytes <= given["kv_memory"]
        simulation.run(limit=5000)
    event(f"preemptions: {min(2, simulation.scheduler.counters.preemptions)}")
    event(f"accepted drafts: {simulation.scheduler.counters.draft_tokens_accepted > 0}")
    for spec in specs:
        if isinstance(last_or_none(simulation, spec["id"]), Done):
            assert simulation.result(spec["id"]) == alone(requests[spec["id"]])
        else:
            assert spec["cancelled"] is not None, "a request that nobody cancelled did not end"
    assert simulation.scheduler.queue.n_requests == simulation.scheduler.queue.n_tokens == 0
    simulation.scheduler.memory.prefixes.clear()
    assert simulation.pool.n_used_bytes == 0


def last_or_none(simulation: Simulation, name: str) -> Any:
    return simulation.events[name][-1] if simulation.events[name] else None


def test_end_tokens_are_not_drawn_from_the_fake_vocabulary_only() -> None:
    """Texts of all lengths occur."""
    assert EOS in Simulation().model.tokenizer.eog_ids


def test_prompt_tokens_left_counts_what_waits_and_what_is_not_evaluated() -> None:
    simulation = Simulation(max_running=1)
    assert simulation.scheduler.prompt_tokens_left == 0
    simulation.submit(request("a", 100))
    simulation.submit(request("b", 30, seed=1))
    assert simulation.scheduler.prompt_tokens_left == 130
    simulation.step()
    left = simulation.scheduler.prompt_tokens_left
    assert 30 <= left < 130
    simulation.run()
    assert simulation.scheduler.prompt_tokens_left == 0


# --- background requests


def test_background_requests_fill_what_others_leave() -> None:
    texts, gaps = {}, {}
    for beside in (False, True):
        simulation = Simulation()
        if beside:
            for i in range(20):
                simulation.submit(request(f"later {i}", 40, seed=i, background=True, max_tokens=30))
        simulation.run(until=lambda simulation=simulation: simulation.program.calls)
        started = len(simulation.program.calls)
        simulation.submit(request("client", 20, seed=99, max_tokens=200, params=SamplingParams(), ignore_eos=True))
        simulation.run(until=lambda simulation=simulation: Done in kinds(simulation, "client"))
        steps = simulation.program.calls[started + 10 :]
        gaps[beside] = sum(0.025 + 0.002 * sum(call) for call in steps) / 190
        texts[beside] = simulation.texts("client")
        simulation.run()
        for i in range(20 if beside else 0):
            assert Done in kinds(simulation, f"later {i}")
    assert texts[True] == texts[False]
    assert gaps[False] < gaps[True] < 1.2 * gaps[False]


def test_background_requests_give_up_their_slots() -> None:
    simulation = Simulation(max_running=2)
    for i in range(4):
        simulation.submit(request(f"later {i}", 40, seed=i, background=True, max_tokens=60, ignore_eos=True))
    simulation.run(until=lambda: "later 1" in simulation.events and TextDelta in kinds(simulation, "later 1"))
    for i in range(2):
        simulation.submit(request(f"client {i}", 20, seed=90 + i, max_tokens=20, ignore_eos=True))
    simulation.run(until=lambda: all(Done in kinds(simulation, f"client {i}") for i in range(2)))
    assert not any(Done in kinds(simulation, f"later {i}") for i in range(4) if f"later {i}" in simulation.events)
    simulation.run()
    assert all(Done in kinds(simulation, f"later {i}") for i in range(4))


def test_a_client_that_comes_while_a_background_request_is_admitted() -> None:
    simulation = Simulation()
    reuse, coming = simulation.scheduler.memory.reuse, [request("client", seed=1)]

    def come(*given: Any) -> int:
        if coming:
            simulation.submit(coming.pop())  # as from another thread
        return reuse(*given)

    with patch.object(simulation.scheduler.memory, "reuse", come):
        simulation.submit(request("later", background=True))
        simulation.run()
    for name, seed in (("client", 1), ("later", 0)):
        assert simulation.result(name) == alone(request(name, seed=seed))


def test_background_requests_wait_longer_than_those_of_clients() -> None:
    simulation = Simulation(max_running=1, queue_timeout=0.5, kv_memory=64 * PAGE_BYTES)
    assert simulation.scheduler.stats().kv_pages_total == 64
    simulation.submit(request("first", max_tokens=200, params=SamplingParams(), ignore_eos=True))
    simulation.submit(request("client", seed=1))
    simulation.submit(request("later", seed=2, background=True))
    simulation.run()
    assert isinstance(last(simulation, "client").error, QueueTimeoutError)
    assert isinstance(last(simulation, "later"), Done)


def test_seeds_of_choices_stay() -> None:
    assert seed_of_choice(7, 0) == 7
    assert seed_of_choice(7, 1) == 74571000461966187674218521778895046012


@pytest.mark.parametrize("way", [Prompts.REGISTERS, Prompts.TILES])
def test_cells_of_generated_tokens_where_prompts_go_another_way(way: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, ways = Simulation(), list[tuple[int, bool]]()
    forward = simulation.program.forward

    def noted(tokens: Any, spans: Any, n_last: Any, **options: Any) -> Any:
        ways.extend((span.n, span.is_prompt) for span in spans)
        return forward(tokens, spans, n_last, **options)

    monkeypatch.setattr(simulation.program, "prompts", way)
    monkeypatch.setattr(simulation.program, "forward", noted)
    simulation.submit(request("a", 20, ignore_eos=True))
    simulation.run(until=lambda: len(ways) > 5)
    (sequence,) = simulation.scheduler.running.sequences
    assert ways == [(20, way is Prompts.TILES), *[(1, False)] * 5]
    assert sequence.cell_keys[:25] == sequence.cache.tokens[:25]
    assert (min(sequence.cache.tokens) < 0) == (way is Prompts.TILES)
