"""Requests from admission to their end: events, counted tokens, times."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llamacli.errors import GrammarError
from llamacli.serve.errors import BadRequestError, InternalError, ServeError
from llamacli.serve.lanes import Job, Lane, Ticket
from llamacli.serve.metrics import Counters
from llamacli.serve.queue import FairQueue
from llamacli.serve.requests import Admitted, Done, Event, Failed, GenerationRequest, PromptProgress, Timings
from llamacli.serve.running import Running
from llamacli.serve.texts import ChoiceText

_log = logging.getLogger(__name__)


class Lifecycle:
    """Lifecycle of a scheduler's requests.

    Counts what happens to them and collects their events, until `take_events`.
    """

    def __init__(self, queue: FairQueue[Job], running: Running, counters: Counters, clock: Callable[[], float]):
        self._queue, self._running, self._counters, self._clock = queue, running, counters, clock
        self._events: list[tuple[Ticket, Event]] = []

    def emit(self, ticket: Ticket, *events: Event) -> None:
        """Add events of a request, unless it was cancelled."""
        if not ticket.cancelled:
            self._events += [(ticket, event) for event in events]

    def take_events(self) -> list[tuple[Ticket, Event]]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # --- progress

    def admit(self, ticket: Ticket, now: float) -> None:
        """Begin a request whose first prompt leaves the queue."""
        ticket.admitted_at = now
        queued = now - ticket.submitted_at
        self._counters.observe("queue_seconds", queued)
        self._counters.observe("prompt_tokens", ticket.n_prompt)
        self.emit(ticket, Admitted(queued))

    def count_cached(self, lane: Lane, n: int) -> None:
        """Count tokens of a prompt that came from the prefix cache."""
        if n and lane.text is None and not lane.n_preempted:
            lane.ticket.n_cached += n
            lane.ticket.n_processed += n
            self._counters.prefix_tokens["true"] += n

    def count_evaluated(self, lane: Lane, n: int) -> None:
        """Count tokens of a prompt that were evaluated, and report them."""
        if lane.text is not None or lane.n_preempted:
            return
        ticket, request = lane.ticket, lane.ticket.request
        ticket.n_processed += n
        self._counters.prompt_tokens += n
        self._counters.prefix_tokens["false"] += n
        if isinstance(request, GenerationRequest) and request.progress:
            seconds = self._clock() - (ticket.admitted_at or 0.0)
            self.emit(ticket, PromptProgress(ticket.n_prompt, ticket.n_cached, ticket.n_processed, seconds))

    def count_drawn(self, lane: Lane, *, is_end: bool) -> None:
        """Count a token of a text, and its time."""
        self._counters.generation_tokens += not is_end
        now = self._clock()
        if lane.last_at is not None:
            self._counters.observe("inter_token_seconds", now - lane.last_at)
        elif not lane.ticket.n_generated:
            self._counters.observe("time_to_first_token_seconds", now - lane.ticket.submitted_at)
        lane.last_at = now

    # --- ends

    def end_prompt(self, ticket: Ticket) -> None:
        """Count a prompt as evaluated, with the last the prefill."""
        ticket.n_unprompted -= 1
        if not ticket.n_unprompted:
            ticket.prompted_at = self._clock()
            self._counters.observe("prefill_seconds", ticket.prompted_at - (ticket.admitted_at or ticket.prompted_at))

    def end_choice(self, lane: Lane, text: ChoiceText) -> None:
        """Count a text that has finished."""
        assert text.finished is not None
        self._counters.finished[text.finished.reason] += 1
        self._counters.observe("output_tokens", text.n_tokens)
        self.end_part(lane.ticket)

    def end_part(self, ticket: Ticket) -> None:
        """Count a choice or vector as ended, with the last the request."""
        ticket.n_open -= 1
        if ticket.n_open:
            return
        now, admitted = self._clock(), ticket.admitted_at or ticket.submitted_at
        prompted = now if ticket.prompted_at is None else ticket.prompted_at
        timings = Timings(admitted - ticket.submitted_at, prompted - admitted, now - prompted, ticket.n_preempted)
        self._counters.observe("decode_seconds", now - prompted)
        self._counters.observe("e2e_seconds", now - ticket.submitted_at)
        if ticket.n_generated > 1:
            per_token = (now - prompted) / (ticket.n_generated - 1)
            self._counters.observe("request_time_per_output_token_seconds", per_token)
        self.emit(ticket, Done(ticket.usage, timings))
        self._close(ticket)

    def fail(self, ticket: Ticket, error: ServeError) -> None:
        """End a request with an error."""
        if not ticket.closed:
            self.emit(ticket, Failed(error))
            self._counters.finished["error"] += 1
            self._close(ticket, keep=False)

    def fail_unexpectedly(self, ticket: Ticket, error: Exception) -> None:
        """End a request with an error that only the log names.

        A grammar that exceeds its limits at a later token is the client's fault, and named.
        """
        request = ticket.request
        if isinstance(error, GrammarError):
            self.fail(ticket, BadRequestError(str(error), None, "invalid_schema"))
            return
        _log.error("request %s failed", request.id, exc_info=error)
        self.fail(ticket, InternalError(f"the request {request.id} failed: the server's log says why"))

    def cancel(self, ticket: Ticket, phase: str) -> None:
        """End a request that its client has left in a phase."""
        if not ticket.closed:
            self._counters.cancelled[phase] += 1
            self._close(ticket)

    def _close(self, ticket: Ticket, *, keep: bool = True) -> None:
        """Remove all that is left of a request."""
        ticket.closed = True
        for lane in [lane for lane in self._running if lane.ticket is ticket]:
            self._running.leave(lane, keep=keep)
        self._queue.remove_where(lambda job: job.ticket is ticket)
        self._queue.closed(ticket.request.key)
