"""Continuous batching: steps of bounded time for many requests of one model.

`planning` chooses what a step evaluates, `lifecycle` counts and ends requests. All methods but `submit`, `cancel`,
`stats` and the properties are for one thread. Which tokens are drawn depends on the request, its seed and the model
only: results of the engine do not depend on what shares a step, so that chunks, cached prefixes, preemption and the
order of requests change times alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from operator import itemgetter
from typing import Any

import numpy as np

from llamacli.chat.logprobs import token_logprob
from llamacli.engine.adapters import Adapter, Adapters, key_of
from llamacli.engine.batching import Chunk, Logits, evaluate_each
from llamacli.engine.compiled_model import CompiledModel
from llamacli.engine.stages import DividedProgram
from llamacli.errors import FileChangedError, MediaError, OutOfMemoryError, StageError
from llamacli.generation.costs import StepCost
from llamacli.generation.drafting import hidden_taker
from llamacli.inputs import Inputs
from llamacli.kv import N_BATCH
from llamacli.media.encoder import LoadedEncoder
from llamacli.sampling import Candidates, SamplerChain, SamplerState, build_chain
from llamacli.sampling.logprobs import log_probabilities
from llamacli.serve.cache import CacheMemory
from llamacli.serve.checks import check_request, expect_adapters, with_encoder_inputs
from llamacli.serve.drafts import DraftSource, ServedDrafts
from llamacli.serve.errors import BadRequestError, NotSupportedError, QueueTimeoutError, ServeError, StageLostError
from llamacli.serve.lifecycle import Lifecycle
from llamacli.serve.metrics import Counters, ModelStats, SlotStats
from llamacli.serve.pictures import ServedPictures
from llamacli.serve.planning import Planner
from llamacli.serve.queue import FairQueue
from llamacli.serve.requests import (
    Embedding,
    EmbeddingRequest,
    Event,
    GenerationRequest,
    PromptLogprobs,
    Request,
    TokenLogprob,
)
from llamacli.serve.running import Running
from llamacli.serve.sampling_pool import SLOW_DRAW_S, SamplingPool
from llamacli.serve.sequences import RequestState, SequenceState, seed_of_choice
from llamacli.serve.settings import MAX_LOST, EngineSettings
from llamacli.serve.slots import Slots
from llamacli.serve.texts import ChoiceText
from llamacli.tools.embedding import Pooler
from llamacli.util.settings import Prompts

_MAX_RETRY = 60

_WAIT_S = 0.05
"""Seconds that a step without work waits for slow draws."""

_MAX_DRAWS_S = 60.0
"""CPU seconds of slow draws after which a request fails."""


class Scheduler:
    """Scheduler of one model's requests.

    - `memory`: its cache. `cost`: the time of its steps.
    - `queue`: prompts that wait. `running`: sequences that were admitted.
    - `pooling`: of embeddings; None refuses them. `sampling`: draws the tokens of a step.
    - `adapters`: LoRA adapters of the model; requests name them by their index.
    - `drafts`: maker of drafters for speculative decoding; None drafts nothing.
    - `encoder`: encoder of pictures; None refuses requests that have any.
    - `counters`: counters to go on with, such as those of an earlier load; None begins at 0.

    `clock` gives seconds, and may be a fake one.
    """

    def __init__(
        self,
        model: CompiledModel,
        settings: EngineSettings,
        *,
        pooling: Pooler | None = None,
        sampling: SamplingPool | None = None,
        adapters: Sequence[Adapter] = (),
        drafts: DraftSource | None = None,
        encoder: Callable[[], LoadedEncoder] | None = None,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model, self.settings, self.pooling, self._clock = model, settings, pooling, clock
        self.memory = CacheMemory(model, settings, None if drafts is None else drafts.pool)
        self.cost, self.counters = StepCost(), counters or Counters()
        self.queue: FairQueue[SequenceState] = FairQueue(
            settings.max_queue,
            settings.max_queue_tokens,
            settings.max_per_key,
            retry_after=self._retry_after,
            n_free=lambda: max(0, self.capacity - sum(one.n_slots for one in self.running if not one.background)),
        )
        self.running, self.slots = Running(self.memory, self.counters), Slots(self.memory)
        self._lifecycle = Lifecycle(self.queue, self.running, self.counters, clock)
        self._sampling, self.adapters = sampling or SamplingPool(), tuple(adapters)
        self._adapted = model.keep_program(self._scaled({}))  # compiled now, not in a step
        self._drafts = ServedDrafts(drafts, settings.draft_max, model, self.memory, self.cost, clock)
        self.sees = encoder is not None
        self.pictures = ServedPictures(encoder or _no_encoder, clock)
        self._planner = Planner(
            model, settings, self.memory, self.running, self.cost, self._drafts, self._lifecycle, self.pictures
        )
        self._renewal: Future[None] | None = None  # of lost pipeline stages
        self._ready: list[SequenceState] = []  # sequences to draw for in this step
        self._drawing: dict[Future[int | Exception], SequenceState] = {}  # slow draws, which run beside the steps
        self._evaluated_s = 0.0
        self._arrivals = itertools.count()

    # --- from any thread

    def submit(self, request: Request, target: Any = None) -> RequestState:
        """Put a request into the queue; its state has the target.

        Raises what `llamacli.serve.requests.Engine.submit` raises for it.
        """
        n_ctx, most = self.memory.n_ctx, self.settings.max_running
        request = with_encoder_inputs(request, self.model)
        if request.tiles and not self.sees:
            raise NotSupportedError(f"the model {request.model!r} has no encoder of pictures or sound")
        check_request(request, self.model, n_ctx=n_ctx, max_running=most, embeds=self.embeds)
        generation = request if isinstance(request, GenerationRequest) else None
        max_tokens, n = (generation.max_tokens, generation.n) if generation else (0, 1)
        adapters = self._adapters_of(request)
        chain = self._chain(generation) if generation else SamplerChain(())
        state = RequestState(
            request,
            self._clock(),
            n_prompt=sum(map(len, request.prompts)),
            n_open=n * len(request.prompts),
            n_unprompted=len(request.prompts),
            target=target,
        )
        limits = [limit for limit in (max_tokens, self.settings.max_tokens) if limit is not None]
        with self.queue.lock:
            prompts = [
                SequenceState(
                    state,
                    i,
                    next(self._arrivals),
                    ids,
                    n,
                    min([*limits, n_ctx - len(ids)]),
                    chain,
                    adapters,
                    has_ways=self.model.program.prompts is Prompts.TILES,
                )
                for i, ids in enumerate(request.prompts)
            ]
            with self._counted_refusals():
                self.queue.put(prompts)
            for ids in dict.fromkeys(request.prompts if generation else ()):
                self.memory.read_ahead([*ids], key_of(adapters))  # before a step takes the prompt
        return state

    def expect_room(self) -> None:
        """Raise QueueFullError if the queue has no room for any request."""
        with self._counted_refusals():
            self.queue.expect_room()

    def cancel(self, request: RequestState) -> None:
        """End a request at the next step; no event of it follows."""
        request.cancelled = True

    @property
    def embeds(self) -> bool:
        """True if the model has embeddings."""
        return self.pooling is not None and self.model.program.has_hidden

    @property
    def busy(self) -> bool:
        """True if a step would do something."""
        return bool(len(self.running) or len(self.queue))

    @property
    def has_lost(self) -> bool:
        """True from the loss of a pipeline stage until it is replaced."""
        program = self.model.program
        return self._renewal is not None or (isinstance(program, DividedProgram) and not program.is_whole)

    @property
    def has_clients(self) -> bool:
        """True if a request waits or runs that gives way to none."""
        first = self.queue.peek()
        return (first is not None and not first.background) or any(not one.background for one in self.running)

    @property
    def n_running(self) -> int:
        """Sequences that run or are preempted."""
        return len(self.running)

    @property
    def capacity(self) -> int:
        """Sequences that may run at once, by the measured time of steps."""
        return self._planner.capacity

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens of waiting and running requests, not evaluated yet."""
        return self.queue.n_tokens + sum(
            sequence.n_missing for sequence in list(self.running.sequences) if sequence.text is None
        )

    def adapters_key(self, request: Request) -> str:
        """Key of a request's LoRA adapters: `KVSequence.adapters` of its sequences."""
        return key_of(self._adapters_of(request))

    def stats(self) -> ModelStats:
        """Present numbers."""
        memory, now, running = self.memory, self._clock(), [*self.running]
        return self.counters.snapshot(
            running=len(running),
            waiting=self.queue.n_requests,
            prompt_tokens_waiting=self.queue.n_tokens,
            kv_pages_used=memory.pool.n_used_bytes // memory.page_bytes,
            kv_pages_total=memory.max_bytes // memory.page_bytes,
            kv_pages_cached=memory.prefixes.evictable_bytes // memory.page_bytes,
            slots=tuple(
                SlotStats(
                    sequence.request.message.id,
                    self._phase(sequence),
                    len(sequence.prompt),
                    sequence.request.n_cached,
                    0 if sequence.text is None else sequence.text.n_tokens,
                    now - sequence.request.submitted_at,
                )
                for sequence in running
            ),
        )

    def _phase(self, sequence: SequenceState) -> str:
        if sequence in self.running.preempted:
            return "preempted"
        return "decode" if sequence.decodes else "prefill"

    @contextlib.contextmanager
    def _counted_refusals(self) -> Iterator[None]:
        try:
            yield
        except ServeError as error:
            self.counters.refused[str(error.code)] += 1
            raise

    def _adapters_of(self, request: Request) -> Adapters:
        """LoRA adapters of a request.

        () for none, else all of the model, so that one program serves all requests.
        """
        given = dict(request.adapters)
        expect_adapters(given, len(self.adapters))
        if not self.model.check_adapters([(self.adapters[number], scale) for number, scale in given.items()]):
            return ()
        return self._scaled(given)

    def _scaled(self, scales: Mapping[int, float]) -> Adapters:
        """All adapters, in the order of their digests."""
        scaled = [(adapter, float(scales.get(i, 0.0))) for i, adapter in enumerate(self.adapters)]
        return tuple(sorted(scaled, key=lambda one: one[0].digest))

    def _chain(self, request: GenerationRequest) -> SamplerChain:
        if isinstance(request.params, SamplerChain):
            return request.params
        return build_chain(request.params, self.model.tokenizer, self.model.find_sampler)

    def _retry_after(self) -> int:
        """Seconds until the queue is about half as long, 1 to 60."""
        seconds = self.cost.seconds(N_BATCH) / N_BATCH * self.queue.n_tokens / 2
        return max(1, min(_MAX_RETRY, math.ceil(seconds)))

    # --- steps

    def step(self) -> list[tuple[RequestState, Event]]:
        """Run one step; the events of it, in order.

        Raises FileChangedError or StageError once the model's weights are lost: no step can follow. Sequences of a
        pipeline stage that was lost are preempted, and go on once another has taken its place.
        """
        now = self._clock()
        self._drop(now)
        if self._renewal is None and not self.running.sequences and self.has_lost:
            self._replay(StageError("a stage was lost"))
        if self._renewal is not None and not self._is_renewed(self._renewal):
            return self._lifecycle.take_events()
        if self._drawing:
            self._take_slow_draws()
        self._admit(now)
        plan = self._planner.plan()
        if not plan and (self._drawing or self._planner.reads):
            awaited: list[Future[Any]] = [*self._drawing, *self._planner.reads]
            wait(awaited, _WAIT_S, FIRST_COMPLETED)
        if plan:
            self._evaluated_s = 0.0
            parts: dict[tuple[bool, bool], list[tuple[SequenceState, int]]] = {}
            for sequence, n in plan:
                parts.setdefault(sequence.kind, []).append((sequence, n))
            try:
                for kind in sorted(parts, key=itemgetter(0)):
                    if part := [pair for pair in parts[kind] if pair[0] in self.running.sequences]:
                        self._run(part, hidden=kind[0])
            except StageError as error:
                self._replay(error)
            self._draw_ready()
            self._planner.observe(self._clock() - now - self._evaluated_s)
        if self._planner.waiting or self.pictures.tile is not None:
            self._encode_pictures(plans=bool(plan))
        return self._lifecycle.take_events()

    def _replay(self, error: StageError) -> None:
        """Have lost pipeline stages replaced, and all tokens evaluated again.

        A request that has lost as many as MAX_LOST fails: it may be the reason. Raises the error where nothing can be
        replaced.
        """
        if not isinstance(self.model.program, DividedProgram):
            raise error
        self._ready.clear()
        for request in {sequence.request.message.id: sequence.request for sequence in self.running.sequences}.values():
            request.n_lost += 1
            if request.n_lost >= MAX_LOST:
                self._lifecycle.fail(request, StageLostError(f"{error}; {request.n_lost} were lost during the request"))
        for sequence in [*self.running.sequences]:
            self.running.preempt(sequence)
        self.memory.forget_all()
        self._renewal = renewal = Future[None]()
        renew = functools.partial(_settle, renewal, self.model.program.renew)
        threading.Thread(target=renew, name="llamacli-renew", daemon=True).start()

    def _is_renewed(self, renewal: Future[None]) -> bool:
        """False while lost stages are replaced; raises what that raised."""
        if not wait([renewal], _WAIT_S).done:
            return False
        self._renewal = None
        renewal.result()
        return True

    def _encode_pictures(self, *, plans: bool) -> None:
        """Encode a part of a picture, if it is its turn."""
        waiting = [one for one in self._planner.waiting if one in self.running.sequences]
        if waiting:
            for sequence, error in self.pictures.encode(waiting, self._planner.picture_s):
                if not sequence.request.closed:
                    self._lifecycle.fail_unexpectedly(sequence.request, error)
            if not plans:
                self._planner.n_steps += 1
        self.pictures.drop_unwanted(self.running)

    def fail(self, error: ServeError, *, waiting_only: bool = False) -> list[tuple[RequestState, Event]]:
        """End all requests with an error, or those that wait; the events."""
        for prompt in self.queue.remove_where(lambda one: not waiting_only or one.request.admitted_at is None):
            self._lifecycle.fail(prompt.request, error)
        if not waiting_only:
            for sequence in self.running:
                self._lifecycle.fail(sequence.request, error)
        return self._lifecycle.take_events()

    def close(self) -> None:
        """Free the cache; the model stays open."""
        if self._renewal is not None:  # new stages are the model's to close
            wait([self._renewal])
        self.pictures.close()
        self.running.close()
        self.memory.close()
        self._adapted = None

    # --- leaving and entering

    def _drop(self, now: float) -> None:
        """End requests that were cancelled, or whose time is over."""
        settings = self.settings

        def leaves(prompt: SequenceState) -> bool:
            request = prompt.request
            waited = request.admitted_at is None and now - request.submitted_at > settings.queue_timeout
            return request.cancelled or (waited and not prompt.background)

        for prompt in self.queue.remove_where(leaves):
            if prompt.request.cancelled:
                self._lifecycle.cancel(prompt.request, "waiting")
            else:
                seconds = f"{settings.queue_timeout:g} seconds"
                error = QueueTimeoutError(f"the request waited for {seconds}", retry_after=self._retry_after())
                self._lifecycle.fail(prompt.request, error)
        for sequence in self.running:
            if sequence.request.cancelled:
                self._lifecycle.cancel(sequence.request, self._phase(sequence))
        for sequence in [sequence for sequence in self.running if self._is_late(sequence, now)]:
            self._time_out(sequence)

    def _is_late(self, sequence: SequenceState, now: float) -> bool:
        limit, generation = self.settings.request_timeout, sequence.request.generation
        if sequence.background:
            return False
        if generation is not None and generation.max_seconds is not None and sequence.text is not None:
            seconds = now - (sequence.request.prompted_at or now)
            if sequence.text.has_newline and seconds > generation.max_seconds:
                return True
        return limit is not None and now - (sequence.request.admitted_at or now) > limit

    def _time_out(self, sequence: SequenceState) -> None:
        """End a sequence by time, or all choices after an unfinished prompt."""
        generation = sequence.request.generation
        if generation is None:
            self._lifecycle.fail(sequence.request, QueueTimeoutError("the request took too long"))
            return
        texts = [sequence.text] if sequence.text else [self._text(sequence, k) for k in range(sequence.n_choices)]
        for text in texts:
            self._lifecycle.emit(sequence.request, *text.finish("length", timed_out=True))
            self._lifecycle.end_choice(sequence, text)
        self.running.leave(sequence)

    def _admit(self, now: float) -> None:
        """Start preempted sequences, then waiting prompts, as memory allows."""
        capacity, first = self.capacity, self.queue.peek()
        self.running.resume(capacity, background=first is None or first.background)
        while (sequence := self.queue.peek()) is not None:
            if any(sequence.background or not one.background for one in self.running.preempted):
                return
            if self.running.slots_before(sequence) + sequence.n_choices > capacity:
                return
            sequence.begin(self.memory.new_sequence(key_of(sequence.adapters)))
            n_reused = 0 if sequence.wants_rows else self.memory.reuse(sequence.cache, sequence.cell_keys)
            if not sequence.background:
                self.running.yield_slots(sequence.n_choices, capacity)
                fits = self.running.yield_pages(sequence.n_missing)
            else:
                fits = self.running.fits(sequence.n_missing)
            if not fits:
                sequence.cache.close()
                return
            self.queue.take(sequence)
            self.running.enter(sequence)
            self._drafts.begin(sequence)
            self._lifecycle.count_cached(sequence, n_reused)
            if sequence.request.admitted_at is None:
                self._lifecycle.admit(sequence.request, now)

    # --- evaluation

    def _run(self, plan: Sequence[tuple[SequenceState, int]], *, hidden: bool) -> None:
        chunks = [self._chunk(sequence, n) for sequence, n in plan]
        n_rows, started = sum([n for _, n in plan]), self._clock()
        results = evaluate_each(self.model.program_with, chunks, hidden=hidden)
        seconds = self._clock() - started
        self._evaluated_s += seconds
        self.cost.observe(n_rows, seconds)
        self.counters.observe("step_seconds", seconds)
        self.counters.observe("step_rows", n_rows)
        self.counters.observe("step_sequences", len(plan))
        for (sequence, n), rows in zip(plan, results, strict=True):
            if sequence.request.closed or sequence not in self.running.sequences:
                continue  # another choice of the request has failed
            if isinstance(rows, OutOfMemoryError) and len(self.running.sequences) > 1:
                self.running.preempt(sequence)  # the system has less memory than the limit allows
            elif isinstance(rows, FileChangedError | StageError) and not self.model.program.is_whole:
                raise rows
            elif isinstance(rows, Exception):
                self._lifecycle.fail_unexpectedly(sequence.request, rows)
            else:
                self._advance(sequence, n, rows)

    def _chunk(self, sequence: SequenceState, n: int) -> Chunk:
        start, n_ahead = len(sequence.cache.tokens), sequence.n_drafted
        reads = not sequence.decodes and n > 1 and n == sequence.n_missing
        keep = self.memory.keep if reads and self.memory.pool.layout.recurrent and not sequence.wants_rows else None
        tokens, take_hidden = sequence.context[start : start + n - n_ahead], None
        if sequence.draft is not None:
            tokens += sequence.draft.tokens
            take_hidden = hidden_taker(sequence.draft.drafter)
        ids: list[int] | Inputs = tokens
        contents = sequence.request.message.contents
        if contents is not None and (start < len(sequence.prompt) or sequence.request.has_positions):
            ids = contents.slice([*sequence.context, *tokens[len(tokens) - n_ahead :]], start, start + n)
        if sequence.wants_rows or n_ahead:
            n_last = n if sequence.wants_rows else 1 + n_ahead
        else:
            n_last = int(n == sequence.n_missing and sequence.n_left > 0)
        n_generated = max(0, min(n, start + n - len(sequence.prompt))) if sequence.has_ways else 0
        return Chunk(
            sequence.cache, ids, sequence.adapters, n_last, n_ahead, n_generated, keep, take_hidden=take_hidden
        )

    def _advance(self, sequence: SequenceState, n: int, rows: Logits) -> None:
        """Go on with a sequence after a chunk of it was evaluated."""
        self._lifecycle.count_evaluated(sequence, n)
        try:
            if sequence.embeds:
                self._add_vector_rows(sequence, rows)
            elif sequence.text is not None:
                if sequence.n_missing <= 0:
                    sequence.keep_logits(rows)
                    self._ready.append(sequence)
            else:
                self._add_prompt_logprobs(sequence, n, rows)
                if not sequence.n_missing:
                    self._begin_choices(sequence, rows)
        except Exception as error:
            self._lifecycle.fail_unexpectedly(sequence.request, error)

    def _add_prompt_logprobs(self, sequence: SequenceState, n: int, rows: Logits) -> None:
        """Add the log-probabilities that rows give to the next tokens."""
        generation = sequence.request.generation
        if generation is None or generation.prompt_logprobs is None:
            return
        tokenizer, stop = self.model.tokenizer, len(sequence.cache.tokens)
        if not sequence.logprobs:
            sequence.logprobs.append(token_logprob(tokenizer, sequence.context[0], None))
        n_top = max(1, generation.prompt_logprobs)

        def logprob(pair: tuple[Logits, int]) -> TokenLogprob:
            candidates = Candidates(np.random.default_rng(0))
            candidates.start(pair[0])
            return token_logprob(tokenizer, pair[1], log_probabilities(candidates, pair[1], n_top))

        following = sequence.context[stop - n + 1 : stop + 1]  # none follows the prompt's last
        pairs = list(zip(rows, following, strict=False))
        sequence.logprobs += self._sampling.map(logprob, pairs, rows.size)

    def _begin_choices(self, sequence: SequenceState, rows: Logits) -> None:
        """Begin the choices after a whole prompt: fork the sequence."""
        generation = sequence.request.generation
        assert generation is not None
        if sequence.logprobs:
            self._lifecycle.emit(sequence.request, PromptLogprobs(sequence.number, tuple(sequence.logprobs)))
        self._lifecycle.end_prompt(sequence.request)
        if not sequence.max_new:
            for k in range(sequence.n_choices):
                text = self._text(sequence, k)
                self._lifecycle.emit(sequence.request, *text.finish("length"))
                self._lifecycle.end_choice(sequence, text)
            self.running.leave(sequence)
            return
        if self.memory.pool.layout.has_windows:
            self.memory.keep(sequence.cache)  # a checkpoint: the window before the prompt's end will move on
        forks = [sequence.fork(k, self.memory.fork(sequence.cache)) for k in range(1, sequence.n_choices)]
        for k, one in enumerate([sequence, *forks]):
            seed = seed_of_choice(generation.seed, k)
            sampler = SamplerState(seed, self.model.tokenizer, self.model.find_sampler)
            one.begin_text(sampler, self._text(sequence, k))
            one.keep_logits(rows)
            self._drafts.begin(one)
            if one is not sequence:
                self.running.enter(one)
        self._ready += [*forks, sequence]

    def _text(self, sequence: SequenceState, choice: int) -> ChoiceText:
        request, index = sequence.request, sequence.number * sequence.n_choices + choice
        assert request.generation is not None
        text = ChoiceText(request.generation, index, self.model.tokenizer, sequence.prompt, sequence.max_new)
        request.texts.append(text)
        return text

    def _draw_ready(self) -> None:
        """Draw the next tokens of all sequences that have logits.

        A sequence whose draft has the token that was drawn has another draw.
        """
        ready, self._ready = self._ready, []
        for sequence in ready:
            if sequence.draw_s > SLOW_DRAW_S and not sequence.n_drafted:
                sequence.drawing = True
                self._drawing[self._sampling.draw_beside(sequence)] = sequence
        ready = [sequence for sequence in ready if not sequence.drawing]
        while ready:
            tokens = self._sampling.draw(ready, self.model.config.n_vocab)
            ready = [one for one, token in zip(ready, tokens, strict=True) if self._take(one, token)]
            for sequence in ready:
                self._lifecycle.count_accepted(sequence.request)

    def _take_slow_draws(self) -> None:
        for future in [future for future in self._drawing if future.done()]:
            sequence = self._drawing.pop(future)
            sequence.drawing = False
            if sequence.draws_s > _MAX_DRAWS_S and not sequence.request.closed:
                n = 0 if sequence.text is None else sequence.text.n_tokens
                error = BadRequestError(f"the grammar takes too long: {sequence.draws_s:.0f} s for {n} tokens")
                self._lifecycle.fail(sequence.request, error)
            elif any(one is sequence for one in self.running):  # neither cancelled nor ended by time
                self._take(sequence, future.result())

    def _take(self, sequence: SequenceState, token: int | Exception) -> bool:
        """Take a drawn token into its text, and go on behind it.

        True if its draft has the token, so that there are logits for the next. Errors end its request alone.
        """
        request, text = sequence.request, sequence.text
        if request.closed:
            return False  # another choice of the request has failed
        try:
            assert text is not None
            if isinstance(token, Exception):
                raise token
            self._lifecycle.count_drawn(sequence, is_end=token in text.end_ids)
            self._lifecycle.emit_text(request, sequence.take(token))
            if text.finished is None:
                return sequence.advance(token)
            sequence.settle()
            if (message := request.generation) is not None and message.slot is not None:
                self.slots.note(message.slot, sequence.cache)
            self.running.leave(sequence)
            self._lifecycle.end_choice(sequence, text)
        except Exception as error:
            self._lifecycle.fail_unexpectedly(request, error)
        return False

    def _add_vector_rows(self, sequence: SequenceState, rows: Logits) -> None:
        sequence.rows.append(rows)
        if sequence.n_missing:
            return
        request = sequence.request.message
        assert self.pooling is not None
        assert isinstance(request, EmbeddingRequest)
        vector = self.pooling.pool(np.concatenate(sequence.rows), request.pooling, normalize=request.normalize)
        self._lifecycle.emit(sequence.request, Embedding(sequence.number, vector))
        self._lifecycle.end_prompt(sequence.request)
        self.running.leave(sequence, keep=False)
        self._lifecycle.end_part(sequence.request)


def _settle(future: Future[None], function: Callable[[], None]) -> None:
    try:
        function()
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)


def _no_encoder() -> LoadedEncoder:
    raise MediaError("the model has no encoder of pictures")
