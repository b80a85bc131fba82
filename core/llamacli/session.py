"""Sessions: one stream of tokens through a model, with its context, sampler and statistics."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.architecture import checked_seq_len
from llamacli.engine import evaluate
from llamacli.errors import ClosedError, ContextOverflowError, InvalidRequestError, StateError
from llamacli.kv import CacheStrategy, KVSequence, snapshot
from llamacli.kv.prefixes import n_common
from llamacli.loaders import Progress
from llamacli.model import KVTypes, Model
from llamacli.sampling import Candidates, LogProbs, SamplerChain, SamplerState, SamplingParams, as_logits
from llamacli.util.closing import Closing
from llamacli.util.locking import locked
from llamacli.util.numbers import is_integer

CHECKPOINT = 64
"""After so many tokens at once, what sliding windows still have of them is kept, so that one can come back to there."""


@attrs.frozen
class Token:
    """A generated token: its `id`, and `piece`, the text that is complete with it.

    Bytes of a character that is not complete yet are held back and come with the token that completes it, so that the
    pieces of a text joined are the text, and continue that of the prompt. `logprobs` are those that `n_probs` asks for.
    """

    id: int
    piece: str
    logprobs: LogProbs | None = None


@attrs.frozen
class Stats:
    """Figures of the last `generate`.

    `n_prompt` tokens of the prompt, and those before it that were no longer cached; `n_reused` of which had been
    evaluated before, and the others took `prefill_tps` tokens a second; `n_gen` accepted at `gen_tps` a second,
    `ttft_s` seconds to the first token (prompt and first draw). Rates are 0 where no time passed.
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_gen: int = 0
    ttft_s: float = 0.0
    prefill_tps: float = 0.0
    gen_tps: float = 0.0


class Session(Closing):
    """One generation stream over a model. Sessions of one model never affect each other.

    Calls from several threads wait for one another; `close` too waits for the evaluation that another thread is in.

    - `n_past`: tokens evaluated so far, which is the next token's position.
    - `logits`: float32 [n_vocab], of the last token evaluated; sampling changes them in place.
    - `seq_len`: how many tokens fit.
    - `tokens`: those evaluated so far.
    - `n_reused`: how many of them were not evaluated here, but share pages with another session that had them.
    - `stats`: figures of the last `generate`.
    - `progress`: called with the tokens evaluated so far, and all, while more than a batch of them is; may be set.
    """

    def __init__(
        self,
        model: Model,
        *,
        seq_len: int | None = None,
        kv_type: KVTypes | None = None,
        seed: int = 1234,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
        reuse: bool = True,
        sequence: KVSequence | None = None,
    ):
        """See `Model.create_session`; or go on with a `sequence` of a cache, which then is this session's to use."""
        if sequence is None:
            seq_len = checked_seq_len(model.config.seq_len if seq_len is None else seq_len)
            sequence = KVSequence(model.kv_pool(kv_type), seq_len, model.program.rope_variant(seq_len))
        self.model, self.seq_len, self.strategy = model, sequence.seq_len, CacheStrategy.of(strategy)
        self.lock = threading.RLock()
        self._cache: KVSequence | None = sequence
        self._context: list[int] = list(sequence.tokens)
        self._prefixes = model.prefixes(sequence.kv_type, self.seq_len) if reuse else None
        if self._prefixes is not None:
            self._prefixes.add(sequence)
        self.n_reused = 0
        self._n_taken = 0  # cells that the last evaluation found with others
        self.stats = Stats()
        self.progress: Progress | None = None
        self._logits: npt.NDArray[np.float32] | None = None
        self._sampler = SamplerState(_checked_seed(seed), model.tokenizer, model.find_sampler)
        self._params: SamplingParams | SamplerChain = SamplingParams()

    @property
    def cache(self) -> KVSequence:
        """The keys and values of this session. Raises ClosedError after close(), its own or that of their cache."""
        if self._cache is None or self._cache.closed:
            raise ClosedError("the session is closed")
        return self._cache

    @property
    def n_past(self) -> int:
        """Tokens evaluated so far."""
        return len(self._context)

    @property
    def pos_max(self) -> int:
        """The position of the last token, -1 if there is none."""
        return self.n_past - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens evaluated so far."""
        return tuple(self._context)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """float32 [n_vocab]: the logits after the last token. Raises InvalidRequestError before the first eval."""
        if self._logits is None:
            raise InvalidRequestError("no token has been evaluated yet, so there are no logits")
        return self._logits

    @logits.setter
    def logits(self, logits: npt.NDArray[np.float32]) -> None:
        row, n_vocab = as_logits(logits), self.model.config.n_vocab
        if len(row) != n_vocab:
            raise InvalidRequestError(f"logits of shape {row.shape} are not ({n_vocab},)")
        self._logits = row.copy()

    @property
    def params(self) -> SamplingParams | SamplerChain:
        """What tokens are drawn by where a call gives nothing else: greedily, until it is set.

        Setting raises InvalidRequestError, changing nothing, for what is wrong with them.
        """
        return self._params

    @params.setter
    @locked
    def params(self, params: SamplingParams | SamplerChain) -> None:
        self._sampler.use(params)
        self._params = params

    @property
    def candidates(self) -> Candidates:
        """The tokens that the last one was drawn from, as samplers left them, until the next draw.

        Raises InvalidRequestError if nothing has been drawn.
        """
        return self._sampler.candidates

    @property
    def has_logits(self) -> bool:
        """Whether there are logits to draw from."""
        return self._logits is not None

    def set_seed(self, seed: int) -> None:
        """Start the stream of random draws anew: the same seed gives the same draws."""
        self._sampler.set_seed(_checked_seed(seed))

    @locked
    def eval(self, tokens: Sequence[int], *, all_logits: bool = False) -> npt.NDArray[np.float32] | None:
        """Evaluate tokens at position `n_past` onwards; afterwards `logits` are those of the last one.

        Returns float32 [len(tokens), n_vocab] with `all_logits`, else None. No tokens change nothing. How tokens are
        split over calls does not change results.

        Raises InvalidRequestError for an id that is not in the vocabulary and ContextOverflowError if the tokens do not
        fit, both before anything is evaluated.
        """
        logits = self._evaluate(self._checked(tokens), all_logits=all_logits)
        if not all_logits:
            return None
        return logits if len(logits) else np.empty((0, self.model.config.n_vocab), np.float32)

    @locked
    def rewind(self, n_past: int) -> None:
        """Forget all tokens from position `n_past` on. There are no logits then until the next `eval`.

        Where layers with a sliding window no longer have what a token there would see, that `eval` computes it again.
        Raises InvalidRequestError if `n_past` is not from 0 to the present position.
        """
        if not is_integer(n_past) or not 0 <= n_past <= self.n_past:
            raise InvalidRequestError(f"n_past must be an integer from 0 to {self.n_past}, not {n_past!r}")
        self._keep(int(n_past))
        del self._context[n_past:]
        self._logits = None
        self.n_reused = min(self.n_reused, int(n_past))

    @locked
    def remove_range(self, p0: int, p1: int = -1) -> None:
        """Take out the tokens at positions `p0` to `p1` - 1; -1 is the end, and then this is `rewind`.

        Those behind a cut in the middle move up: their keys are turned to the positions that they then have (RoPE), and
        all else that they have seen stays as it was. The logits stay too.
        Raises InvalidRequestError, changing nothing, for a range that is not there, or if a sliding window has
        forgotten what would be seen then.
        """
        stop = self.n_past if is_integer(p1) and p1 == -1 else p1
        if not is_integer(p0) or not is_integer(stop) or not 0 <= p0 <= stop <= self.n_past:
            raise InvalidRequestError(f"positions {p0!r} to {p1!r} are not within the {self.n_past} of the session")
        if stop == self.n_past:
            self.rewind(p0)
            return
        program, by = self.model.program, stop - p0
        if len(self.cache.tokens) == self.n_past:
            self.cache.remove(p0, stop, lambda layer, keys: program.shift_keys(layer, keys, by, self.seq_len))
        else:
            self._keep(p0)
        del self._context[p0:stop]
        self.n_reused = min(self.n_reused, self.n_past)

    @locked
    def clear_and_reseed(self, sinks: Sequence[int], tail: Sequence[int]) -> None:
        """Forget everything and evaluate the first tokens of the text again, then its last ones (Xiao et al. 2023).

        What a model was trained to look at first stays first, and positions begin anew, so that a text can go on for
        ever. Raises what `eval` raises, InvalidRequestError if there is no token at all, both before anything changes.
        """
        ids = self._checked([*sinks, *tail], n_past=0)
        if not len(ids):
            raise InvalidRequestError("there are neither sinks nor a tail to begin with")
        self.rewind(0)
        self._evaluate(ids)

    @locked
    def fork(self, sequence: KVSequence | None = None) -> Session:
        """A session that goes on from here on its own: same tokens, logits, sampler and draws. Pages are shared.

        It is in `sequence`, which must hold the same tokens already, or in one of its own.
        """
        sequence = self.cache.fork() if sequence is None else sequence
        child = Session(self.model, sequence=sequence, strategy=self.strategy, reuse=self._prefixes is not None)
        child._context = list(self._context)
        child._logits = None if self._logits is None else self._logits.copy()
        child._sampler, child._params = self._sampler.clone(), self._params
        child.n_reused = self.n_reused
        return child

    @locked
    def sample(self, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw the next token from `logits`, which penalties and temperature change in place.

        The drawn token counts as generated for penalties. It is not evaluated: pass it to `eval`.
        """
        token = self._draw(self.params if params is None else params)
        self.accept(token)
        return token

    @locked
    def draw(self, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw a token as `sample` does, but leave `logits` as they are, and count it only when it is accepted."""
        return self._sampler.sample(self.logits.copy(), self.params if params is None else params)

    @locked
    def legal(self, params: SamplingParams | SamplerChain | None = None) -> Candidates:
        """The tokens that `draw` may draw whatever their logits, as a grammar says, with their `logits`.

        Raises InvalidRequestError if there is no such token, or if there are no logits.
        """
        return self._sampler.legal(self.logits, self.params if params is None else params)

    @locked
    def accept(self, token: int) -> None:
        """Count a token as generated, for penalties and grammars. It is not evaluated: pass it to `eval`.

        Raises InvalidRequestError, changing nothing, if it is not in the vocabulary or the grammar does not allow it.
        """
        n_vocab = self.model.config.n_vocab
        if not is_integer(token) or not 0 <= token < n_vocab:
            raise InvalidRequestError(f"token {token!r} is not an id from 0 to {n_vocab - 1}")
        self._sampler.accept(int(token))

    @locked
    def mark(self) -> KVSequence:
        """What is cached now, shared with whatever begins alike for as long as it is held and not closed.

        With it, layers with a sliding window can come back to here from far beyond.
        """
        sequence = self.cache.fork()
        if self._prefixes is not None:
            self._prefixes.add(sequence)
        return sequence

    @locked
    def reuse(self, tokens: Sequence[int]) -> int:
        """Go on with as many of `tokens` as other sessions have evaluated, all but the last at most; returns how many.

        None is evaluated, so there are no logits then until the next `eval`. Raises what `eval` raises.
        """
        ids = self._checked(tokens)
        rest = self._begin(ids, reuse=True)[1]
        n = max(0, len(ids) - len(rest))
        if n:
            taken = ids[:n].tolist()
            self._context += taken
            self._logits = None
            self.n_reused += n
        return n

    def forget_logits(self) -> None:
        """Have no logits until the next `eval`."""
        self._logits = None

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | SamplerChain | None = None,
        *,
        max_tokens: int = 64,
        ignore_eos: bool = False,
    ) -> Iterator[Token]:
        """Evaluate `prompt`, then yield up to `max_tokens` tokens as they are drawn.

        A token is accepted when the next one is asked for: only then is it counted, remembered for penalties and
        evaluated, the last one too. Leaving the loop therefore drops the token in hand. Generation ends at an
        end-of-generation token, which is neither yielded nor evaluated, unless `ignore_eos`; and quietly when the
        context is full (`n_past == seq_len`).

        Raises what `eval` raises for the prompt, and what is wrong with `params`, at once; an empty prompt continues
        from `logits`.
        """
        params = self.params if params is None else params
        if not is_integer(max_tokens) or max_tokens < 0:
            raise InvalidRequestError(f"max_tokens must be an integer of at least 0, not {max_tokens!r}")
        checked = self._checked(prompt)
        self._sampler.use(params)
        return self._generate(checked, params, int(max_tokens), ignore_eos)

    @locked
    def save(self, path: str | os.PathLike[str], **extra: Any) -> int:
        """Write everything that it takes to go on from here to a file: tokens, keys and values, logits, draws.

        `extra` is JSON of the caller's, which `load` hands back. Returns the file's bytes. A file that is there is
        replaced at once, so that it is the old one or the new one whatever happens. Raises OSError.
        """
        return snapshot.write(path, {0: self.cache}, **self._state(extra))

    @locked
    def save_state(self, **extra: Any) -> bytes:
        """What `save` writes."""
        return snapshot.dump({0: self.cache}, **self._state(extra))

    @locked
    def state_size(self) -> int:
        """Bytes of what `save_state` gives."""
        return snapshot.state_size({0: self.cache}, **self._state({}))

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from what another session of the same model has saved; its logits and draws will be the same bits.

        Returns the `extra` that was saved. Raises StateError, changing nothing, if the file is damaged, of another
        version, of another model, mode or cache type, or does not fit; OSError; OutOfMemoryError, and then this session
        is empty.
        """
        return self._take(snapshot.read(path, self.cache.pool))

    def load_state(self, data: bytes) -> dict[str, Any]:
        """What `load` does, from the bytes of `save_state`."""
        return self._take(snapshot.load(data, self.cache.pool))

    def _state(self, extra: dict[str, Any]) -> dict[str, Any]:
        self._settle()
        arrays = {} if self._logits is None else {"logits": self._logits}
        return {"arrays": arrays, "tokens": self._context, "sampler": self._sampler.draws, "owner": extra}

    @locked
    def _take(self, state: snapshot.Snapshot) -> dict[str, Any]:
        n_vocab, logits = self.model.config.n_vocab, state.arrays.get("logits")
        tokens, sampler, owner = (state.extra.get(name) for name in ("tokens", "sampler", "owner"))
        held = state.sequences[0].tokens if state.sequences.keys() == {0} else None
        if not isinstance(tokens, list) or held != tokens[: len(held or ())] or not isinstance(owner, dict):
            raise StateError("it is not the state of a session")
        if not all(is_integer(token) and 0 <= token < n_vocab for token in tokens):
            raise StateError(f"it holds tokens that are not from 0 to {n_vocab - 1}")
        if len(tokens) > self.seq_len or (logits is not None and logits.shape != (n_vocab,)):
            raise StateError(
                f"its {len(tokens)} tokens or its logits do not fit: the context has {self.seq_len} tokens"
            )
        draws = SamplerState(0, self.model.tokenizer, self.model.find_sampler)
        try:
            draws.draws = sampler or {}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise StateError(f"its draws cannot be continued: {error}") from None
        state.check({0: self.cache})
        self._logits, self._context, self.n_reused = None, [], 0
        state.restore({0: self.cache})
        self._context = list(map(int, tokens))
        self._logits = None if logits is None else logits.copy()
        self._sampler = draws
        return owner

    @locked
    def close(self) -> None:
        """Free the cache; closing twice does nothing."""
        if self._cache is not None:
            if self._prefixes is not None:
                self._prefixes.keep(self._cache, self.model.prefix_cache_bytes)
            self._cache.close()
        self._cache = None

    def _generate(
        self, prompt: npt.NDArray[np.int32], params: SamplingParams | SamplerChain, max_tokens: int, ignore_eos: bool
    ) -> Iterator[Token]:
        self._sampler.reset()
        self.stats = Stats()
        clock = time.perf_counter
        started = clock()
        n_prompt = self.n_past + len(prompt) - min(self.n_past, len(self.cache.tokens)) if len(prompt) else 0
        self._n_taken = 0
        self._evaluate(prompt)
        prefill_s = clock() - started
        text = self.model.tokenizer.stream(self._context)
        self.stats = stats = Stats(
            n_prompt=n_prompt, n_reused=self._n_taken, prefill_tps=_rate(n_prompt - self._n_taken, prefill_s)
        )
        decode_s = 0.0
        for n_gen in range(1, max_tokens + 1):
            if self.n_past == self.seq_len:
                return
            step = clock()
            token = self._draw(params)
            decode_s += clock() - step
            if n_gen == 1:
                self.stats = stats = attrs.evolve(stats, ttft_s=clock() - started)
            if token in self.model.tokenizer.eog_ids and not ignore_eos:
                return
            piece = text.feed(token)
            is_last = n_gen == max_tokens or self.n_past + 1 == self.seq_len
            yield Token(token, piece + text.flush() if is_last else piece, self._sampler.logprobs)
            step = clock()
            self.accept(token)
            self._evaluate(np.array([token], np.int32))
            decode_s += clock() - step
            self.stats = attrs.evolve(stats, n_gen=n_gen, gen_tps=_rate(n_gen, decode_s))

    @locked
    def _draw(self, params: SamplingParams | SamplerChain) -> int:
        return self._sampler.sample(self.logits, params)

    @locked
    def _evaluate(self, ids: npt.NDArray[np.int32], *, all_logits: bool = False) -> npt.NDArray[np.float32]:
        """Run checked ids. The position moves only when all are done, so an interrupt leaves it as it was."""
        program = self.model.program
        try:
            cache, rest = self._begin(ids, reuse=not all_logits)
            logits = evaluate(program, [(cache, rest)], all_logits=all_logits, progress=self.progress)[0]
        except BaseException:
            self._settle()
            raise
        return self._end(ids, rest, logits)

    def _begin(self, ids: npt.NDArray[np.int32], *, reuse: bool) -> tuple[KVSequence, npt.NDArray[np.int32]]:
        """What has to be evaluated for `ids` to be: without them all that is not cached either."""
        cache = self.cache
        self._expect_room(len(ids))  # engines trust their caller, and `generate` may have been checked long ago
        if not len(ids) or (len(ids) == 1 and len(cache.tokens) == self.n_past):
            return cache, ids
        self._settle()
        wanted = [*self._context, *ids.tolist()]
        if reuse and self._prefixes is not None and self.strategy is CacheStrategy.ALWAYS:
            self._n_taken = self._prefixes.reuse(cache, wanted)
        return cache, np.array(wanted[len(cache.tokens) :], np.int32)

    def _settle(self) -> None:
        """Let the cache hold nothing but the session's tokens, as an interrupt, or somebody else, may have left it."""
        if self._cache is not None and not self._cache.closed:
            held = self._cache.tokens
            if held != self._context[: len(held)]:
                self._keep(n_common(held, self._context))

    def _keep(self, n: int) -> None:
        """Let the cache hold no more than n tokens: none where a window has forgotten what is before."""
        cache = self.cache
        if n < len(cache.tokens):
            cache.truncate(n if cache.can_truncate(n) else 0)

    def _end(
        self, ids: npt.NDArray[np.int32], rest: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Take over `ids`, for which `rest` was evaluated; their logits."""
        if len(ids):
            if len(ids) >= CHECKPOINT and self._prefixes is not None and self.cache.pool.layout.has_windows:
                self._prefixes.keep(self.cache, self.model.prefix_cache_bytes)
            tokens, last, n_reused = ids.tolist(), logits[-1].copy(), max(0, len(ids) - len(rest))
            self._context += tokens  # an interrupt comes before all of this or after it
            self._logits = last
            self.n_reused += n_reused
            if not self.strategy.caches(self.n_past):
                self.cache.truncate(0)
        return logits[-len(ids) :] if len(ids) else logits

    def _checked(self, tokens: Sequence[int], n_past: int | None = None) -> npt.NDArray[np.int32]:
        """The tokens as an array, once every one is known to be in the vocabulary and all of them to fit."""
        n_vocab = self.model.config.n_vocab
        try:
            ids = list(tokens)
        except TypeError:
            raise InvalidRequestError(f"tokens are a sequence of ids, not {tokens!r}") from None
        for i, token in enumerate(ids):
            if not is_integer(token) or not 0 <= token < n_vocab:
                raise InvalidRequestError(f"token {token!r} at index {i} is not an id from 0 to {n_vocab - 1}")
        self._expect_room(len(ids), n_past)
        return np.array(ids, np.int32)

    def _expect_room(self, n_tokens: int, n_past: int | None = None) -> None:
        n_past = self.n_past if n_past is None else n_past
        if n_past + n_tokens > self.seq_len:
            raise ContextOverflowError(n_past, n_tokens, self.seq_len)


def eval_batch(work: Iterable[tuple[Session, Sequence[int]]]) -> None:
    """Evaluate the tokens of many sessions of one model together, in one pass over its weights for each batch.

    Each session then is as if it had evaluated its tokens by itself. Raises what `Session.eval` raises,
    InvalidRequestError if a session is there twice or the models differ; nothing has changed then.
    """
    checked = [(session, session._checked(tokens)) for session, tokens in work]
    if len({id(session) for session, _ in checked}) < len(checked):
        raise InvalidRequestError("a session is there twice: give its tokens at once")
    if len({id(session.model) for session, _ in checked}) > 1:
        raise InvalidRequestError("sessions of different models cannot be evaluated together")
    pools: dict[int, list[tuple[Session, npt.NDArray[np.int32]]]] = defaultdict(list)
    for session, ids in checked:
        pools[id(session.cache.pool)].append((session, ids))
    done: list[tuple[Session, npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
    with contextlib.ExitStack() as locks:
        for session, _ in sorted(checked, key=lambda one: id(one[0])):  # in one order, or two could wait for each other
            locks.enter_context(session.lock)
        try:
            for members in pools.values():
                started = [session._begin(ids, reuse=True) for session, ids in members]
                results = evaluate(members[0][0].model.program, started)
                done += [
                    (session, ids, rest, logits)
                    for (session, ids), (_, rest), logits in zip(members, started, results, strict=True)
                ]
        except BaseException:
            for session, _ in checked:
                session._settle()
            raise
        for session, ids, rest, logits in done:
            session._end(ids, rest, logits)


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0


def _checked_seed(seed: int) -> int:
    if not is_integer(seed) or seed < 0:
        raise InvalidRequestError(f"seed must be an integer of at least 0, not {seed!r}")
    return int(seed)
