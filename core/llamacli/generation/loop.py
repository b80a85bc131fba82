"""Generation loop: draw, yield, evaluate; for one session or several."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

import attrs

from llamacli.engine.compiled_model import CompiledModel
from llamacli.errors import ClosedError, InvalidRequestError
from llamacli.generation.costs import StepCost
from llamacli.generation.drafting import Draft, Drafter
from llamacli.generation.drafts import Drafts
from llamacli.generation.text import Token, TokenText
from llamacli.inputs import Inputs
from llamacli.sampling import SamplerChain, SamplingParams
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

    text: TokenText | None
    draft: Draft | None

    @property
    def model(self) -> CompiledModel: ...
    @property
    def n_past(self) -> int: ...
    @property
    def n_cached(self) -> int: ...
    @property
    def n_left(self) -> int: ...
    def begin_generation(self, drafter: Drafter | None) -> object: ...
    def end_generation(self, generation: object) -> None: ...
    def reset_sampler(self) -> None: ...
    def eval(self, tokens: Sequence[int] | Inputs, *, generated: bool = False) -> object: ...
    def eval_ahead(self, token: int, draft: Sequence[int]) -> None: ...
    def draw(self, params: SamplingParams | SamplerChain | None) -> int: ...
    def take(self, token: int) -> list[Token]: ...
    def advance(self, token: int, *, accept: bool) -> bool: ...
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
        n_prompt = max(n_prompt, n_computed)  # more, if generated tokens have become a prompt
        stats.n_prompt, stats.n_reused = n_prompt, n_prompt - n_computed
        stats.prefill_tps = n_computed / seconds if seconds > 0 else 0.0
        text = _begin_text(session, params, limit, ignore_eos=ignore_eos)
        draft, drafts = session.draft, Drafts[Any](session.step_cost)
        n_whole, seconds, n = session.n_past, 0.0, 0
        while session.n_left > 0:
            n_evaluated, begun = None, clock()
            token = session.draw(params)
            tokens = session.take(token)
            session.stop_string = text.stop_string
            seconds += clock() - begun
            stats.ttft_s = stats.ttft_s if n else clock() - started
            n_evaluated = session.n_past
            for one in tokens:
                yield one
                n_whole += 1
            if text.finish_reason == "stop":
                break
            n_evaluated, begun = None, clock()
            if not session.advance(token, accept=True):
                if draft is None:
                    session.eval([token], generated=True)
                else:
                    drafts.propose([session])
                    n_computed, evaluating = session.n_computed, clock()
                    session.eval_ahead(token, draft.tokens)
                    drafts.cost.observe(session.n_computed - n_computed, clock() - evaluating)
            if draft is not None:
                stats.n_drafted, stats.n_accepted = draft.n_drafted_in_all, draft.n_accepted_in_all
            n, seconds = n + 1, seconds + clock() - begun
            stats.n_gen, stats.gen_tps = n, n / seconds if seconds > 0 else 0.0
        n_evaluated = session.n_past
        for one in text.flush():
            yield one
            n_whole += not text.stop_string
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
    prompts: Sequence[Sequence[int] | Inputs],
    evaluate: Callable[..., object],
    params: SamplingParams | SamplerChain | None,
    limit: int,
    n_parallel: int,
) -> list[Generated]:
    """Generate the text after each prompt, in the same batches.

    Up to `n_parallel` run at once. Each has a new session, which is closed when its text has ended. `evaluate` is
    `llamacli.eval_batch`.
    """
    results = [Generated("", (), "length") for _ in sessions]
    waiting, work = collections.deque(range(len(sessions) if limit else 0)), dict[int, Sequence[int] | Inputs]()
    pieces, drawn = [""] * len(sessions), [list[int]() for _ in sessions]
    while waiting or work:
        while waiting and len(work) < n_parallel:
            i = waiting.popleft()
            work[i] = prompts[i]
        evaluate([(sessions[i], ids) for i, ids in work.items()], generated=[bool(drawn[i]) for i in work])
        for i in [*work]:
            session = sessions[i]
            text = session.text or _begin_text(session, params, limit)
            if session.n_left > 0:
                token = session.draw(params)
                pieces[i] += "".join([one.piece for one in session.take(token)])
                drawn[i] += [token] if token not in text.end_ids else []
                if not text.finish_reason:
                    session.advance(token, accept=True)
                    work[i] = [token]
                    continue
            del work[i]
            pieces[i] += "".join([one.piece for one in text.flush()])
            results[i] = Generated(pieces[i], tuple(drawn[i]), text.finish_reason or "length")
            session.close()
    return results


def _begin_text(
    session: _Session, params: SamplingParams | SamplerChain | None, limit: int, *, ignore_eos: bool = False
) -> TokenText:
    """Begin a text of a session behind its tokens."""
    stop = params.stop if isinstance(params, SamplingParams) else ()
    end_ids = frozenset[int]() if ignore_eos else session.model.tokenizer.eog_ids
    session.text = TokenText(session.decoder(), stop, end_ids, limit)
    return session.text
