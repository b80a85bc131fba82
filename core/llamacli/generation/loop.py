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


@attrs.frozen
class Stats:
    """Token counts and rates of the last `generate`.

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

    - `drawn`: the tokens drawn so far, without the end token.
    - `tokens`: with a drafter, the tokens of the session and the one drawn.
    - `finish_reason`: "stop" at an end-of-generation token or stop string, "length" at `limit` tokens or where the
      context is full; "" before the end.
    """

    def __init__(
        self,
        session: _Session,
        params: SamplingParams | SamplerChain | None,
        limit: int,
        *,
        ignore_eos: bool = False,
        drafter: Drafter | None = None,
        text: TokenText | None = None,
    ):
        self.session, self._params, self._limit = session, params, limit
        self._end_ids = frozenset[int]() if ignore_eos else session.model.tokenizer.eog_ids
        self._text = TokenText(session.decoder(), _stop_of(params)) if text is None else text
        self.draft = None if drafter is None else Draft(drafter, getattr(drafter, "max_tokens", MAX_DRAFT))
        self._drafts = None if drafter is None else Drafts[Generation](session.step_cost)
        self.tokens: list[int] = []
        self.drawn: list[int] = []
        self.finish_reason = "" if limit else "length"

    def __str__(self) -> str:
        return f"the text of {self.session!r}"

    @property
    def n_left(self) -> int:
        """Tokens that may still be drawn."""
        return min(self._limit - len(self.drawn), self.session.n_ctx - self.session.n_past)

    @property
    def n_missing(self) -> int:
        """Tokens to evaluate before the next draw."""
        return 1 + self.session.n_past - self.session.n_cached

    def drop_draft(self) -> None:
        """Generate without drafts from now on."""
        self.draft = None

    def draw(self) -> list[Token]:
        """Draw the next token; the tokens whose text is certain now."""
        session = self.session
        if session.n_past == session.n_ctx:
            self.finish_reason = "length"
            return []
        token = session.draw(self._params)
        if token in self._end_ids:
            self.finish_reason = "stop"
            return []
        self.drawn.append(token)
        is_last = len(self.drawn) == self._limit or session.n_past + 1 == session.n_ctx
        certain = self._text.feed(token, session.logprobs, is_last=is_last)
        if self._text.stop_string:
            session.stop_string, self.finish_reason = self._text.stop_string, "stop"
        return certain

    def accept(self) -> int:
        """Accept the token drawn, which is to be evaluated next."""
        token = self.drawn[-1]
        self.session.accept(token)
        if len(self.drawn) == self._limit:
            self.finish_reason = "length"
        return token

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

    def rest(self) -> list[Token]:
        """Tokens held back, at the end.

        After a stop string, the text before it.
        """
        return self._text.flush()

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
    clock, n_computed = time.perf_counter, session.n_computed
    limit = token_limit(max_tokens, session.n_ctx)
    session.stats, session.stop_string = Stats(), ""
    session.reset_sampler()
    n_prompt = len(prompt) + session.n_past - session.n_cached if len(prompt) else 0
    started = clock()
    session.eval(prompt)
    prefill_tps = _rate(session.n_computed - n_computed, clock() - started)
    n_reused, decode_s, ttft_s = n_prompt - (session.n_computed - n_computed), 0.0, 0.0
    session.stats = Stats(n_prompt, n_reused, prefill_tps=prefill_tps)
    text = Generation(session, params, limit, ignore_eos=ignore_eos, drafter=speculate)
    n_whole = session.n_past  # tokens of the context whose text the caller has
    n_evaluated: int | None = None  # while the caller has a token: others may be evaluated meanwhile, and stay
    try:
        for _ in range(limit):
            step = clock()
            tokens = text.draw()
            decode_s += clock() - step
            if not ttft_s:
                ttft_s = clock() - started
                session.stats = Stats(n_prompt, n_reused, 0, ttft_s, prefill_tps)
            n_evaluated = session.n_past
            for token in tokens:
                yield token
                n_whole += 1
            if text.finish_reason:
                break
            n_evaluated, step = None, clock()
            if speculate is None:
                session.eval([text.accept()])
            else:
                text.advance()
            decode_s += clock() - step
            n = len(text.drawn)
            session.stats = Stats(
                n_prompt, n_reused, n, ttft_s, prefill_tps, _rate(n, decode_s), text.n_drafted, text.n_accepted
            )
        n_evaluated = session.n_past
        for token in text.rest():
            yield token
            n_whole += not session.stop_string
    finally:
        if n_whole < session.n_past and n_evaluated in (None, session.n_past):
            with contextlib.suppress(ClosedError):
                session.rewind(n_whole)


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
    prompts: Sequence[Sequence[int] | Inputs],
    evaluate: Callable[[Sequence[tuple[Session, Sequence[int] | Inputs]]], object],
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
    running: dict[int, tuple[Generation, Sequence[int] | Inputs]] = {}
    while waiting or running:
        while waiting and len(running) < n_parallel:
            i = waiting.popleft()
            prompt = prompts[i]
            keys = [key for key in prompt.keys if key >= 0] if isinstance(prompt, Inputs) else prompt
            text = TokenText(sessions[i].model.tokenizer.stream(keys), _stop_of(params))
            running[i] = Generation(sessions[i], params, limit, text=text), prompt
        evaluate([(sessions[i], ids) for i, (_, ids) in running.items()])
        for i, (one, _) in [*running.items()]:
            tokens = one.draw()
            if not one.finish_reason:
                running[i] = one, [one.accept()]
            if one.finish_reason:
                tokens += one.rest()
                del running[i]
            pieces[i] += "".join([token.piece for token in tokens])
            if one.finish_reason:
                results[i] = Generated(pieces[i], tuple(one.drawn), one.finish_reason)
                sessions[i].close()
    return [results[i] for i in range(len(sessions))]


def _stop_of(params: SamplingParams | SamplerChain | None) -> Sequence[str]:
    return params.stop if isinstance(params, SamplingParams) else ()


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0
