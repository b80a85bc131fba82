"""Generation of text by a session: tokens, statistics, stop strings, speculation."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs

from llamacli.drafting import Budget, Drafter
from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import ClosedError, InvalidRequestError
from llamacli.sampling import LogProbs, SamplerChain, SamplingParams, StopStrings
from llamacli.tokenizer import StreamDecoder
from llamacli.util.numbers import is_integer


@attrs.frozen
class Token:
    """Generated token.

    Its `id`, and `piece`, the text that is complete with it. Bytes of an incomplete character are held back and come
    with the token that completes it: pieces joined are the text, and continue that of the prompt. `complete` is False
    while there are such bytes after it. `logprobs` are those that `n_probs` asks for.
    """

    id: int
    piece: str
    logprobs: LogProbs | None = None
    complete: bool = True


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


class _TokenStream(Protocol):
    """Methods of a session that generation uses; `llamacli.Session` describes them."""

    stats: Stats
    stop_string: str
    n_ctx: int
    n_computed: int

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
    def eval(self, tokens: Sequence[int]) -> object: ...
    def eval_ahead(self, token: int, draft: Sequence[int]) -> None: ...
    def is_ahead(self, token: int) -> bool: ...
    def draw(self, params: SamplingParams | SamplerChain | None) -> int: ...
    def accept(self, token: int) -> None: ...
    def rewind(self, n_past: int) -> None: ...
    def decoder(self) -> StreamDecoder: ...


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


def generate(
    session: _TokenStream,
    prompt: Sequence[int],
    params: SamplingParams | SamplerChain | None = None,
    *,
    max_tokens: int | None = None,
    ignore_eos: bool = False,
    speculate: Drafter | None = None,
) -> Iterator[Token]:
    """Generation loop over the public methods of a session.

    `Session.generate` runs it. Arguments are the same, but nothing is checked before the first token is asked for. Copy
    it to generate in another way.
    """
    clock, n_computed = time.perf_counter, session.n_computed
    limit = token_limit(max_tokens, session.n_ctx)
    end_ids = frozenset[int]() if ignore_eos else session.model.tokenizer.eog_ids
    session.stats = Stats()
    session.reset_sampler()
    n_prompt = len(prompt) + session.n_past - session.n_cached if len(prompt) else 0
    started = clock()
    session.eval(prompt)
    prefill_tps = _rate(session.n_computed - n_computed, clock() - started)
    n_reused = n_prompt - (session.n_computed - n_computed)
    session.stats = Stats(n_prompt, n_reused, prefill_tps=prefill_tps)
    text, decode_s, ttft_s = session.decoder(), 0.0, 0.0
    ahead = _Speculation(session, speculate)
    for n_gen in range(1, limit + 1):
        if session.n_past == session.n_ctx:
            return
        step = clock()
        token = session.draw(params)
        decode_s += clock() - step
        if n_gen == 1:
            ttft_s = clock() - started
            session.stats = Stats(n_prompt, n_reused, 0, ttft_s, prefill_tps)
        if token in end_ids:
            return
        piece = text.feed(token)
        if n_gen == limit or session.n_past + 1 == session.n_ctx:
            piece += text.flush()
        yield Token(token, piece, session.logprobs, not text.holds_bytes)
        step = clock()
        session.accept(token)
        ahead.eval(token, limit - n_gen - 1)
        decode_s += clock() - step
        rate = _rate(n_gen, decode_s)
        session.stats = Stats(n_prompt, n_reused, n_gen, ttft_s, prefill_tps, rate, ahead.n_drafted, ahead.n_accepted)


class _Speculation:
    """Evaluation of drawn tokens together with those that a drafter proposes."""

    def __init__(self, session: _TokenStream, drafter: Drafter | None):
        self._session, self._drafter, self._budget = session, drafter, Budget()
        self._tokens: list[int] = []
        self._n_latest = self._n_latest_accepted = self._n_computed = 0
        self.n_drafted = self.n_accepted = 0

    def eval(self, token: int, limit: int) -> None:
        """Evaluate a token with a draft of at most `limit` tokens.

        Nothing is computed if the last draft had the token.
        """
        session, drafter = self._session, self._drafter
        if drafter is None:
            session.eval([token])
            return
        if len(self._tokens) != session.n_past:
            self._tokens = list(session.tokens)
        self._tokens.append(token)
        if session.is_ahead(token):
            session.eval([token])
            self.n_accepted += 1
            self._n_latest_accepted += 1
            return
        if self._n_latest:
            drafter.observe(self._n_latest, self._n_latest_accepted)
        if self._n_computed > 1:
            self._budget.settle(self._n_computed, self._n_latest_accepted)
        draft = self._draft(drafter, min(limit, session.n_ctx - session.n_past - 1))
        started, n_before = time.perf_counter(), session.n_computed
        if draft:
            session.eval_ahead(token, draft)
        else:
            session.eval([token])
        self._n_computed = session.n_computed - n_before
        self._budget.add_pass(self._n_computed, time.perf_counter() - started)
        self.n_drafted += len(draft)
        self._n_latest, self._n_latest_accepted = len(draft), 0

    def _draft(self, drafter: Drafter, limit: int) -> Sequence[int]:
        if limit <= 0 or not self._budget.allows:
            return ()
        started = time.perf_counter()
        draft = drafter.draft(self._tokens, limit)
        self._budget.add_drafting(time.perf_counter() - started)
        return draft


def until_stop(session: _TokenStream, tokens: Iterator[Token], stop: StopStrings, n_prompt: int) -> Iterator[Token]:
    """Generated tokens up to a stop string.

    Tokens are held back until their text is certain to be before one. The text of the token in which it begins is cut.
    In the end tokens that were evaluated, but not yielded whole, are dropped from the context.
    """
    n_past = session.n_past + n_prompt
    n_evaluated: int | None = None  # while the caller has a token: others may be evaluated meanwhile, and stay
    held: collections.deque[Token] = collections.deque()
    n_certain = 0  # characters of the held tokens that are before any stop string

    def is_certain() -> bool:
        n = 0
        for token in held:
            n += len(token.piece)
            if token.complete:
                return n <= n_certain
        return False

    try:
        for token in tokens:
            n_evaluated = session.n_past
            held.append(token)
            n_certain += len(stop.feed(token.piece))
            while is_certain():
                n_certain -= len(held[0].piece)
                yield held.popleft()
                n_past += 1
            if stop.stopped:
                session.stop_string = stop.found
                while n_certain:
                    token = held.popleft()
                    yield attrs.evolve(token, piece=token.piece[:n_certain])
                    n_certain -= min(n_certain, len(token.piece))
                return
            n_evaluated = None
        n_evaluated = session.n_past
        while held:
            yield held.popleft()
            n_past += 1
    finally:
        if n_past < session.n_past and n_evaluated in (None, session.n_past):
            with contextlib.suppress(ClosedError):
                session.rewind(n_past)


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0
