"""State of requests in the scheduler: tickets, jobs and lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.drafting import Drafter, hidden_taker
from llamacli.engine.adapters import Adapters
from llamacli.engine.batching import TakeHidden
from llamacli.kv import KVSequence
from llamacli.sampling import SamplerChain, SamplerState
from llamacli.serve.requests import EmbeddingRequest, GenerationRequest, Ids, Request, TokenLogprob, Usage
from llamacli.serve.texts import ChoiceText

_FIRST_CHANCE = 0.7
"""Probability that a drafted token comes, before any has."""
_KEPT, _KEPT_WAITING = 0.8, 0.98
"""Share of the past that counts after another draft, and after a step without one."""


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
class LaneDraft:
    """Drafts of a text.

    - `drafter`: proposes them; `max_tokens`: their maximum length.
    - `tokens`: the draft of this step; `n_accepted`: those of its first tokens that came.
    - `is_warm`: true after the first draft, for which a draft model has to evaluate the prompt.
    """

    drafter: Drafter
    max_tokens: int
    tokens: Sequence[int] = ()
    n_accepted: int = 0
    is_warm: bool = False
    _came: float = 0.0
    _tried: float = 0.0

    def expected(self, n: int) -> float:
        """Tokens to expect of a draft of n tokens.

        As if each came with the same probability, if all before it did.
        """
        p = (self._came + _FIRST_CHANCE) / (self._tried + 1)
        return p * (1 - p**n) / (1 - p) if p < 1 else float(n)

    def accepts(self, token: int) -> bool:
        """True, and counted, if the draft continues with a token."""
        accepted = self.n_accepted < len(self.tokens) and self.tokens[self.n_accepted] == token
        self.n_accepted += accepted
        return accepted

    def settle(self) -> None:
        """Learn from the fate of the draft, and end it."""
        n_drafted, n_accepted = len(self.tokens), self.n_accepted
        self.drafter.observe(n_drafted, n_accepted)
        self._came = _KEPT * self._came + n_accepted
        self._tried = _KEPT * self._tried + n_accepted + (n_accepted < n_drafted)
        self.tokens, self.n_accepted = (), 0

    def wait(self) -> None:
        """Forget slowly without a draft, so that others are tried later."""
        self._came, self._tried = _KEPT_WAITING * self._came, _KEPT_WAITING * self._tried


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
    draft: LaneDraft | None = None
    n_again: int = 0

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
