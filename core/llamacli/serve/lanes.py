"""State of requests in the scheduler: tickets, jobs and lanes."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.adapters import Adapters
from llamacli.engine.batching import TakeHidden
from llamacli.generation.drafting import hidden_taker
from llamacli.generation.drafts import Draft
from llamacli.kv import KVSequence
from llamacli.sampling import SamplerChain, SamplerState
from llamacli.serve.requests import EmbeddingRequest, GenerationRequest, Ids, Request, TokenLogprob, Usage
from llamacli.serve.texts import ChoiceText


@attrs.define(eq=False)
class Ticket:
    """Request that the scheduler has taken.

    - `target`: where its events go; the scheduler does not look at it.
    - `submitted_at`, `admitted_at`, `prompted_at`: times at which it came, left the queue, and had all of its prompts
      evaluated; None before.
    - `n_open`: choices and vectors that have not ended.
    - `n_cached`, `n_processed`: tokens of its prompts that came from the prefix cache, and that are done (with those).
    - `n_drafted`, `n_accepted`: tokens drafted for its texts, and those of them that came.
    - `cancelled`: set from any thread, seen at the next step.
    - `closed`: set when nothing of it is left.
    """

    request: Request
    submitted_at: float
    n_prompt: int
    n_open: int
    n_unprompted: int
    target: Any = None
    admitted_at: float | None = None
    prompted_at: float | None = None
    n_cached: int = 0
    n_processed: int = 0
    n_generated: int = 0
    n_reasoning: int = 0
    n_preempted: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    cancelled: bool = False
    closed: bool = False

    @property
    def usage(self) -> Usage:
        """Numbers of tokens so far."""
        return Usage(self.n_prompt, self.n_cached, self.n_generated, self.n_reasoning, self.n_drafted, self.n_accepted)


@attrs.define(eq=False)
class Job:
    """Prompt of a request, which waits in the queue.

    - `number`: index of the prompt in the request; `order`: its place among all that have come.
    - `n_choices`, `max_new`: texts to generate, and limit of the tokens of each.
    - `n_slots`: lanes that it takes beside the first, until it is forked.
    - `adapters`: LoRA adapters, with their scales.
    """

    ticket: Ticket
    number: int
    order: int
    prompt: Ids
    n_choices: int
    max_new: int
    chain: SamplerChain | None
    adapters: Adapters = ()
    n_slots: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.n_slots = self.n_choices - 1

    @property
    def key(self) -> str:
        """See `llamacli.serve.queue.Entry`."""
        return self.ticket.request.key

    @property
    def n_requests(self) -> int:
        """See `llamacli.serve.queue.Entry`."""
        return int(not self.number)

    @property
    def n_tokens(self) -> int:
        """See `llamacli.serve.queue.Entry`."""
        return len(self.prompt)

    @property
    def generation(self) -> GenerationRequest | None:
        """The request, if it is one of texts."""
        request = self.ticket.request
        return None if isinstance(request, EmbeddingRequest) else request


@attrs.define(eq=False)
class Lane:
    """Sequence that is evaluated: a prompt, then one choice after it.

    - `tokens`: all tokens so far; the cache, `sequence`, holds the first of them.
    - `sampler`, `text`: of a choice; None in a prompt that is not forked yet, and in embeddings.
    - `logprobs`, `rows`: those of the prompt so far, where they are asked for.
    - `last_at`: time of the last token.
    - `draft`: drafts of a choice, None without.
    - `n_again`: drafted tokens that came, but are to be evaluated again: recurrent states went back before the draft.
    """

    job: Job
    tokens: list[int]
    sequence: KVSequence
    choice: int = 0
    sampler: SamplerState | None = None
    text: ChoiceText | None = None
    n_preempted: int = 0
    n_served: int = 0
    last_at: float | None = None
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    rows: list[npt.NDArray[np.float32]] = attrs.field(factory=list)
    draft: Draft | None = None
    n_again: int = 0

    def __str__(self) -> str:
        return f"the request {self.ticket.request.id}"

    @property
    def ticket(self) -> Ticket:
        """Request of the lane."""
        return self.job.ticket

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of age, the oldest first."""
        return self.job.order, self.choice

    @property
    def n_cached(self) -> int:
        """Tokens that the cache holds."""
        return len(self.sequence.tokens)

    @property
    def n_missing(self) -> int:
        """Tokens to evaluate before the next draw."""
        return len(self.tokens) - len(self.sequence.tokens)

    @property
    def n_left(self) -> int:
        """Tokens that may still be drawn, for all choices of the lane."""
        if self.text is None:
            return self.job.max_new * self.job.n_choices
        return self.job.max_new - self.text.n_tokens

    @property
    def embeds(self) -> bool:
        """True for an embedding."""
        return self.job.generation is None

    @property
    def kind(self) -> tuple[bool, Adapters]:
        """Key that lanes of one pass have in common."""
        return self.embeds, self.job.adapters

    @property
    def wants_rows(self) -> bool:
        """True if results of all tokens of the prompt are wanted.

        Then none of them can come from the prefix cache.
        """
        request = self.job.generation
        return request is None or (request.prompt_logprobs is not None and self.text is None)

    @property
    def state(self) -> str:
        """Name of its phase: "prefill" or "decode"."""
        return "prefill" if self.text is None or self.n_missing > 1 + self.n_again else "decode"

    @property
    def n_drafted(self) -> int:
        """Tokens of the draft of this step."""
        return 0 if self.draft is None else len(self.draft.tokens)

    @property
    def take_hidden(self) -> TakeHidden | None:
        """Method of the drafter that takes hidden states, or None."""
        return None if self.draft is None else hidden_taker(self.draft.drafter)

    def drop_draft(self) -> None:
        """End the drafts, and free the session of a draft model."""
        draft, self.draft = self.draft, None
        close = getattr(draft and draft.drafter, "close", None)
        if close is not None:
            close()


def seed_of_choice(seed: int, choice: int) -> int:
    """Seed of a choice.

    The request's own for choice 0, else one derived from it.
    """
    if not choice:
        return seed
    state: Any = np.random.SeedSequence(seed, spawn_key=(choice,)).generate_state(2, np.uint64)
    return int(state[0]) << 64 | int(state[1])
