"""State of requests and of their sequences in the scheduler."""

from __future__ import annotations

import time
from typing import Any

import attrs
import numpy as np

from llamacli.engine.adapters import Adapters
from llamacli.engine.batching import Logits
from llamacli.generation.stream import TokenSequence
from llamacli.inputs import cell_keys
from llamacli.kv import KVSequence
from llamacli.media.encoder import Tile
from llamacli.sampling import SamplerChain, SamplerState
from llamacli.serve.requests import GenerationRequest, Ids, Request, TokenLogprob, Usage
from llamacli.serve.texts import ChoiceText


@attrs.define(eq=False)
class RequestState:
    """Request that the scheduler has taken.

    - `message`: the request. `target`: where its events go; the scheduler does not look at it.
    - `generation`: the request, if it is one of text. `texts`: of its choices, those that have begun.
    - `submitted_at`, `admitted_at`, `prompted_at`: times at which it came, left the queue, and had all of its prompts
      evaluated; None before.
    - `n_prompt`: tokens of its prompts. `n_unprompted`: prompts that are not evaluated.
    - `n_open`: choices and vectors that have not ended.
    - `n_cached`, `n_processed`: prompt tokens that came from the prefix cache, and prompt tokens that are done.
    - `n_lost`: pipeline stages that were lost while it ran.
    - `n_drafted`, `n_accepted`: tokens drafted, and drafted tokens that came.
    - `missing_rows`: tiles of pictures that are not encoded, by content key, with the index of the row.
    - `has_positions`: true if tokens of its prompts have positions of their own.
    - `cancelled`: set from any thread, seen at the next step. `ends_reasoning` likewise: no more reasoning.
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
    n_preempted: int = 0
    n_lost: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    cancelled: bool = False
    ends_reasoning: bool = False
    closed: bool = False
    texts: list[ChoiceText] = attrs.field(factory=list)
    generation: GenerationRequest | None = attrs.field(init=False)

    @generation.default
    def _find_generation(self) -> GenerationRequest | None:
        return self.message if isinstance(self.message, GenerationRequest) else None

    missing_rows: dict[int, tuple[Tile, int]] = attrs.field(init=False)
    has_positions: bool = attrs.field(init=False)

    @missing_rows.default
    def _find_missing_rows(self) -> dict[int, tuple[Tile, int]]:
        return dict(self.message.tiles)

    @has_positions.default
    def _find_positions(self) -> bool:
        contents = self.message.contents
        return contents is not None and contents.has_positions

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return sum(text.n_tokens for text in self.texts)

    @property
    def usage(self) -> Usage:
        """Numbers of tokens so far."""
        n_reasoning = sum(text.n_reasoning for text in self.texts)
        predicted = self.generation is not None and bool(self.generation.prediction)
        return Usage(
            self.n_prompt, self.n_cached, self.n_generated, n_reasoning, self.n_drafted, self.n_accepted, predicted
        )


@attrs.define(eq=False)
class SequenceState(TokenSequence):
    """Sequence of tokens: a prompt, then one choice after it.

    A prompt becomes the sequence of its first choice; `fork` makes those of the others.

    - `request`: its request. `number`: index of the prompt there; `arrival`: number of the prompt among all that came.
    - `prompt`: token ids. `n_choices`, `max_new`: choices after it, and the maximum of tokens of each.
    - `params`: samplers of its choices. `adapters`: LoRA adapters, with their scales.
    - `choice`: index of the choice.
    - `context`: all tokens so far, of which the `cache` holds the first; there are none before admission.
    - `text`: of a choice; None before the prompt is evaluated, and in embeddings.
    - `n_preempted`: times that it was preempted.
    - `last_at`: time of the last token.
    - `logprobs`, `rows`: log-probabilities, or hidden states, of the prompt so far, where they are asked for.
    - `has_ways`: prompts go another way through the model than generated tokens, and have other cells.
    - `draw_s`: CPU seconds of the last draw, and `draws_s` of all. `drawing`: true while a draw runs beside the steps.
    """

    request: RequestState
    number: int
    arrival: int
    prompt: Ids
    n_choices: int
    max_new: int
    params: SamplerChain
    adapters: Adapters = ()
    choice: int = 0
    _tokens: list[int] = attrs.field(factory=list)
    cache: KVSequence = attrs.field(init=False)
    text: ChoiceText | None = None
    n_preempted: int = 0
    last_at: float | None = None
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    rows: list[Logits] = attrs.field(factory=list)
    draw_s: float = 0.0
    draws_s: float = 0.0
    drawing: bool = False
    has_ways: bool = False

    def __str__(self) -> str:
        return f"the request {self.request.message.id}"

    def begin(self, cache: KVSequence) -> None:
        """Begin with the prompt, in a cache that is empty."""
        self._tokens, self.cache = [*self.prompt], cache

    def fork(self, choice: int, cache: KVSequence) -> SequenceState:
        """Sequence of another choice after the same prompt."""
        other = SequenceState(
            self.request, self.number, self.arrival, self.prompt, self.n_choices, self.max_new, self.params,
            self.adapters, choice, list(self._tokens), has_ways=self.has_ways,
        )  # fmt: skip
        other.cache = cache
        return other

    def begin_text(self, sampler: SamplerState, text: ChoiceText) -> None:
        """Begin a choice, of which the logits are still to be kept."""
        self._sampler, self.text = sampler, text

    def keep_logits(self, rows: Logits) -> None:
        """Keep the logits after the last token and each drafted one."""
        n = 1 + self.n_drafted
        drafted = () if self.draft is None else self.draft.tokens
        self._logits, self._ahead = rows[-n], list(zip(drafted, rows[len(rows) - n + 1 :], strict=True))

    def draw_and_accept(self) -> int | Exception:
        """Draw the next token, and accept it unless it ends the text.

        An error takes its place. Threads call this for several sequences at once.
        """
        assert self.text is not None
        started = time.thread_time()
        if self.request.ends_reasoning:
            self._sampler.end_reasoning()
        try:
            token = self.draw()
            if token not in self.text.end_ids:
                self._sampler.accept(token)
        except Exception as error:
            return error
        self.draw_s = time.thread_time() - started
        self.draws_s += self.draw_s
        return token

    def advance(self, token: int, *, accept: bool = False) -> bool:
        """Go on behind a drawn token, which the context has afterwards."""
        if super().advance(token, accept=accept):
            return True
        self._tokens.append(token)
        return False

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
    def background(self) -> bool:
        """See `llamacli.serve.queue.Entry`."""
        return self.request.message.background

    @property
    def n_slots(self) -> int:
        """Slots that it takes: one, or before the fork one a choice."""
        return self.n_choices if self.text is None else 1

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sort key of age, the oldest first; background requests come last."""
        return self.background, self.arrival, self.choice

    @property
    def n_missing(self) -> int:
        """Tokens to evaluate before the next draw."""
        return len(self._tokens) - len(self.cache.tokens)

    @property
    def cell_keys(self) -> list[int]:
        """Content keys of the cells of the context."""
        return cell_keys(self._tokens, len(self.prompt)) if self.has_ways else self._tokens

    @property
    def n_left(self) -> int:
        """Tokens that may still be drawn, for all choices of the sequence."""
        return self.max_new * self.n_choices if self.text is None else self.text.n_left

    @property
    def embeds(self) -> bool:
        """True for an embedding."""
        return self.request.generation is None

    @property
    def kind(self) -> tuple[bool, bool]:
        """Key that sequences of one pass have in common: embeddings, adapters."""
        return self.embeds, bool(self.adapters)

    @property
    def wants_rows(self) -> bool:
        """True if results of all tokens of the prompt are wanted.

        Then none of them can come from the prefix cache.
        """
        generation = self.request.generation
        return generation is None or (generation.prompt_logprobs is not None and self.text is None)

    @property
    def decodes(self) -> bool:
        """True in decode steps, false while more tokens are missing (prefill)."""
        return self.n_missing <= self.n_decode

    @property
    def n_decode(self) -> int:
        """Most tokens of a decode step before its draft, 0 in prompts.

        Recurrent states go back before a draft whose tokens did not all come, and those that came are evaluated again.
        """
        return 0 if self.text is None else 1 if self.draft is None else 1 + self.draft.max_tokens

    @property
    def n_drafted(self) -> int:
        """Tokens of the draft of this step."""
        return 0 if self.draft is None else len(self.draft.tokens)

    def drop_draft(self) -> None:
        """End the drafts, and free the session of a draft model."""
        close = getattr(self.draft and self.draft.drafter, "close", None)
        super().drop_draft()
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
