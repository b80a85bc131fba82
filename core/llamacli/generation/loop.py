"""Generation loop: draw, yield, evaluate; for one session or several."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

import attrs

from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import ClosedError, InvalidRequestError
from llamacli.generation.costs import StepCost
from llamacli.generation.drafters import MAX_DRAFT
from llamacli.generation.drafting import Drafter
from llamacli.generation.drafts import Draft, Drafts
from llamacli.generation.text import Token, TokenText
from llamacli.inputs import Inputs
from llamacli.sampling import LogProbs, SamplerChain, SamplingParams
from llamacli.tokenizer import StreamDecoder
from llamacli.util.numbers import is_integer


@attrs.define
class Stats:
    """Token counts and rates of the last `generate`, also while it runs.

    - `n_prompt`: tokens of the prompt, and those before it that were no longer cached.
    - `n_reused`: how many of these came from the prefix cache; the others took `prefill_tps` tokens a second.
    - `n_gen`: tokens generated and evaluated, at `gen_tps` tokens a second.
    - `n_drafted`: tokens that a drafter proposed, `n_accepted`: those of them that came (speculative decoding).
    - `ttft_s`: seconds to the first token (prompt and first draw).

    Rates are 0 where no time passed.
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_gen: int = 0
    ttft_s: float = 0.0
    prefill_tps: float = 0.0
    gen_tps: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0


class _Session(Protocol):
    """Methods of a session that generation uses; `llamacli.Session` describes them."""

    stats: Stats
    stop_string: str
    n_ctx: int
    n_computed: int
    step_cost: StepCost

    @property
    def model(self) -> CompiledModel: ...
    @property
    def n_past(self) -> int: ...
    @property
    def n_cached(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> LogProbs | None: ...
    def begin_generation(self, drafter: Drafter | None) -> object: ...
    def end_generation(self, generation: object) -> None: ...
    def reset_sampler(self) -> None: ...
    def eval(self, tokens: Sequence[int] | Inputs) -> object: ...
    def eval_ahead(self, token: int, draft: Sequence[int]) -> None: ...
    def is_ahead(self, token: int) -> bool: ...
    def draw(self, params: SamplingParams | SamplerChain | None) -> int: ...
    def accept(self, token: int) -> None: ...
    def rewind(self, n_past: int) -> None: ...
    def decoder(self) -> StreamDecoder: ...
    def close(self) -> None: ...


Session = TypeVar("Session", bound=_Session)


def token_limit(max_tokens: int | None, n_ctx: int) -> int:
    """Maximum number of tokens to generate.

    None and -1 are as many as the context holds.

    Raises InvalidRequestError for a number out of range.
    """
    if max_tokens is None:
        return n_ctx
    if not is_integer(max_tokens) or max_tokens < -1:
        raise InvalidRequestError(
            f"max_tokens must be an integer of at least 0, or None or -1 for no limit, not {max_tokens!r}"
        )
    return n_ctx if max_tokens == -1 else int(max_tokens)


class Generation:
    """Text that a session generates.

    A step is `draw`, and `advance` once the caller has taken its tokens; between the two the token drawn is neither
    accepted nor evaluated.

    - `text`: the tokens drawn so far, with their text. `drawn`: their ids, without the end token.
    - `tokens`: with a drafter, the tokens of the session and the one drawn.
    - `finish_reason`: "stop" or "length", where the context is full too; "" before the end.
    """

    def __init__(
        self,
        session: _Session,
        params: SamplingParams | SamplerChain | None,
        limit: int,
        *,
        ignore_eos: bool = False,
        drafter: Drafter | None = None,
        decoder: StreamDecoder | None = None,
    ):
        self.session, self._params = session, params
        stop = params.stop if isinstance(params, SamplingParams) else ()
        end_ids = frozenset[int]() if ignore_eos else session.model.tokenizer.eog_ids
        self.text = TokenText(decoder or session.decoder(), stop, end_ids, limit)
        self.draft = None if drafter is None else Draft(drafter, getattr(drafter, "max_tokens", MAX_DRAFT))
        self._drafts = None if drafter is None else Drafts[Generation](session.step_cost)
        self.tokens: list[int] = []
        self.drawn: list[int] = []
        self.finish_reason = self.text.finish_reason

    def __str__(self) -> str:
        return f"the text of {self.session!r}"

    @property
    def n_left(self) -> int:
        """Tokens that may still be drawn."""
        return min(self.text.n_left, self.session.n_ctx - self.session.n_past)

    @property
    def n_missing(self) -> int:
        """Tokens to evaluate before the next draw."""
        return 1 + self.session.n_past - self.session.n_cached

    def drop_draft(self) -> None:
        """Generate without drafts from now on."""
        self.draft = None

    def draw(self) -> list[Token]:
        """Draw the next token; the tokens whose text is certain now.

        The token is to be accepted unless the text has stopped, or the context was full.
        """
        session = self.session
        n_after = session.n_past + 1
        if n_after > session.n_ctx:
            self.finish_reason = "length"
            return []
        token = session.draw(self._params)
        certain = self.text.take(token, session.logprobs, is_last=n_after == session.n_ctx)
        self.finish_reason = self.text.finish_reason
        if self.finish_reason:
            session.stop_string = self.text.stop_string
        if self.text.n_tokens > len(self.drawn):
            self.drawn.append(token)
        return certain

    def accept(self) -> int:
        """Accept the token drawn, which is to be evaluated next."""
        self.session.accept(self.drawn[-1])
        return self.drawn[-1]

    def advance(self) -> None:
        """Accept the token drawn and evaluate it, with a draft.

        Nothing is computed if the last draft had the token.
        """
        session, token, draft = self.session, self.accept(), self.draft
        if draft is None or self._drafts is None:  # an error has ended the drafts
            session.eval([token])
            return
        if len(self.tokens) != session.n_past:
            self.tokens = list(session.tokens)
        self.tokens.append(token)
        if draft.accepts(token) and session.is_ahead(token):
            session.eval([token])
            return
        if draft.tokens:
            draft.settle()
        self._drafts.propose([self])
        started, n_before = time.perf_counter(), session.n_computed
        if draft.tokens:
            session.eval_ahead(token, draft.tokens)
        else:
            session.eval([token])
        self._drafts.cost.observe(session.n_computed - n_before, time.perf_counter() - started)

    @property
    def n_drafted(self) -> int:
        """Tokens drafted so far."""
        return 0 if self.draft is None else self.draft.n_drafted_in_all + len(self.draft.tokens)

    @property
    def n_accepted(self) -> int:
        """Drafted tokens that came."""
        return 0 if self.draft is None else self.draft.n_accepted_in_all + self.draft.n_accepted


def generate(
    session: _Session,
    prompt: Sequence[int] | Inputs,
    params: SamplingParams | SamplerChain | None = None,
    *,
    max_tokens: int | None = None,
    ignore_eos: bool = False,
    speculate: Drafter | None = None,
) -> Generator[Token, None, None]:
    """Generate tokens with a session, as `Session.generate` does, which calls it.

    Nothing is checked before the first token is asked for. In the end, tokens that were evaluated while others were
    held back, but not yielded whole, are dropped from the context.
    """
    clock, generation = time.perf_counter, session.begin_generation(speculate)
    n_whole = session.n_past
    n_evaluated: int | None = n_whole  # None while a step runs; while the caller has tokens, others may be evaluated
    try:
        n_computed, limit = session.n_computed, token_limit(max_tokens, session.n_ctx)
        stats = session.stats = Stats()
        session.stop_string = ""
        session.reset_sampler()
        n_prompt = len(prompt) + session.n_past - session.n_cached if len(prompt) else 0
        started = clock()
        session.eval(prompt)
        n_computed, seconds = session.n_computed - n_computed, clock() - started
        stats.n_prompt, stats.n_reused = n_prompt, n_prompt - n_computed
        stats.prefill_tps = n_computed / seconds if seconds > 0 else 0.0
        text = Generation(session, params, limit, ignore_eos=ignore_eos, drafter=speculate)
        n_whole, seconds = session.n_past, 0.0
        for n in range(1, limit + 1):
            n_evaluated, step = None, clock()
            tokens = text.draw()
            seconds += clock() - step
            if n == 1:
                stats.ttft_s = clock() - started
            n_evaluated = session.n_past
            for token in tokens:
                yield token
                n_whole += 1
            if text.finish_reason == "stop" or len(text.drawn) < n:
                break
            n_evaluated, step = None, clock()
            if speculate is None:
                session.eval([text.accept()])
            else:
                text.advance()
                stats.n_drafted, stats.n_accepted = text.n_drafted, text.n_accepted
            seconds += clock() - step
            stats.n_gen, stats.gen_tps = n, n / seconds if seconds > 0 else 0.0
        n_evaluated = session.n_past
        for token in text.text.flush():
            yield token
            n_whole += not session.stop_string
    finally:
        if n_whole < session.n_past and n_evaluated in (None, session.n_past):
            with contextlib.suppress(ClosedError):
                session.rewind(n_whole)
        session.end_generation(generation)


@attrs.frozen
class Generated:
    """Text generated for one prompt.

    - `tokens`: the ids drawn, without the end token.
    - `finish_reason`: "length" for `max_tokens` or a full context, else "stop".
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str


def generate_batch(
    sessions: Sequence[Session],
    prompts: Sequence[Sequence[int]],
    evaluate: Callable[[Sequence[tuple[Session, Sequence[int]]]], object],
    params: SamplingParams | SamplerChain | None,
    limit: int,
    n_parallel: int,
) -> list[Generated]:
    """Generate the text after each prompt, in the same batches.

    Up to `n_parallel` run at once. Each has a new session, which is closed when its text has ended. `evaluate` is
    `llamacli.eval_batch`.
    """
    results = {i: Generated("", (), "length") for i in range(len(sessions))}
    waiting, pieces = collections.deque(range(len(sessions) if limit else 0)), [""] * len(sessions)
    running: dict[int, tuple[Generation, Sequence[int]]] = {}
    while waiting or running:
        while waiting and len(running) < n_parallel:
            i = waiting.popleft()
            decoder = sessions[i].model.tokenizer.stream(prompts[i])
            running[i] = Generation(sessions[i], params, limit, decoder=decoder), prompts[i]
        evaluate([(sessions[i], ids) for i, (_, ids) in running.items()])
        for i, (one, _) in [*running.items()]:
            tokens = one.draw()
            if not one.finish_reason:
                running[i] = one, [one.accept()]
            if one.finish_reason:
                tokens += one.text.flush()
                del running[i]
            pieces[i] += "".join([token.piece for token in tokens])
            if one.finish_reason:
                results[i] = Generated(pieces[i], tuple(one.drawn), one.finish_reason)
                sessions[i].close()
    return [results[i] for i in range(len(sessions))]
