"""Speculative decoding in the scheduler: equal texts, fewer steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import pytest

from adapters import write_adapter
from conftest import TinyGguf
from fake_serving import FakeProgram, Guesses, Simulation, alone
from llamacli import (
    DraftModel,
    HeadDrafter,
    InvalidRequestError,
    Model,
    MtpHead,
    PromptLookup,
    SamplingParams,
    load_model,
)
from llamacli.engine import default_engine
from llamacli.engine.heads import Head
from llamacli.generation.drafts import Drafts
from llamacli.plugins import Plugins
from llamacli.serve.drafts import DraftSource
from llamacli.serve.models import ModelSource, load
from llamacli.serve.requests import Done, GenerationRequest, TextDelta
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings
from sessions import LONG
from tiny_eagle import write_eagle3
from tiny_gemma import write_assistant

GREEDY = SamplingParams(temperature=0.0)


def request(name: str, seed: int = 0, **fields: Any) -> GenerationRequest:
    given = {"params": GREEDY, "max_tokens": 40, "ignore_eos": True, "prompts": (tuple(range(300, 310 + seed)),)}
    return GenerationRequest(id=name, model="m", seed=seed, **{**given, **fields})


def even_clock() -> Callable[[], float]:
    """Clock by which all steps take as long, on any machine."""
    return count(1.0, 1e-4).__next__


def done(simulation: Simulation, name: str) -> Done:
    last = simulation.events[name][-1]
    assert isinstance(last, Done)
    return last


def test_a_lone_text_takes_fewer_steps() -> None:
    simulation = Simulation(draft_max=8)
    simulation.submit(request("a"))
    simulation.run()
    usage = done(simulation, "a").usage
    assert simulation.result("a") == alone(request("a"))
    assert 20 < usage.accepted < usage.drafted
    assert len(simulation.program.calls) == 40 - usage.accepted
    counters = simulation.scheduler.stats()
    assert (counters.draft_tokens, counters.draft_tokens_accepted) == (usage.drafted, usage.accepted)
    assert counters.generation_tokens == 40


@pytest.mark.parametrize("n_texts", [1, 8])
def test_drafts_shrink_to_none_where_rows_cost_more_than_they_bring(n_texts: int) -> None:
    simulation = Simulation(draft_max=8, costs={"base": 0.02, "per_row": 0.01}, step_ms=0)
    for i in range(n_texts):
        simulation.submit(request(str(i), i, max_tokens=200))
    simulation.run()
    drafted, accepted = simulation.scheduler.counters.draft_tokens, simulation.scheduler.counters.draft_tokens_accepted
    steps = len(simulation.program.calls)
    if n_texts == 1:
        assert steps < 120
        assert accepted > 80
    else:
        assert drafted < 200 * n_texts / 4
    plain = Simulation(costs={"base": 0.02, "per_row": 0.01}, step_ms=0)
    for i in range(n_texts):
        plain.submit(request(str(i), i, max_tokens=200))
    plain.run()
    assert simulation.clock.now < 1.03 * plain.clock.now - 100 * 0.03
    for i in range(n_texts):
        assert simulation.result(str(i)) == plain.result(str(i))


def test_steps_with_drafts_stay_within_their_time() -> None:
    simulation = Simulation(draft_max=16, step_ms=30)
    simulation.submit(request("a", max_tokens=100))
    simulation.run()
    assert simulation.drafted
    assert max(simulation.step_seconds[8:]) <= 0.031


def test_nothing_is_drafted_beside_prompts() -> None:
    simulation = Simulation(draft_max=8, step_ms=40)
    simulation.submit(request("a", max_tokens=200))
    simulation.run(until=lambda: bool(simulation.drafted))
    simulation.submit(request("long", prompts=(tuple(300 + i % 20 for i in range(400)),), max_tokens=1))
    n_calls, n_drafts = len(simulation.program.calls), len(simulation.drafted)
    simulation.run(until=lambda: isinstance(simulation.events["long"][-1:] and simulation.events["long"][-1], Done))
    assert len(simulation.program.calls) - n_calls > 3
    assert len(simulation.drafted) == n_drafts


def test_a_request_sets_the_length_of_its_drafts() -> None:
    simulation = Simulation(draft_max=8)
    simulation.submit(request("none", draft_max=0))
    simulation.run()
    assert not simulation.drafted
    assert done(simulation, "none").usage.drafted == 0
    simulation.submit(request("short", 1, draft_max=2))
    simulation.run()
    assert max(simulation.drafted) == 2
    simulation.submit(request("long", 2, draft_max=12))
    simulation.run()
    assert max(simulation.drafted) == 12


def test_the_last_token_is_not_overshot() -> None:
    for n in range(1, 8):
        simulation = Simulation(draft_max=16)
        simulation.submit(request("a", max_tokens=n, params=SamplingParams(n_probs=2)))
        simulation.run()
        assert done(simulation, "a").usage.generated == n
        assert simulation.result("a") == alone(request("a", max_tokens=n, params=SamplingParams(n_probs=2)))
        for sequence in simulation.scheduler.memory.prefixes.sequences():
            assert len(sequence.tokens) < 10 + n


def test_a_predicted_text_is_drafted_and_never_changes_the_text() -> None:
    params = SamplingParams(temperature=0.0, n_probs=1)
    plain = Simulation()
    plain.submit(request("a", params=params))
    plain.run()
    ids = tuple(token.id for event in plain.events["a"] if isinstance(event, TextDelta) for token in event.tokens)
    assert len(ids) == 40
    for prediction, least, rejected in ((ids, 30, 0), ((*ids[:22], 299, *ids[23:]), 25, 1), ((298,) * 40, 0, 0)):
        simulation = Simulation(draft_max=4)
        simulation.submit(request("other", 1))
        simulation.submit(request("a", params=params, prediction=prediction))
        simulation.run()
        usage = done(simulation, "a").usage
        assert simulation.result("a") == plain.result("a")
        assert simulation.result("other") == alone(request("other", 1))
        assert usage.predicted
        assert not done(simulation, "other").usage.predicted
        assert (usage.accepted >= least, usage.drafted - usage.accepted >= rejected) == (True, True)
        assert (usage.drafted > 0) == (least > 0), "the server's drafter is not asked"
    simulation = Simulation()
    simulation.submit(request("a", params=params, prediction=ids, draft_max=0))
    simulation.run()
    assert done(simulation, "a").usage.drafted == 0


class Slow(Guesses):
    """Drafter whose first draft takes a second, later ones `seconds` a token."""

    seconds = 0.001

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        self.program.clock.now += self.seconds * limit if self.lengths else 1.0
        return super().draft(tokens, limit)


@pytest.mark.parametrize(("seconds", "pays"), [(0.001, True), (0.5, False)])
def test_the_time_of_drafting_counts_but_for_the_first(seconds: float, pays: bool) -> None:
    simulation = Simulation(draft_max=8, step_ms=0)

    def create(n: int) -> Slow:
        drafter = Slow(simulation.program, n, simulation.drafted)
        drafter.seconds = seconds
        return drafter

    simulation.scheduler._drafts._source = DraftSource(create)
    simulation.submit(request("a"))
    simulation.run()
    assert simulation.result("a") == alone(request("a"))
    assert (len(simulation.program.calls) < 25) == pays


class Faulty(Guesses):
    """Drafter without memory after its third draft."""

    closed = False

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        if len(self.lengths) == 3:
            raise MemoryError
        return super().draft(tokens, limit)

    def close(self) -> None:
        self.closed = True


def test_a_drafter_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(draft_max=8)
    drafters: list[Faulty] = []

    def create(n: int) -> Faulty:
        program: FakeProgram = simulation.program
        drafters.append(Faulty(program, n, simulation.drafted))
        return drafters[-1]

    simulation.scheduler._drafts._source = DraftSource(create)
    simulation.submit(request("a"))
    with caplog.at_level(logging.WARNING):
        simulation.run()
    assert simulation.result("a") == alone(request("a"))
    assert "no more drafts for the request a" in caplog.text
    assert len(simulation.drafted) == 3
    assert drafters[0].closed


# --- with a real model


@pytest.fixture(scope="module", params=["sliding windows", "recurrent states"])
def model(request: pytest.FixtureRequest, tiny_gguf: TinyGguf, plugins: Plugins) -> Iterator[Model]:
    windows = request.param == "sliding windows"
    file = tiny_gguf("gemma3", n_layer=6, context_length=400) if windows else tiny_gguf("qwen35")
    with load_model(file, plugins=plugins, engine=default_engine()) as one:
        yield one


def run(model: Model, wanted: list[GenerationRequest], source: DraftSource | None, **options: Any) -> dict[str, Any]:
    """Ids and log-probabilities of tokens by request; the number of drafted ones."""
    found, drafted, _ = counted(model, wanted, source, **options)
    return {**found, "drafted": drafted}


def counted(
    model: Model, wanted: list[GenerationRequest], source: DraftSource | None, **options: Any
) -> tuple[dict[str, Any], int, int]:
    """Tokens as by `run`; the numbers of drafted and of accepted ones.

    Without a clock, drafts are as long as they can be, whatever time they take.
    """
    scheduler = Scheduler(model, EngineSettings(n_ctx=160, draft_max=8), drafts=source, **options)
    found: dict[str, Any] = {one.id: [] for one in wanted}
    for one in wanted:
        scheduler.submit(one)
    longest = patch.object(Drafts, "_best_length", lambda _self, _draft, limit, *_: limit)
    with nullcontext() if "clock" in options else longest:
        while scheduler.busy:
            for state, event in scheduler.step():
                if isinstance(event, TextDelta):
                    found[state.message.id] += [(event.index, token.id, token.logprob) for token in event.tokens]
    scheduler.close()
    counters = scheduler.counters
    rows = {name: sorted(rows, key=lambda row: row[0]) for name, rows in found.items()}
    return rows, counters.draft_tokens, counters.draft_tokens_accepted


def requests(n: int, **fields: Any) -> list[GenerationRequest]:
    prompt = tuple(LONG[:24]) * 2
    return [
        GenerationRequest(
            id=str(i), model="m", prompts=(prompt[i:],), seed=i, max_tokens=60, ignore_eos=True,
            params=SamplingParams(temperature=0.0 if i % 2 else 0.3, n_probs=1), n=1 + i % 2, **fields,
        )
        for i in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 4])
def test_texts_are_those_without_drafts(model: Model, n: int) -> None:
    plain = run(model, requests(n), None)
    lookup = run(model, requests(n), DraftSource(partial(PromptLookup, min_ngram=1)))
    own = run(model, requests(n), DraftSource(partial(DraftModel, model, min_probability=0.0)))
    assert lookup.pop("drafted") > 0
    assert own.pop("drafted") > 0
    assert plain.pop("drafted") == 0
    assert lookup == own == plain
    wanted = [attrs.evolve(one, prediction=ids_of(plain[one.id])) for one in requests(n)]
    predicted = run(model, wanted, None)
    assert predicted.pop("drafted") > 0
    assert predicted == plain


def ids_of(rows: list[tuple[int, int, float]]) -> tuple[int, ...]:
    """Token ids of the first choice."""
    return tuple(token for choice, token, _ in rows if not choice)


def test_lora_adapters_apply_to_drafted_tokens(tiny_gguf: TinyGguf, plugins: Plugins, tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a.gguf", tiny_gguf(), seed="a")
    with load_model(tiny_gguf(), plugins=plugins, engine=default_engine()) as model:
        adapter = model.load_adapter(file)
        source = DraftSource(partial(PromptLookup, min_ngram=1))
        wanted = [*requests(1, adapters=((0, 1.0),)), *requests(2)[1:]]
        plain, drafted = (run(model, wanted, one, adapters=[adapter]) for one in (None, source))
        assert drafted.pop("drafted") > plain.pop("drafted") == 0
        assert plain == drafted
        assert plain["0"] != run(model, requests(1), None)["0"]


def test_models_are_served_with_the_drafts_of_their_settings(tiny_gguf: TinyGguf) -> None:
    plain, other = tiny_gguf("gqa", tokenizer="spm"), tiny_gguf("gqa")
    with pytest.raises(InvalidRequestError, match="has another vocabulary than the model"):
        load(ModelSource("m", plain, draft=other), EngineSettings(threads=1))
    for settings, draft in ((EngineSettings(threads=1, lookup=True, draft_max=3), None), (EngineSettings(), plain)):
        loaded = load(ModelSource("m", plain, draft=draft), settings)
        source = loaded.scheduler._drafts._source
        assert source is not None
        assert loaded.scheduler._drafts._max_tokens == settings.draft_max
        drafter = source.create(3)
        assert isinstance(drafter, DraftModel if draft else PromptLookup)
        loaded.close()
        assert loaded.draft is None or loaded.draft.closed


@pytest.mark.parametrize("name", ["glm4moe_nextn", "qwen35_nextn"])
def test_heads_draft_with_the_prompts_and_never_change_texts(name: str, tiny_gguf: TinyGguf, plugins: Plugins) -> None:
    heads: list[tuple[MtpHead, list[Any]]] = []
    with load_model(tiny_gguf(name, n_layer=2), plugins=plugins, engine=default_engine()) as model:

        def create(n: int) -> MtpHead:
            head, calls = MtpHead(model, n, min_probability=0.0), list[Any]()
            take = head.take_hidden

            def noted(position: int, tokens: Any, states: Any, n_drafted: int, sequence: Any) -> None:
                calls.append((position, len(tokens), n_drafted))
                take(position, tokens, states, n_drafted, sequence)

            head.take_hidden = noted  # type: ignore[method-assign]
            heads.append((head, calls))
            return head

        wanted = requests(4)
        plain, drafted = (run(model, wanted, one) for one in (None, DraftSource(create, reads_prompts=True)))
        assert drafted.pop("drafted") > plain.pop("drafted") == 0
        assert plain == drafted
        assert heads[0][1][0] == (0, 48, 0), "the prompt is the first that the head takes"
        assert any(n_drafted for _, calls in heads for *_, n_drafted in calls)
        pool = model._nextn_pool
        assert pool is not None
        assert pool.n_used_bytes == 0, "the heads of texts that have ended are closed"


def test_models_are_served_with_their_heads(tiny_gguf: TinyGguf) -> None:
    with pytest.raises(InvalidRequestError, match="has no multi-token-prediction head"):
        load(ModelSource("m", tiny_gguf(), draft="mtp"), EngineSettings(threads=1))
    file = tiny_gguf("glm4moe_nextn", n_layer=2)
    loaded = load(ModelSource("m", file, draft="mtp"), EngineSettings(threads=1, draft_max=3, n_ctx=99))
    source = loaded.scheduler._drafts._source
    assert source is not None
    assert source.reads_prompts
    drafter = source.create(loaded.scheduler._drafts._max_tokens)
    assert isinstance(drafter, HeadDrafter)
    assert (drafter.max_tokens, drafter._context._cache.seq_len, loaded.draft) == (3, 99, None)
    loaded.close()


def test_a_model_is_served_with_a_head_of_another_file(tmp_path: Path, plugins: Plugins, tiny_gguf: TinyGguf) -> None:
    path = tiny_gguf("gqa", n_layer=3)
    head = write_eagle3(tmp_path / "head.gguf")
    loaded = load(ModelSource("m", path, draft=head), EngineSettings(threads=1, draft_max=4))
    source = loaded.scheduler._drafts._source
    assert source is not None
    assert source.reads_prompts
    assert isinstance(loaded.draft, Head)
    assert source.pool is loaded.draft.pool
    loaded.close()
    with load_model(path, plugins=plugins, engine=default_engine()) as model, model.load_draft(head) as found:
        assert isinstance(found, Head)
        create = partial(HeadDrafter, found, min_probability=0.0)
        wanted = requests(4)
        sources = None, DraftSource(create, True, found.pool)
        plain, drafted = (run(model, wanted, one) for one in sources)
        assert drafted.pop("drafted") > plain.pop("drafted") == 0
        assert plain == drafted
        assert found.pool.n_used_bytes == 0


def test_acceptance_of_assistants_follows_their_quality(tmp_path: Path, plugins: Plugins, tiny_gguf: TinyGguf) -> None:
    """Model whose next token depends on the last one alone."""
    random = np.random.RandomState(3)
    follows, table = random.permutation(128), random.standard_normal((128, 64)).astype(np.float32)
    output = np.empty_like(table)
    output[follows] = 0.05 * table
    silent = {
        f"blk.{i}.{name}": np.zeros((rows, columns), np.float32)
        for i in range(3)
        for name, rows, columns in (("ffn_down.weight", 64, 96), ("attn_output.weight", 64, 128 if i == 2 else 64))
    }
    tensors = silent | {"token_embd.weight": table, "output.weight": output, "output_norm.weight": np.ones(64)}
    path = tiny_gguf("gemma4", untied=True, tensors=tensors)
    project, noise = random.standard_normal((32, 64)).astype(np.float32), random.standard_normal((128, 32))
    project_last = np.hstack([project, np.zeros((32, 64), np.float32)])
    right = np.empty((128, 32))
    right[follows] = table @ project.T
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    shares = []
    with load_model(path, plugins=plugins, engine=default_engine()) as model:
        expected, *_ = counted(model, requests(6), None)
        for guesses in (right, right + 0.35 * noise, np.roll(right, 1, axis=0)):
            tensors = {"nextn.pre_projection.weight": project_last, "token_embd.weight": guesses.astype(np.float32)}
            head = model.load_draft(write_assistant(tmp_path / "head.gguf", tensors=silent_head() | tensors))
            assert isinstance(head, Head)
            create = partial(HeadDrafter, head, min_probability=0.0)
            source = DraftSource(lambda _, create=create: create(4), True, head.pool)
            texts, drafted, accepted = counted(model, requests(6), source, clock=even_clock())
            assert texts == expected
            shares.append(accepted / drafted)
    assert shares[0] > 0.9
    assert 0.1 < shares[1] < 0.9
    assert shares[2] < 0.1


def silent_head() -> dict[str, np.ndarray]:
    """Tensors of an assistant whose blocks add nothing."""
    found = {"output_norm.weight": np.ones(32, np.float32)}
    for i, n_q in enumerate((64, 64, 128)):
        found |= {f"blk.{i}.attn_output.weight": np.zeros((32, n_q), np.float32)}
        found |= {f"blk.{i}.ffn_down.weight": np.zeros((32, 48), np.float32)}
        found |= {f"blk.{i}.layer_output_scale.weight": np.ones(1, np.float32)}
    return found


def test_texts_whose_drafter_cannot_be_made_have_no_drafts(caplog: pytest.LogCaptureFixture) -> None:
    def fail(n: int) -> Guesses:
        raise MemoryError

    for reads_prompts in (False, True):
        simulation = Simulation(draft_max=8)
        simulation.scheduler._drafts._source = DraftSource(fail, reads_prompts)
        simulation.submit(request("a"))
        with caplog.at_level(logging.WARNING):
            simulation.run()
        assert simulation.result("a") == alone(request("a"))
        assert "no drafts for the request a" in caplog.text
        caplog.clear()
