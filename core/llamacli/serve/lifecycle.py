"""Requests from admission to their end: events, counted tokens, times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from llamacli.errors import GrammarError, StageError
from llamacli.serve.errors import BadRequestError, InternalError, ServeError, StageLostError
from llamacli.serve.metrics import Counters
from llamacli.serve.queue import FairQueue
from llamacli.serve.requests import Admitted, Done, Event, Failed, PromptProgress, Timings, TokenTimings
from llamacli.serve.running import Running
from llamacli.serve.sequences import RequestState, SequenceState
from llamacli.serve.texts import ChoiceText

_log = logging.getLogger(__name__)


class Lifecycle:
    """Lifecycle of a scheduler's requests.

    Counts what happens to them and collects their events, until `take_events`.
    """

    def __init__(
        self, queue: FairQueue[SequenceState], running: Running, counters: Counters, clock: Callable[[], float]
    ):
        self._queue, self._running, self._counters, self._clock = queue, running, counters, clock
        self._events: list[tuple[RequestState, Event]] = []

    def emit(self, request: RequestState, *events: Event) -> None:
        """Add events of a request, unless it was cancelled."""
        if not request.cancelled:
            self._events += [(request, event) for event in events]

    def take_events(self) -> list[tuple[RequestState, Event]]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # --- progress

    def admit(self, request: RequestState, now: float) -> None:
        """Begin a request whose first prompt leaves the queue."""
        request.admitted_at = now
        queued = now - request.submitted_at
        self._counters.observe("queue_seconds", queued)
        self._counters.observe("prompt_tokens", request.n_prompt)
        self.emit(request, Admitted(queued))
        self._tell_progress(request, 0.0)

    def count_cached(self, sequence: SequenceState, n: int) -> None:
        """Count tokens of a prompt that came from the prefix cache."""
        if n and sequence.text is None and not sequence.n_preempted:
            sequence.request.n_cached += n
            sequence.request.n_processed += n
            self._counters.prefix_tokens["true"] += n

    def count_evaluated(self, sequence: SequenceState, n: int) -> None:
        """Count evaluated tokens of a prompt or draft; report the prompt's."""
        sequence.request.n_drafted += sequence.n_drafted
        self._counters.drafts += bool(sequence.n_drafted)
        self._counters.draft_tokens += sequence.n_drafted
        if sequence.text is not None or sequence.n_preempted:
            return
        request = sequence.request
        request.n_processed += n
        self._counters.prompt_tokens += n
        self._counters.prefix_tokens["false"] += n
        self._tell_progress(request, self._clock() - (request.admitted_at or 0.0))

    def _tell_progress(self, request: RequestState, seconds: float) -> None:
        if request.generation is not None and request.generation.progress:
            self.emit(request, PromptProgress(request.n_prompt, request.n_cached, request.n_processed, seconds))

    def count_drawn(self, sequence: SequenceState, *, is_end: bool) -> None:
        """Count a token of a text, and its time."""
        self._counters.generation_tokens += not is_end
        now = self._clock()
        if sequence.last_at is not None:
            self._counters.observe("inter_token_seconds", now - sequence.last_at)
        elif not sequence.request.n_generated:
            self._counters.observe("time_to_first_token_seconds", now - sequence.request.submitted_at)
        sequence.last_at = now

    def emit_text(self, request: RequestState, events: Sequence[Event]) -> None:
        """Add the events of a token, with the times where asked for."""
        if events and request.generation is not None and request.generation.timed:
            self.emit(request, TokenTimings(request.usage, self._timings(request, self._clock())))
        self.emit(request, *events)

    def count_accepted(self, request: RequestState) -> None:
        """Count a drafted token that came."""
        request.n_accepted += 1
        self._counters.draft_tokens_accepted += 1

    # --- ends

    def end_prompt(self, request: RequestState) -> None:
        """Count a prompt as evaluated, with the last the prefill."""
        request.n_unprompted -= 1
        if not request.n_unprompted:
            request.prompted_at = self._clock()
            self._counters.observe(
                "prefill_seconds", request.prompted_at - (request.admitted_at or request.prompted_at)
            )

    def end_choice(self, sequence: SequenceState, text: ChoiceText) -> None:
        """Count a text that has finished."""
        assert text.finished is not None
        self._counters.finished[text.finished.reason] += 1
        self._counters.observe("output_tokens", text.n_tokens)
        self._counters.n_tokens_max = max(self._counters.n_tokens_max, len(sequence.prompt) + text.n_tokens)
        self.end_part(sequence.request)

    def end_part(self, request: RequestState) -> None:
        """Count a choice or vector as ended, with the last the request."""
        request.n_open -= 1
        if request.n_open:
            return
        now = self._clock()
        timings = self._timings(request, now)
        self._counters.observe("decode_seconds", timings.generate_s)
        self._counters.observe("e2e_seconds", now - request.submitted_at)
        if request.n_generated > 1:
            per_token = timings.generate_s / (request.n_generated - 1)
            self._counters.observe("request_time_per_output_token_seconds", per_token)
        self.emit(request, Done(request.usage, timings))
        self._close(request)

    def _timings(self, request: RequestState, now: float) -> Timings:
        admitted = request.admitted_at or request.submitted_at
        prompted = now if request.prompted_at is None else request.prompted_at
        return Timings(admitted - request.submitted_at, prompted - admitted, now - prompted, request.n_preempted)

    def fail(self, request: RequestState, error: ServeError) -> None:
        """End a request with an error."""
        if not request.closed:
            self.emit(request, Failed(error))
            self._counters.finished["error"] += 1
            self._close(request, keep=False)

    def fail_unexpectedly(self, request: RequestState, error: Exception) -> None:
        """End a request with an error that only the log names.

        A grammar that exceeds its limits at a later token is the client's fault, and named.
        """
        if isinstance(error, GrammarError):
            self.fail(request, BadRequestError(str(error), None, "invalid_schema"))
            return
        name = request.message.id
        if isinstance(error, StageError):
            _log.error("request %s failed: %s", name, error)
            self.fail(request, StageLostError(str(error)))
            return
        _log.error("request %s failed", name, exc_info=error)
        self.fail(request, InternalError(f"the request {name} failed: the server's log says why"))

    def cancel(self, request: RequestState, phase: str) -> None:
        """End a request that its client has left in a phase."""
        if not request.closed:
            self._counters.cancelled[phase] += 1
            self._close(request)

    def _close(self, request: RequestState, *, keep: bool = True) -> None:
        request.closed = True
        for sequence in [sequence for sequence in self._running if sequence.request is request]:
            self._running.leave(sequence, keep=keep)
        self._queue.remove_where(lambda sequence: sequence.request is request)
        if not request.message.background:
            self._queue.closed(request.message.key)
