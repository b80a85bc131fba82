"""State of requests and of their sequences in the scheduler."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from llamacli.engine.adapters import Adapters
from llamacli.engine.batching import Logits, TakeHidden
from llamacli.generation.drafting import hidden_taker
from llamacli.generation.drafts import Draft
from llamacli.kv import KVSequence
from llamacli.sampling import SamplerChain, SamplerState
from llamacli.serve.requests import GenerationRequest, Ids, Request, TokenLogprob, Usage
from llamacli.serve.texts import ChoiceText


@attrs.define(eq=False)
class RequestState:
    """Request that the scheduler has taken.

    - `message`: the request. `target`: where its events go; the scheduler does not look at it.
    - `submitted_at`, `admitted_at`, `prompted_at`: times at which it came, left the queue, and had all of its prompts
      evaluated; None before.
    - `n_prompt`: tokens of its prompts. `n_unprompted`: prompts that are not evaluated.
    - `n_open`: choices and vectors that have not ended.
    - `n_cached`, `n_processed`: prompt tokens that came from the prefix cache, and prompt tokens that are done.
    - `n_generated`, `n_reasoning`: tokens generated, and those of reasoning.
    - `n_drafted`, `n_accepted`: tokens drafted, and drafted tokens that came.
    - `cancelled`: set from any thread, seen at the next step.
    - `closed`: set when nothing of it is left.
    """

    message: Request
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

    @property
    def generation(self) -> GenerationRequest | None:
        """The request, if it is one of text."""
        return self.message if isinstance(self.message, GenerationRequest) else None


@attrs.define(eq=False)
class SequenceState:
    """Sequence of tokens: a prompt, then one choice after it.

    A prompt becomes the sequence of its first choice; `fork` makes those of the others.

    - `request`: its request. `number`: index of the prompt there; `arrival`: number of the prompt among all that came.
    - `prompt`: token ids. `n_choices`, `max_new`: choices after it, and the maximum of tokens of each.
    - `chain`: samplers of its choices, None of an embedding. `adapters`: LoRA adapters, with their scales.
    - `choice`: index of the choice.
    - `tokens`: all tokens so far, of which the `cache` holds the first; there is no cache before admission.
    - `sampler`, `text`: of a choice; None before the prompt is evaluated, and in embeddings.
    - `n_preempted`: times that it was preempted. `n_served`: prompt tokens evaluated since it was admitted.
    - `last_at`: time of the last token.
    - `logprobs`, `rows`: log-probabilities, or hidden states, of the prompt so far, where they are asked for.
    - `draft`: drafts of a choice, None without.
    - `n_again`: drafted tokens that came and are evaluated again, because recurrent states went back before the draft.
    - `draw_s`: CPU seconds of the last draw, and `draws_s` of all. `drawing`: true while a draw runs beside the steps.
    """

    request: RequestState
    number: int
    arrival: int
    prompt: Ids
    n_choices: int
    max_new: int
    chain: SamplerChain | None
    adapters: Adapters = ()
    choice: int = 0
    tokens: list[int] = attrs.field(factory=list)
    cache: KVSequence = attrs.field(init=False)
    sampler: SamplerState | None = None
    text: ChoiceText | None = None
    n_preempted: int = 0
    n_served: int = 0
    last_at: float | None = None
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    rows: list[Logits] = attrs.field(factory=list)
    draft: Draft | None = None
    n_again: int = 0
    draw_s: float = 0.0
    draws_s: float = 0.0
    drawing: bool = False

    def __str__(self) -> str:
        return f"the request {self.request.message.id}"

    def fork(self, choice: int, cache: KVSequence) -> SequenceState:
        """Sequence of another choice after the same prompt."""
        other = SequenceState(
            self.request, self.number, self.arrival, self.prompt, self.n_choices, self.max_new, self.chain,
            self.adapters, choice, list(self.tokens), n_served=self.n_served,
        )  # fmt: skip
        other.cache = cache
        return other

    @property
    def key(self) -> str:
        """See `llamacli.serve.queue.Entry`."""
        return self.request.message.key

    @property
    def n_requests(self) -> int:
        """See `llamacli.serve.queue.Entry`."""
        return int(not self.number)

    @property
    def n_tokens(self) -> int:
        """See `llamacli.serve.queue.Entry`."""
        return len(self.prompt)

    @property
    def n_slots(self) -> int:
        """Slots that it takes: one, or before the fork one a choice."""
        return self.n_choices if self.text is None else 1

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of age, the oldest first."""
        return self.arrival, self.choice

    @property
    def n_missing(self) -> int:
        """Tokens to evaluate before the next draw."""
        return len(self.tokens) - len(self.cache.tokens)

    @property
    def n_left(self) -> int:
        """Tokens that may still be drawn, for all choices of the sequence."""
        return self.max_new * self.n_choices if self.text is None else self.text.n_left

    @property
    def embeds(self) -> bool:
        """True for an embedding."""
        return self.chain is None

    @property
    def kind(self) -> tuple[bool, bool]:
        """Key that sequences of one pass have in common: embeddings, adapters."""
        return self.chain is None, bool(self.adapters)

    @property
    def wants_rows(self) -> bool:
        """True if results of all tokens of the prompt are wanted.

        Then none of them can come from the prefix cache.
        """
        generation = self.request.generation
        return generation is None or (generation.prompt_logprobs is not None and self.text is None)

    @property
    def decodes(self) -> bool:
        """True in decode steps, false while tokens are missing (prefill)."""
        return self.text is not None and len(self.tokens) - len(self.cache.tokens) <= 1 + self.n_again

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
