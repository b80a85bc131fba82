"""Fake program and clock for tests of the scheduler, over real pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from llamacli.architecture import Config
from llamacli.engine.base import Prompts, QuantMode, Timings, wanted_rows
from llamacli.engine.compiled_model import CompiledModel
from llamacli.generation.drafters import MAX_DRAFT
from llamacli.gguf import Metadata
from llamacli.kv import KVSpec
from llamacli.ops.run import Span
from llamacli.sampling import SamplingParams
from llamacli.serve.drafts import DraftSource
from llamacli.serve.requests import Done, Event, Failed, GenerationRequest, TextDelta
from llamacli.serve.scheduler import Scheduler
from llamacli.serve.settings import EngineSettings
from llamacli.testing.vocabularies import vocabulary
from llamacli.tokenizer import tokenizer_from_metadata
from llamacli.tools.embedding import Pooler, Pooling

PAGE_BYTES = 2 * 4 * 16 * 4
"""Bytes of a page: keys and values of 4 float32 numbers for 16 tokens."""
POISON, NAN = 7, 8
"""Tokens that make an evaluation fail, and give logits that are NaN."""
EOS = 2
DRAWN = SamplingParams(temperature=1.0, top_k=40)
_N_SPECIAL = 259


class FakeClock:
    """Clock that only the fake program moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeProgram:
    """Program whose logits are a hash of the tokens in the pages.

    - `calls`: rows of each call. A call takes `base` + `per_row` * rows seconds of the clock.
    """

    states = (KVSpec(1, 4),)
    recurrent = ()
    max_positions = None
    has_hidden = True
    needs_whole_input = False
    has_encoder = False
    graph = SimpleNamespace(held=None)
    prompts = Prompts.REGISTERS

    def __init__(self, clock: FakeClock, n_vocab: int, base: float = 0.025, per_row: float = 0.002):
        self.clock, self.n_vocab, self.base, self.per_row = clock, n_vocab, base, per_row
        self.timings = Timings()
        self.calls: list[list[int]] = []

    def forward(
        self,
        tokens: np.ndarray,
        spans: Sequence[Span],
        n_last: Sequence[int],
        *,
        hidden: bool = False,
    ) -> np.ndarray:
        if POISON in tokens:
            raise RuntimeError("poisoned")
        wanted = {int(row) for row in wanted_rows(spans, n_last)}
        self.calls.append([span.n for span in spans])
        self.clock.now += self.base + self.per_row * len(tokens)
        rows, first = [], 0
        for span in spans:
            ids = tokens[first : first + span.n]
            cells = np.repeat(ids.astype(np.float32), 4).reshape(-1, 1, 4)
            span.sequence.write(0, span.start, cells, cells)
            held = span.sequence.read(0, span.start + span.n)[0][0, 0].astype(np.int64).tolist()
            for i in range(span.n):
                if first + i in wanted:
                    rows.append(self.row(held[: span.start + i + 1], hidden))
            first += span.n
        return np.array(rows, np.float32).reshape(len(rows), 8 if hidden else self.n_vocab)

    def row(self, prefix: Sequence[int], hidden: bool) -> np.ndarray:
        """Result after a prefix."""
        return _row(tuple(prefix), 8 if hidden else self.n_vocab, hidden)

    def rope_variant(self, seq_len: int) -> int:
        return 0

    def shift_keys(self, layer: int, keys: np.ndarray, by: int, seq_len: int) -> np.ndarray:
        raise NotImplementedError


@functools.lru_cache(maxsize=5000)
def _row(prefix: tuple[int, ...], width: int, hidden: bool) -> np.ndarray:
    row = np.random.default_rng(hash(prefix) & 0xFFFFFFFF).normal(0, 2, width)
    if not hidden:
        row[:EOS] = row[EOS + 1 : _N_SPECIAL] = -np.inf  # letters only, and the end
    if prefix[-1] == NAN:
        row[:] = np.nan
    return row.astype(np.float32)


class Guesses:
    """Drafter of the most probable tokens, some of them wrong.

    - `lengths`: those of its drafts.
    """

    def __init__(self, program: FakeProgram, max_tokens: int, lengths: list[int]):
        self.program, self.max_tokens, self.lengths = program, max_tokens, lengths

    def begin(self, model: CompiledModel) -> None:
        assert model.program is self.program

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        assert 0 < limit <= self.max_tokens
        found = list(tokens)
        for _ in range(limit):
            found.append(int(np.argmax(self.program.row(found, False))))
        found[-1] += len(tokens) % 5 == 0
        self.lengths.append(limit)
        return found[len(tokens) :]

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        assert 0 <= n_accepted <= n_drafted <= max(self.lengths)


def fake_model(clock: FakeClock, **costs: float) -> CompiledModel:
    """Model of 512 tokens of context over a fake program."""
    tokenizer = tokenizer_from_metadata(Metadata(vocabulary("spm")))
    n = tokenizer.n_vocab
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_head_kv": 1, "head_dim": 4, "n_ff": 8}
    config = Config(architecture="fake", n_vocab=n, context_length=512, **sizes)
    program: Any = FakeProgram(clock, n, **costs)
    return CompiledModel(config, tokenizer, program, QuantMode.FP32)


class Simulation:
    """Scheduler over a fake program, with all events by request id.

    With `draft_max` above 0 it drafts; `drafted` are the lengths of the drafts.
    """

    def __init__(
        self,
        *,
        costs: dict[str, float] | None = None,
        pooling: Pooling = Pooling.MEAN,
        draft_max: int = 0,
        **settings: Any,
    ):
        self.drafted: list[int] = []
        self.clock = FakeClock()
        self.model = fake_model(self.clock, **(costs or {}))
        self.scheduler = Scheduler(
            self.model,
            EngineSettings(**{"max_running": 8, "draft_max": draft_max or MAX_DRAFT, **settings}),
            pooling=Pooler(pooling),
            clock=self.clock,
            drafts=DraftSource(lambda n: Guesses(self.program, n, self.drafted)) if draft_max else None,
        )
        self.events: dict[str, list[Event]] = {}
        self.times: dict[str, list[float]] = {}
        self.step_seconds: list[float] = []

    @property
    def program(self) -> FakeProgram:
        program: Any = self.model.program
        return program

    @property
    def pool(self) -> Any:
        return self.scheduler.memory.pool

    def submit(self, request: Any) -> Any:
        self.events[request.id] = []
        self.times[request.id] = []
        return self.scheduler.submit(request)

    def step(self) -> None:
        started = self.clock.now
        for state, event in self.scheduler.step():
            self.events[state.message.id].append(event)
            self.times[state.message.id].append(self.clock.now)
        self.step_seconds.append(self.clock.now - started)

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 20_000) -> None:
        """Step until nothing is left to do, or the condition holds."""
        for _ in range(limit):
            if not self.scheduler.busy or until():
                return
            self.step()
        raise AssertionError(f"requests are still running after {limit} steps")

    def texts(self, name: str) -> dict[int, str]:
        """Texts of a request by choice."""
        found: dict[int, str] = {}
        for event in self.events[name]:
            if isinstance(event, TextDelta):
                found[event.index] = found.get(event.index, "") + event.text
        return found

    def result(self, name: str) -> list[Any]:
        """Parts of a reply that must not depend on other requests."""
        kept: list[Any] = [sorted(self.texts(name).items())]
        tokens = [
            (event.index, token)
            for event in self.events[name]
            if isinstance(event, TextDelta)
            for token in event.tokens
        ]
        kept.append(sorted(tokens, key=lambda pair: pair[0]))
        others = [e for e in self.events[name] if type(e).__name__ in ("Finished", "PromptLogprobs", "ToolCallDelta")]
        kept.append(sorted(others, key=repr))
        last = self.events[name][-1] if self.events[name] else None
        if isinstance(last, Done):
            kept.append((last.usage.prompt, last.usage.generated))
        elif isinstance(last, Failed):
            kept.append(type(last.error))
        return kept


def alone(request: GenerationRequest) -> list[Any]:
    """Result of a request that runs by itself."""
    simulation = Simulation()
    simulation.submit(request)
    simulation.run()
    return simulation.result(request.id)


def prompt_of(seed: int, n: int) -> tuple[int, ...]:
    """Random prompt of n tokens."""
    return tuple(np.random.default_rng(seed).integers(300, 330, n).tolist())


def request(name: str, n_prompt: int = 20, *, seed: int = 0, **fields: Any) -> GenerationRequest:
    """Request with a random prompt."""
    given = {"params": DRAWN, "max_tokens": 20, "seed": seed, "prompts": (prompt_of(seed, n_prompt),)}
    return GenerationRequest(id=name, model="m", **{**given, **fields})


def last(simulation: Simulation, name: str) -> Any:
    """Last event of a request."""
    return simulation.events[name][-1]


def kinds(simulation: Simulation, name: str) -> list[type]:
    """Types of the events of a request."""
    return [type(event) for event in simulation.events[name]]
