"""Continuous batching: steps of bounded time for many requests of one model.

`planning` chooses what a step evaluates, `lifecycle` counts and ends requests. All methods but `submit`, `cancel`,
`stats` and the properties are for one thread. Which tokens are drawn depends on the request, its seed and the model
only: results of the engine do not depend on what shares a step, so that pieces, cached prefixes, preemption and the
order of requests change times alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from llamacli.chat.logprobs import token_logprob
from llamacli.engine.adapters import Adapter, Adapters, key_of
from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import OutOfMemoryError
from llamacli.generation.costs import StepCost
from llamacli.generation.evaluation import Chunk, Logits, evaluate_each
from llamacli.kv import N_BATCH
from llamacli.sampling import Candidates, SamplerChain, SamplerState, build_chain
from llamacli.sampling.logprobs import log_probabilities
from llamacli.serve.cache import CacheMemory
from llamacli.serve.checks import check_request, expect_adapters
from llamacli.serve.drafts import DraftSource, ServedDrafts
from llamacli.serve.draws import Draw, Drawer
from llamacli.serve.errors import QueueTimeoutError, ServeError
from llamacli.serve.lanes import Job, Lane, Ticket, seed_of_choice
from llamacli.serve.lifecycle import Lifecycle
from llamacli.serve.metrics import Counters, ModelStats, SlotStats
from llamacli.serve.planning import Planner
from llamacli.serve.queue import FairQueue
from llamacli.serve.requests import (
    Embedding,
    Event,
    GenerationRequest,
    PromptLogprobs,
    Request,
    TokenLogprob,
)
from llamacli.serve.running import Running
from llamacli.serve.settings import EngineSettings
from llamacli.serve.texts import ChoiceText
from llamacli.tools.embedding import Pooling, pool_states

_MAX_RETRY = 60


class Scheduler:
    """Scheduler of one model's requests.

    - `memory`: its cache. `cost`: the time of its steps.
    - `queue`: prompts that wait. `running`: those that were admitted, and texts.
    - `pooling`: that of embeddings; None refuses them. `drawer`: draws the tokens of a step.
    - `adapters`: LoRA adapters of the model; requests name them by their index.
    - `drafts`: maker of drafters for speculative decoding; None drafts nothing.

    `clock` gives seconds, and may be a fake one.
    """

    def __init__(
        self,
        model: CompiledModel,
        settings: EngineSettings,
        *,
        pooling: Pooling | None = None,
        drawer: Drawer | None = None,
        adapters: Sequence[Adapter] = (),
        drafts: DraftSource | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model, self.settings, self.pooling, self._clock = model, settings, pooling, clock
        self.memory = CacheMemory(model, settings, None if drafts is None else drafts.pool)
        self.cost, self.counters = StepCost(), Counters()
        self.queue: FairQueue[Job] = FairQueue(
            settings.max_queue,
            settings.max_queue_tokens,
            settings.max_per_key,
            retry_after=self._retry_after,
            n_free=lambda: max(0, self.n_places - self.running.n_slots),
        )
        self.running = Running(self.memory, self.counters)
        self._lifecycle = Lifecycle(self.queue, self.running, self.counters, clock)
        self._drawer, self._adapters = drawer or Drawer(), tuple(adapters)
        self._drafts = ServedDrafts(drafts, model, self.memory, self.cost, self.counters, clock)
        self._planner = Planner(model, settings, self.memory, self.running, self.cost, self._drafts, self._lifecycle)
        self._ready: list[tuple[Lane, Logits]] = []  # lanes whose next tokens are drawn in this step, and their logits
        self._evaluated_s = 0.0
        self._orders = itertools.count()

    # --- from any thread

    def submit(self, request: Request, target: Any = None) -> Ticket:
        """Put a request into the queue; its ticket has the target.

        Raises what `llamacli.serve.requests.Engine.submit` raises for it.
        """
        n_ctx, most = self.memory.n_ctx, self.settings.max_running
        check_request(request, self.model, n_ctx=n_ctx, max_running=most, embeds=self.embeds)
        generation = request if isinstance(request, GenerationRequest) else None
        max_tokens, n = (generation.max_tokens, generation.n) if generation else (0, 1)
        adapters = self._adapters_of(request)
        chain = self._chain(generation) if generation else None
        ticket = Ticket(
            request,
            self._clock(),
            n_prompt=sum(map(len, request.prompts)),
            n_open=n * len(request.prompts),
            n_unprompted=len(request.prompts),
            target=target,
        )
        limits = [limit for limit in (max_tokens, self.settings.max_tokens) if limit is not None]
        with self.queue.lock:
            jobs = [
                Job(ticket, i, next(self._orders), prompt, n, min([*limits, n_ctx - len(prompt)]), chain, adapters)
                for i, prompt in enumerate(request.prompts)
            ]
            with self._counted_refusals():
                self.queue.put(jobs)
        return ticket

    def expect_room(self) -> None:
        """Raise QueueFullError if the queue has no room for any request."""
        with self._counted_refusals():
            self.queue.expect_room()

    def cancel(self, ticket: Ticket) -> None:
        """End a request at the next step; no event of it follows."""
        ticket.cancelled = True

    @property
    def embeds(self) -> bool:
        """True if the model has embeddings."""
        return self.pooling is not None and self.model.program.has_hidden

    @property
    def busy(self) -> bool:
        """True if a step would do something."""
        return bool(len(self.running) or len(self.queue))

    @property
    def n_running(self) -> int:
        """Texts and prompts that run or are preempted."""
        return len(self.running)

    @property
    def n_places(self) -> int:
        """Texts that may run at once, by the measured time of steps."""
        return self._planner.n_places

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens of waiting and running requests, not evaluated yet."""
        return self.queue.n_tokens + sum(lane.n_missing for lane in list(self.running.lanes) if lane.text is None)

    def adapters_key(self, request: Request) -> str:
        """Key of a request's LoRA adapters: `KVSequence.adapters` of its sequences."""
        return key_of(self._adapters_of(request))

    def stats(self) -> ModelStats:
        """Present numbers."""
        memory, now = self.memory, self._clock()
        running = self.running
        lanes = [*((lane, lane.state) for lane in [*running.lanes]), *((one, "preempted") for one in running.preempted)]
        return self.counters.snapshot(
            running=len(lanes),
            waiting=self.queue.n_requests,
            prompt_tokens_waiting=self.queue.n_tokens,
            kv_pages_used=memory.pool.n_used_bytes // memory.page_bytes,
            kv_pages_total=memory.max_bytes // memory.page_bytes,
            kv_pages_cached=memory.prefixes.evictable_bytes // memory.page_bytes,
            slots=tuple(
                SlotStats(
                    lane.ticket.request.id,
                    state,
                    len(lane.job.prompt),
                    lane.ticket.n_cached,
                    0 if lane.text is None else lane.text.n_tokens,
                    now - lane.ticket.submitted_at,
                )
                for lane, state in lanes
            ),
        )

    @contextlib.contextmanager
    def _counted_refusals(self) -> Iterator[None]:
        try:
            yield
        except ServeError as error:
            self.counters.refused[str(error.code)] += 1
            raise

    def _adapters_of(self, request: Request) -> Adapters:
        """LoRA adapters of a request."""
        given = dict(request.adapters)
        expect_adapters(given, len(self._adapters))
        return self.model.check_adapters([(self._adapters[number], scale) for number, scale in given.items()])

    def _chain(self, request: GenerationRequest) -> SamplerChain:
        if isinstance(request.params, SamplerChain):
            return request.params
        return build_chain(request.params, self.model.tokenizer, self.model.find_sampler)

    def _retry_after(self) -> int:
        """Seconds until the queue is about half as long, 1 to 60."""
        seconds = self.cost.seconds(N_BATCH) / N_BATCH * self.queue.n_tokens / 2
        return max(1, min(_MAX_RETRY, math.ceil(seconds)))

    # --- steps

    def step(self) -> list[tuple[Ticket, Event]]:
        """Run one step; the events of it, in order."""
        now = self._clock()
        self._drop(now)
        self._admit(now)
        plan = self._planner.plan()
        if plan:
            self._evaluated_s = 0.0
            for kind in sorted(dict.fromkeys(lane.kind for lane, _ in plan), key=lambda kind: kind[0]):
                part = [(lane, n) for lane, n in plan if lane.kind == kind and lane in self.running.lanes]
                if part:
                    self._run(part, hidden=kind[0])
            self._draw_ready()
            self._planner.observe_other(self._clock() - now - self._evaluated_s)
        return self._lifecycle.take_events()

    def fail(self, error: ServeError, *, waiting_only: bool = False) -> list[tuple[Ticket, Event]]:
        """End all requests with an error, or those that wait; the events."""
        for job in self.queue.remove_where(lambda job: not waiting_only or job.ticket.admitted_at is None):
            self._lifecycle.fail(job.ticket, error)
        if not waiting_only:
            for lane in self.running:
                self._lifecycle.fail(lane.ticket, error)
        return self._lifecycle.take_events()

    def close(self) -> None:
        """Free the cache; the model stays open."""
        self.running.close()
        self.memory.prefixes.clear()

    # --- leaving and entering

    def _drop(self, now: float) -> None:
        """End requests that were cancelled, or whose time is over."""
        settings = self.settings

        def leaves(job: Job) -> bool:
            waited = job.ticket.admitted_at is None and now - job.ticket.submitted_at > settings.queue_timeout
            return job.ticket.cancelled or waited

        for job in self.queue.remove_where(leaves):
            if job.ticket.cancelled:
                self._lifecycle.cancel(job.ticket, "waiting")
            else:
                seconds = f"{settings.queue_timeout:g} seconds"
                error = QueueTimeoutError(f"the request waited for {seconds}", retry_after=self._retry_after())
                self._lifecycle.fail(job.ticket, error)
        for lane in self.running:
            if lane.ticket.cancelled:
                self._lifecycle.cancel(lane.ticket, "preempted" if lane in self.running.preempted else lane.state)
        if settings.request_timeout is not None:
            late = [lane for lane in self.running if self._is_late(lane, now)]
            for lane in late:
                self._time_out(lane)

    def _is_late(self, lane: Lane, now: float) -> bool:
        limit = self.settings.request_timeout
        return limit is not None and now - (lane.ticket.admitted_at or now) > limit

    def _time_out(self, lane: Lane) -> None:
        """End a text by time, or all texts after an unfinished prompt."""
        generation = lane.job.generation
        if generation is None:
            self._lifecycle.fail(lane.ticket, QueueTimeoutError("the request took too long"))
            return
        texts = [lane.text] if lane.text else [self._text(lane.job, k) for k in range(lane.job.n_choices)]
        for text in texts:
            n_reasoning = text.n_reasoning
            self._lifecycle.emit(lane.ticket, *text.finish("length", timed_out=True))
            lane.ticket.n_reasoning += text.n_reasoning - n_reasoning
            self._lifecycle.end_choice(lane, text)
        self.running.leave(lane)

    def _admit(self, now: float) -> None:
        """Start preempted lanes, then waiting prompts, as memory allows."""
        self.running.resume()
        n_places = self.n_places
        while not self.running.preempted and (job := self.queue.peek()) is not None:
            if self.running.n_slots + job.n_choices > n_places:
                return
            sequence = self.memory.new_sequence(key_of(job.adapters))
            lane = Lane(job, list(job.prompt), sequence)
            if not lane.wants_rows:
                lane.n_served = self.memory.reuse(sequence, lane.tokens)
            if not self.running.fits(lane.n_missing):
                sequence.close()
                return
            self.queue.take()
            self.running.enter(lane)
            self._drafts.begin_prompt(lane)
            self._lifecycle.count_cached(lane, lane.n_served)
            lane.n_served = 0
            if job.ticket.admitted_at is None:
                self._lifecycle.admit(job.ticket, now)

    # --- evaluation

    def _run(self, plan: Sequence[tuple[Lane, int]], *, hidden: bool) -> None:
        """Evaluate pieces of lanes, and go on with each."""
        chunks = [self._chunk(lane, n) for lane, n in plan]
        n_rows, started = sum(n for _, n in plan), self._clock()
        results = evaluate_each(self.model, chunks, hidden=hidden)
        seconds = self._clock() - started
        self._evaluated_s += seconds
        self.cost.observe(n_rows, seconds)
        self.counters.observe("step_seconds", seconds)
        self.counters.observe("step_rows", n_rows)
        for (lane, n), rows in zip(plan, results, strict=True):
            if lane.ticket.closed or lane not in self.running.lanes:
                continue  # another choice of the request has failed
            if isinstance(rows, OutOfMemoryError) and len(self.running.lanes) > 1:
                self.running.preempt(lane)  # the system has less memory than the limit allows
            elif isinstance(rows, Exception):
                self._lifecycle.fail_unexpectedly(lane.ticket, rows)
            else:
                self._advance(lane, n, rows)

    def _chunk(self, lane: Lane, n: int) -> Chunk:
        """The next n tokens of a lane, drafted ones included."""
        start, n_ahead = lane.n_cached, lane.n_drafted
        reads = lane.state == "prefill" and n > 1 and n == lane.n_missing
        keep = self.memory.keep if reads and self.memory.pool.layout.recurrent and not lane.wants_rows else None
        tokens = lane.tokens[start : start + n - n_ahead]
        if lane.draft is not None:
            tokens += lane.draft.tokens
        ids, n_last = np.array(tokens, np.int32), self._n_wanted(lane, n)
        return Chunk(lane.sequence, ids, lane.job.adapters, n_last, n_ahead, lane.take_hidden, keep)

    def _n_wanted(self, lane: Lane, n: int) -> int:
        """Number of last tokens of a piece whose rows are wanted."""
        if lane.wants_rows:
            return n
        if lane.n_drafted:
            return 1 + lane.n_drafted
        return int(n == lane.n_missing and lane.n_left > 0)

    def _advance(self, lane: Lane, n: int, rows: Logits) -> None:
        """Go on with a lane after a piece of it was evaluated."""
        if lane.text is None or (n > 1 + lane.n_again and not lane.n_drafted):
            lane.n_served += n
        lane.n_again = 0
        self._lifecycle.count_evaluated(lane, n)
        try:
            if lane.embeds:
                self._add_vector_rows(lane, rows)
            elif lane.text is not None:
                if lane.n_missing <= 0:
                    self._ready.append((lane, rows[-1 - lane.n_drafted :]))
            else:
                self._add_prompt_logprobs(lane, n, rows)
                if not lane.n_missing:
                    self._begin_texts(lane, rows)
        except Exception as error:
            self._lifecycle.fail_unexpectedly(lane.ticket, error)

    def _add_prompt_logprobs(self, lane: Lane, n: int, rows: Logits) -> None:
        """Add the log-probabilities that rows give to the next tokens."""
        generation = lane.job.generation
        if generation is None or generation.prompt_logprobs is None:
            return
        tokenizer, stop = self.model.tokenizer, lane.n_cached
        if not lane.logprobs:
            lane.logprobs.append(token_logprob(tokenizer, lane.tokens[0], None))
        n_top = max(1, generation.prompt_logprobs)

        def logprob(pair: tuple[Logits, int]) -> TokenLogprob:
            candidates = Candidates(np.random.default_rng(0))
            candidates.start(pair[0])
            return token_logprob(tokenizer, pair[1], log_probabilities(candidates, pair[1], n_top))

        pairs = list(zip(rows, lane.tokens[stop - n + 1 : stop + 1], strict=False))  # none follows the prompt's last
        lane.logprobs += self._drawer.map(logprob, pairs, rows.size)

    def _begin_texts(self, lane: Lane, rows: Logits) -> None:
        """Begin the texts after a whole prompt: fork the lane."""
        job, generation = lane.job, lane.job.generation
        assert generation is not None
        if lane.logprobs:
            self._lifecycle.emit(job.ticket, PromptLogprobs(job.number, tuple(lane.logprobs)))
        self._lifecycle.end_prompt(job.ticket)
        if not job.max_new:
            for k in range(job.n_choices):
                text = self._text(job, k)
                self._lifecycle.emit(job.ticket, *text.finish("length"))
                self._lifecycle.end_choice(lane, text)
            self.running.leave(lane)
            return
        if self.memory.pool.layout.has_windows:
            self.memory.keep(lane.sequence)  # a checkpoint: the window before the prompt's end will move on
        lanes = [lane]
        for k in range(1, job.n_choices):
            lanes.append(Lane(job, list(lane.tokens), self.memory.fork(lane.sequence), k, n_served=lane.n_served))
        for k, one in enumerate(lanes):
            one.sampler = SamplerState(
                seed_of_choice(generation.seed, k), self.model.tokenizer, self.model.find_sampler
            )
            one.text = self._text(job, k)
            self._drafts.begin(one)
            if one is not lane:
                self.running.enter(one)
        self._ready += [(one, rows[-1:].copy()) for one in lanes[1:]]
        self._ready.append((lane, rows[-1:]))

    def _text(self, job: Job, choice: int) -> ChoiceText:
        assert job.generation is not None
        index = job.number * job.n_choices + choice
        return ChoiceText(job.generation, index, self.model.tokenizer, job.prompt, job.max_new)

    def _draw_ready(self) -> None:
        """Draw the next tokens of all texts that have logits.

        A text whose draft has the token that was drawn goes on with the next row of its logits.
        """
        ready, self._ready = self._ready, []
        while ready := [pair for pair in ready if not pair[0].ticket.closed]:
            draws: list[Draw] = []
            for lane, rows in ready:
                assert lane.sampler is not None
                assert lane.text is not None
                assert lane.job.chain is not None
                draws.append((lane.sampler, lane.job.chain, lane.text, rows[0]))
            going_on = []
            for (lane, rows), token in zip(ready, self._drawer.draw(draws), strict=True):
                if lane.ticket.closed:
                    continue  # another choice of the request has failed
                if isinstance(token, Exception):
                    self._lifecycle.fail_unexpectedly(lane.ticket, token)
                    continue
                try:
                    if self._take(lane, token):
                        going_on.append((lane, rows[1:]))
                except Exception as error:
                    self._lifecycle.fail_unexpectedly(lane.ticket, error)
            ready = going_on

    def _take(self, lane: Lane, token: int) -> bool:
        """Go on with a text after a token was drawn for it.

        True if its draft has the token, so that there are logits for the next.
        """
        sampler, text = lane.sampler, lane.text
        assert sampler is not None
        assert text is not None
        self._lifecycle.count_drawn(lane, is_end=text.is_end(token))
        n_reasoning, n_tokens = text.n_reasoning, text.n_tokens
        events = text.feed(token, sampler.logprobs)
        lane.ticket.n_generated += text.n_tokens - n_tokens
        lane.ticket.n_reasoning += text.n_reasoning - n_reasoning
        self._lifecycle.emit(lane.ticket, *events)
        if text.finished is None:
            lane.tokens.append(token)
            if lane.draft is not None and lane.draft.accepts(token):
                return True
        self._drafts.settle(lane)
        if text.finished is not None:
            self.running.leave(lane)
            self._lifecycle.end_choice(lane, text)
        return False

    def _add_vector_rows(self, lane: Lane, rows: Logits) -> None:
        """Collect hidden states of an embedding, and pool them at its end."""
        lane.rows.append(rows)
        if lane.n_missing:
            return
        assert self.pooling is not None
        pooling = Pooling.MEAN if self.pooling is Pooling.NONE else self.pooling
        vector = pool_states(np.concatenate(lane.rows), pooling)
        self._lifecycle.emit(lane.ticket, Embedding(lane.job.number, vector))
        self._lifecycle.end_prompt(lane.ticket)
        self.running.leave(lane, keep=False)
        self._lifecycle.end_part(lane.ticket)
