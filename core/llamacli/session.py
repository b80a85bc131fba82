"""Sessions: evaluation and sampling of one token stream with a KV cache."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from llamacli.drafting import Drafter, hidden_taker
from llamacli.engine import Program, evaluate
from llamacli.engine.adapters import Adapter, AdaptersLike, key_of
from llamacli.engine.batching import Checkpoint, TakeHidden
from llamacli.engine.compiled_model import CompiledModel, KVTypes
from llamacli.errors import (
    ClosedError,
    ContextOverflowError,
    EmbeddingModelError,
    InvalidRequestError,
    SessionBusyError,
    StateError,
)
from llamacli.generation import Stats, Token, generate, token_limit, until_stop
from llamacli.kv import CacheStrategy, KVSequence, snapshot
from llamacli.kv.prefixes import n_common
from llamacli.loaders import Progress
from llamacli.sampling import Candidates, LogProbs, SamplerChain, SamplerState, SamplingParams, StopStrings, as_logits
from llamacli.tokenizer import StreamDecoder
from llamacli.util.asynchronous import in_threads
from llamacli.util.foreign_names import explain_names
from llamacli.util.locking import locked
from llamacli.util.numbers import is_integer

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

MIN_CHECKPOINT = 64
"""Minimum length of a prompt at whose end sliding windows are checkpointed; recurrent states are after any prompt, and
after so many tokens that are evaluated again."""

_BUSY = "the session is in another generate that has not ended: go through its tokens, or close() it"

_UTF8_STATE = 3
"""Bytes that a UTF-8 decoder can hold back: all but the last of the longest character."""


class Session(contextlib.AbstractContextManager["Session"]):
    """Token stream over a model, with its KV cache, sampler and logits.

    Sessions of one model never affect each other's results. Calls from several threads wait for one another; `close`
    too waits for the evaluation that another thread is in. `copy.copy` and `copy.deepcopy` fork.

    - `n_past`: tokens evaluated so far, which is the next token's position.
    - `logits`: float32 [n_vocab], of the last token evaluated.
    - `n_ctx`: the context size, in tokens.
    - `tokens`: the tokens evaluated so far.
    - `n_cached`: how many of the first tokens the cache holds.
    - `n_reused`: how many tokens came from the prefix cache: they share pages with a session that had evaluated them.
    - `n_computed`: tokens that this session has run through the model so far, those evaluated again included.
    - `stats`: counts and rates of the last `generate`.
    - `stop_string`: the stop string that ended the last `generate`, "" if none did.
    - `progress`: called with the tokens evaluated so far, and all, while more than a batch of them is; may be set.
    - `adapters`: its LoRA adapters, with their scales.
    - `drafter`: proposer of tokens that `generate` uses by default (speculative decoding); may be set, None for none.

    `tokens` is the only record of what has been evaluated, and changes only once all is done. The cache holds the first
    of them: strategies and sliding windows may drop cells, and an interrupt may leave cells of other tokens. So every
    evaluation plans (drop stale cells, share cells with other sessions, evaluate what is missing), evaluates, commits.
    """

    def __init__(
        self,
        model: CompiledModel,
        *,
        n_ctx: int | None = None,
        kv_type: KVTypes | None = None,
        seed: int | None = 1234,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
        reuse: bool = True,
        adapters: AdaptersLike | None = None,
        sequence: KVSequence | None = None,
    ):
        """Create a session, as `Model.create_session` does, or continue a `sequence`.

        Its cells must be of the same adapters.
        """
        if model.program.needs_whole_input:
            raise EmbeddingModelError(
                "tokens of this model attend to later ones, so it cannot generate text: use it for embeddings"
            )
        self.adapters = model.adapters if adapters is None else model.check_adapters(adapters)
        if sequence is None:
            n_ctx, variant = model.context_size(n_ctx), key_of(self.adapters)
            sequence = KVSequence(model.kv_pool(kv_type), n_ctx, model.program.rope_variant(n_ctx), variant)
        model.program_with(self.adapters)  # compiled now, so that errors and waiting come here
        self.model, self.n_ctx, self.strategy = model, sequence.seq_len, CacheStrategy.of(strategy)
        self.lock = threading.RLock()
        self._cache: KVSequence | None = sequence
        self._tokens: list[int] = list(sequence.tokens)
        self._prefixes = model.prefixes(sequence.kv_type, self.n_ctx) if reuse else None
        if self._prefixes is not None:
            self._prefixes.add(sequence)
        self.n_reused = self.n_computed = 0
        self.stats = Stats()
        self.stop_string = ""
        self.progress: Progress | None = None
        self.drafter: Drafter | None = None
        self._speculates: Drafter | None = None
        self._logits: Logits | None = None
        self._ahead: list[tuple[int, Logits]] = []
        self._sampler = SamplerState(_checked_seed(seed), model.tokenizer, model.find_sampler)
        self._params: SamplingParams | SamplerChain = SamplingParams()
        self._generation: object | None = None

    @property
    def cache(self) -> KVSequence:
        """KV cache of the session.

        Raises ClosedError after close(), its own or that of the cache it is a sequence of.
        """
        if self._cache is None or self._cache.closed:
            raise ClosedError("the session is closed")
        return self._cache

    @property
    def program(self) -> Program:
        """The forward pass of the model with the session's adapters."""
        return self.model.program_with(self.adapters)

    @property
    def n_past(self) -> int:
        """Number of tokens evaluated so far."""
        return len(self._tokens)

    @property
    def pos_max(self) -> int:
        """Position of the last token, -1 if there is none."""
        return self.n_past - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens evaluated so far."""
        return tuple(self._tokens)

    @property
    def n_cached(self) -> int:
        """Number of tokens, from the first on, that the cache holds.

        Those after them were dropped by a `strategy` or a sliding window, and are evaluated again before new tokens.
        """
        return n_common(self.cache.tokens, self._tokens)

    @property
    def logits(self) -> Logits:
        """Logits after the last token, float32 [n_vocab].

        Raises InvalidRequestError before the first eval.
        """
        if self._logits is None:
            raise InvalidRequestError("no token has been evaluated yet, so there are no logits")
        return self._logits

    @logits.setter
    def logits(self, logits: Logits) -> None:
        row, n_vocab = as_logits(logits), self.model.config.n_vocab
        if len(row) != n_vocab:
            raise InvalidRequestError(f"logits of shape {row.shape} are not ({n_vocab},)")
        self._logits = row.copy()

    @property
    def has_logits(self) -> bool:
        """True if there are logits to draw from."""
        return self._logits is not None

    def clear_logits(self) -> None:
        """Drop the logits: there are none until the next `eval`."""
        self._logits = None

    @property
    def params(self) -> SamplingParams | SamplerChain:
        """Default sampling parameters; greedy until set.

        Setting raises InvalidRequestError, changing nothing, if they are invalid.
        """
        return self._params

    @params.setter
    @locked
    def params(self, params: SamplingParams | SamplerChain) -> None:
        self._sampler.use(params)
        self._params = params

    @property
    def steer(self) -> Callable[[Candidates], None] | None:
        """Function that changes the candidates of each draw, or None.

        May be set. It is called after grammars, bans and the logit bias, before all other samplers. Forks do not
        inherit it.
        """
        return self._sampler.steer

    @steer.setter
    def steer(self, steer: Callable[[Candidates], None] | None) -> None:
        if steer is not None and not callable(steer):
            raise InvalidRequestError(f"steer must be a function of candidates or None, not {steer!r}")
        self._sampler.steer = steer

    @property
    def candidates(self) -> Candidates:
        """Candidates of the last draw, as the samplers left them.

        Raises InvalidRequestError if nothing has been drawn.
        """
        return self._sampler.candidates

    @property
    def logprobs(self) -> LogProbs | None:
        """Log-probabilities of the last draw, where `n_probs` asks for them, else None."""
        return self._sampler.logprobs

    def set_seed(self, seed: int | None) -> int:
        """Seed the random generator: the same seed gives the same draws.

        None and -1 are a random seed. Returns the seed.
        """
        seed = _checked_seed(seed)
        self._sampler.set_seed(seed)
        return seed

    @locked
    def reset_sampler(self) -> None:
        """Clear the accepted tokens that penalties and grammars count."""
        self._sampler.reset()

    @locked
    def eval(self, tokens: Sequence[int], *, all_logits: bool = False) -> Logits | None:
        """Evaluate tokens at position `n_past` onwards.

        Afterwards `logits` are those of the last one. Returns float32 [len(tokens), n_vocab] with `all_logits`, else
        None. No tokens change nothing. How tokens are split over calls does not change results.

        Raises InvalidRequestError for an id that is not in the vocabulary and ContextOverflowError if the tokens do not
        fit, both before anything is evaluated.
        """
        ids = self._checked(tokens)
        if len(ids) == 1 and not all_logits and self.is_ahead(int(ids[0])):
            (token, logits_ahead), ahead = self._ahead[0], self._ahead[1:]
            self._tokens += (token,)  # no call from here on: an interrupt comes before all of this or after it
            self._logits, self._ahead = logits_ahead, ahead
            return None
        logits = _evaluate([(self, ids)], all_logits=all_logits, progress=self.progress)[0]
        if not all_logits:
            return None
        return logits[-len(ids) :] if len(ids) else np.empty((0, self.model.config.n_vocab), np.float32)

    @locked
    def eval_ahead(self, token: int, draft: Sequence[int]) -> None:
        """Evaluate a token, and in the same pass those that may follow.

        Afterwards the session is as after `eval([token])`. If the next tokens are those of the draft, `eval` of each of
        them costs nothing; any other use of the session drops them. With recurrent states, tokens that came of a draft
        before one that did not are evaluated again with the next. Raises what `eval` raises for all of the tokens.
        """
        ids = self._checked([token, *draft])
        if len(ids) == 1 or self.strategy is not CacheStrategy.ALWAYS:
            self.eval(ids[:1].tolist())
            return
        cache, missing = self._plan(ids, reuse=False)
        n_ahead = len(ids) - 1
        try:
            work, takers = [(cache, missing)], [self._hidden_taker]
            logits = evaluate(self.program, work, n_last=[len(ids)], n_ahead=[n_ahead], hidden_out=takers)[0]
        except BaseException:
            self._drop_stale_cells()
            raise
        (first, *rest), rows = ids.tolist(), list(logits)
        ahead, n_computed = list(zip(rest, rows[1:], strict=True)), len(missing)
        self._tokens += (first,)  # no call from here on, as in _commit
        self._logits, self._ahead = rows[0], ahead
        self.n_computed += n_computed

    @property
    def _hidden_taker(self) -> TakeHidden | None:
        """Method of the present drafter that takes hidden states, or None."""
        return hidden_taker(self._speculates or self.drafter)

    def is_ahead(self, token: int) -> bool:
        """True if `eval` of this token next costs nothing, see `eval_ahead`."""
        return (
            bool(self._ahead)
            and self._ahead[0][0] == token
            and len(self.cache.tokens) == self.n_past + len(self._ahead)
        )

    @locked
    def rewind(self, n_past: int) -> None:
        """Truncate the context to its first `n_past` tokens.

        The logits are cleared until the next `eval`. Where layers with a sliding window no longer have what a token
        there would see, or recurrent states are those after later tokens, that `eval` computes it again, from the
        nearest checkpoint on: ends of prompts are checkpoints, unless the session was created without `reuse`. Raises
        InvalidRequestError if `n_past` is not from 0 to the present position.
        """
        if not is_integer(n_past) or not 0 <= n_past <= self.n_past:
            raise InvalidRequestError(f"n_past must be an integer from 0 to {self.n_past}, not {n_past!r}")
        self._truncate_cache(int(n_past))
        del self._tokens[n_past:]
        self._logits = None
        self.n_reused = min(self.n_reused, int(n_past))

    @locked
    def remove_range(self, p0: int, p1: int = -1) -> None:
        """Remove the tokens at positions `p0` to `p1` - 1.

        A `p1` of -1 is the end, and then this is `rewind`. Tokens behind the gap move up, as llama.cpp's context shift
        does: their keys are rotated to their new positions (RoPE), and what they have attended to stays in them. The
        logits stay too. With recurrent states they are evaluated again instead, at the next `eval`. Raises
        InvalidRequestError, changing nothing, for a range outside the context, or if a sliding window no longer has
        what would be seen then.
        """
        stop = self.n_past if is_integer(p1) and p1 == -1 else p1
        if not is_integer(p0) or not is_integer(stop) or not 0 <= p0 <= stop <= self.n_past:
            raise InvalidRequestError(f"positions {p0!r} to {p1!r} are not within the {self.n_past} of the session")
        if stop == self.n_past:
            self.rewind(p0)
            return
        program, by = self.program, stop - p0
        if len(self.cache.tokens) == self.n_past and not self.cache.pool.layout.recurrent:
            self.cache.remove(p0, stop, lambda layer, keys: program.shift_keys(layer, keys, by, self.n_ctx))
        else:
            self._truncate_cache(p0)
        del self._tokens[p0:stop]
        self.n_reused = min(self.n_reused, self.n_past)

    @locked
    def clear_and_reseed(self, sinks: Sequence[int], tail: Sequence[int]) -> None:
        """Restart the context with attention sinks and the last tokens.

        As in StreamingLLM (Xiao et al. 2023), both are evaluated from position 0 on, so that a text can go on without
        end. Raises what `eval` raises, InvalidRequestError if there is no token at all, both before anything changes.
        """
        ids = self._checked([*sinks, *tail], n_past=0)
        if not len(ids):
            raise InvalidRequestError("sinks and tail are both empty: at least one token is needed")
        self.rewind(0)
        self.eval(ids.tolist())

    @locked
    def fork(self, sequence: KVSequence | None = None) -> Session:
        """Copy this session: same tokens, logits, sampler and draws.

        Pages are shared. The copy is in `sequence`, which must hold the same tokens already, or in one of its own.
        """
        sequence = self.cache.fork() if sequence is None else sequence
        child = Session(
            self.model,
            sequence=sequence,
            strategy=self.strategy,
            reuse=self._prefixes is not None,
            adapters=self.adapters,
        )
        child._tokens = list(self._tokens)
        child._logits = None if self._logits is None else self._logits.copy()
        child._sampler, child._params = self._sampler.clone(), self._params
        child.n_reused = self.n_reused
        return child

    def __copy__(self) -> Session:
        """Fork: a session's cache cannot be shared by two sessions."""
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """Fork, with the same model."""
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError("a session belongs to a model in memory and cannot be pickled: use save_state and load_state")

    def __repr__(self) -> str:
        if self._cache is None or self._cache.closed:
            return "<Session, closed>"
        return f"<Session, {self.n_past} of {self.n_ctx} tokens, cache {self._cache.kv_type}>"

    @locked
    def draw(self, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw the next token from a copy of `logits`.

        Only the random generator changes. Pass the token to `accept`, for penalties and grammars to count it, and to
        `eval`, to continue with it.
        """
        return self._sampler.sample(self.logits.copy(), self.params if params is None else params)

    @locked
    def sample(self, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw and `accept` the next token, changing `logits` in place.

        In place as llama.cpp's samplers work on their candidates: afterwards `logits` show what penalties and
        temperature have made of them, and a second `sample` begins with that. `draw` leaves them alone. The token is
        not evaluated: pass it to `eval`.
        """
        token = self._sampler.sample(self.logits, self.params if params is None else params)
        self.accept(token)
        return token

    @locked
    def legal(self, params: SamplingParams | SamplerChain | None = None) -> Candidates:
        """Tokens that grammars and bans leave to `draw`.

        The candidates have their `logits`. Raises InvalidRequestError if there is no such token, or if there are no
        logits.
        """
        return self._sampler.legal(self.logits, self.params if params is None else params)

    @locked
    def accept(self, token: int) -> None:
        """Count a token as generated, for penalties and grammars.

        It is not evaluated: pass it to `eval`. Raises InvalidRequestError, changing nothing, if it is not in the
        vocabulary or the grammar does not allow it.
        """
        n_vocab = self.model.config.n_vocab
        if not is_integer(token) or not 0 <= token < n_vocab:
            raise InvalidRequestError(f"token {token!r} is not an id from 0 to {n_vocab - 1}")
        self._sampler.accept(int(token))

    def decoder(self) -> StreamDecoder:
        """Incremental decoder for the tokens to come.

        Its text continues that of `tokens`.
        """
        tokenizer, tokens = self.model.tokenizer, self._tokens
        # Earlier tokens change two things in a decoder: whether there was text before, and the bytes it holds back.
        n_bytes = 0
        for i in range(len(tokens) - 1, -1, -1):
            n_bytes += len(tokenizer.piece_bytes(tokens[i]))
            if n_bytes >= _UTF8_STATE:
                first = next(token for token in tokens if tokenizer.piece_bytes(token))
                return tokenizer.stream([first, *tokens[i:]])
        return tokenizer.stream(tokens)

    @locked
    def checkpoint(self) -> KVSequence:
        """Pin the current KV cache, so that sessions can reuse it.

        With it, layers with a sliding window can be rewound to here from far beyond, and recurrent states at all. It
        lasts as long as it is referred to and not closed.
        """
        sequence = self.cache.fork()
        if self._prefixes is not None:
            self._prefixes.add(sequence)
        return sequence

    @locked
    def reuse(self, tokens: Sequence[int]) -> int:
        """Continue with those first `tokens` that the prefix cache holds.

        Returns how many. These are all but the last at most. None is evaluated, so there are no logits then until the
        next `eval`. Raises what `eval` raises.
        """
        ids = self._checked(tokens)
        _, missing = self._plan(ids, reuse=True)
        n = max(0, len(ids) - len(missing))
        if n:
            self._tokens += ids[:n].tolist()
            self._logits = None
            self.n_reused += n
        return n

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of text that is to follow the session's tokens.

        At the beginning that is a prompt, with BOS where the model expects it; later on it is neither given BOS nor the
        space that some tokenizers put first. With `parse_special`, spelled special tokens become their ids. Raises
        TokenizerError if the vocabulary cannot express the text.
        """
        tokenizer = self.model.tokenizer
        if not self._tokens:
            return tokenizer.encode_prompt(text, parse_special=parse_special)
        if not parse_special:
            return tokenizer.encode_run(text, continues=True)
        ids: list[int] = []
        for part in tokenizer.split(text, tokenizer.special_ids):
            ids += [part] if isinstance(part, int) else tokenizer.encode_run(part, continues=True)
        return ids

    @explain_names
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | SamplerChain | None = None,
        *,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        speculate: Drafter | None = None,
    ) -> Generator[Token, None, None]:
        """Evaluate `prompt`, then yield up to `max_tokens` tokens as they are drawn.

        The prompt is token ids, or text, which is tokenized as `encode` does: special tokens in it stay text. With None
        or -1 for `max_tokens` the text goes on until it ends or the context is full.

        A token is accepted when the next one is asked for: only then is it counted, remembered for penalties and
        evaluated, the last one too. Leaving the loop therefore drops the token in hand. Generation ends at an
        end-of-generation token, which is neither yielded nor evaluated, unless `ignore_eos`; and quietly when the
        context is full (`n_past == n_ctx`).

        With stop strings in `params` the text ends before the first that comes, which `stop_string` then is; tokens
        that hold a part of it are not in the context afterwards. A token comes once its text is certain to be before a
        stop string, so a few later ones may have been evaluated by then.

        `speculate` proposes tokens that are evaluated together (speculative decoding), which can be faster and never
        changes the text: see `llamacli.speculation`. The default is `drafter`.

        Raises what `eval` raises for the prompt, and what is wrong with `params`, at once; an empty prompt continues
        from `logits`. SessionBusyError if another `generate` of this session has begun and not ended: go through it, or
        `close` it. The loop itself is `llamacli.generation.generate`.
        """
        if self._generation is not None:
            raise SessionBusyError(_BUSY)
        params = self.params if params is None else params
        limit = token_limit(max_tokens, self.n_ctx)
        ids = self._checked(self.encode(prompt) if isinstance(prompt, str) else prompt).tolist()
        drafter = self.drafter if speculate is None else speculate
        if drafter is not None:
            drafter.begin(self.model)
        self._sampler.use(params)
        tokens = generate(self, ids, params, max_tokens=limit, ignore_eos=ignore_eos, speculate=drafter)
        self.stop_string = ""
        stops = params.stop if isinstance(params, SamplingParams) else ()
        if stops:
            tokens = until_stop(self, tokens, StopStrings(stops), len(ids))
        return self._exclusively(tokens, drafter)

    @explain_names
    def generate_async(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | SamplerChain | None = None,
        *,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        speculate: Drafter | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Generate tokens for `async for`, computing in threads.

        Arguments, results and errors are those of `generate`; the event loop goes on meanwhile. When the task is
        cancelled, what a thread is computing (the prompt, or a token) is finished first.
        """
        tokens = self.generate(prompt, params, max_tokens=max_tokens, ignore_eos=ignore_eos, speculate=speculate)
        return in_threads(tokens)

    def _exclusively(self, tokens: Iterator[Token], drafter: Drafter | None) -> Generator[Token, None, None]:
        """Generated tokens, while no other `generate` of this session may begin."""
        generation = object()
        try:
            with self.lock:
                if self._generation is not None:
                    raise SessionBusyError(_BUSY)
                self._generation, self._speculates = generation, drafter
            yield from tokens
        finally:
            self._drop_ahead()
            if self._generation is generation:
                self._generation = self._speculates = None

    @locked
    def save(self, path: str | os.PathLike[str], **extra: Any) -> int:
        """Write the whole state to a file.

        Tokens, keys and values, logits, random generator. `extra` is JSON of the caller's, which `load` returns.
        Returns the file's size in bytes. An existing file is replaced atomically. Raises OSError.
        """
        return snapshot.write(path, {0: self.cache}, **self._state(extra))

    @locked
    def save_state(self, **extra: Any) -> bytes:
        """Bytes that `save` writes."""
        return snapshot.dump({0: self.cache}, **self._state(extra))

    @locked
    def state_size(self) -> int:
        """Size of `save_state` in bytes."""
        return snapshot.state_size({0: self.cache}, **self._state({}))

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore a saved state; logits and draws continue bit for bit.

        It must be of the same model. Returns the `extra` that was saved. Raises StateError, changing nothing, if the
        file is damaged, of another version, of another model, mode or cache type, or does not fit; OSError;
        OutOfMemoryError, and then this session is empty.
        """
        return self._restore(snapshot.read(path, self.cache.pool))

    def load_state(self, data: bytes) -> dict[str, Any]:
        """Restore the bytes of `save_state`, as `load` does."""
        return self._restore(snapshot.load(data, self.cache.pool))

    def _state(self, extra: dict[str, Any]) -> dict[str, Any]:
        self._drop_stale_cells()
        arrays = {} if self._logits is None else {"logits": self._logits}
        return {"arrays": arrays, "tokens": self._tokens, "sampler": self._sampler.draws, "owner": extra}

    @locked
    def _restore(self, state: snapshot.Snapshot) -> dict[str, Any]:
        n_vocab, logits = self.model.config.n_vocab, state.arrays.get("logits")
        tokens, sampler, owner = (state.extra.get(name) for name in ("tokens", "sampler", "owner"))
        held = state.sequences[0].tokens if state.sequences.keys() == {0} else None
        if not isinstance(tokens, list) or held != tokens[: len(held or ())] or not isinstance(owner, dict):
            raise StateError("not the saved state of a session")
        if not all(is_integer(token) and 0 <= token < n_vocab for token in tokens):
            raise StateError(f"the saved state has tokens that are not from 0 to {n_vocab - 1}")
        if len(tokens) > self.n_ctx or (logits is not None and logits.shape != (n_vocab,)):
            raise StateError(
                f"the {len(tokens)} tokens or the logits of the saved state do not fit into {self.n_ctx} tokens"
            )
        draws = SamplerState(0, self.model.tokenizer, self.model.find_sampler)
        try:
            draws.draws = sampler or {}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise StateError(f"the random generator of the saved state cannot be restored: {error}") from None
        draws.steer = self.steer
        state.check({0: self.cache})
        self._logits, self._tokens, self._ahead, self.n_reused = None, [], [], 0
        state.restore({0: self.cache})
        self._tokens = list(map(int, tokens))
        self._logits = None if logits is None else logits.copy()
        self._sampler = draws
        return owner

    @locked
    def close(self) -> None:
        """Free the KV cache, which the prefix cache may keep.

        Closing twice does nothing.
        """
        if self._cache is not None:
            self._keep(self._cache)
            self._cache.close()
        self._cache = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan(self, ids: Ids, *, reuse: bool) -> tuple[KVSequence, Ids]:
        """Prepare the cache for `ids`; returns it and all tokens to evaluate.

        Those are `ids`, and before them any tokens that are not cached.
        """
        cache = self.cache
        if len(ids) and self._ahead and len(cache.tokens) == self.n_past + len(self._ahead):
            self._truncate_cache(self.n_past)  # of drafted tokens: what is before them needs no comparison
        if not len(ids) or (len(ids) == 1 and len(cache.tokens) == len(self._tokens)):
            return cache, ids
        self._drop_stale_cells()
        wanted = [*self._tokens, *ids.tolist()]
        if reuse and self._prefixes is not None and self.strategy is CacheStrategy.ALWAYS:
            self._prefixes.reuse(cache, wanted)
        return cache, np.array(wanted[len(cache.tokens) :], np.int32)

    def _commit(self, ids: Ids, n_computed: int, logits: Logits) -> None:
        """Append evaluated `ids` to the tokens; `n_computed` were run through the model."""
        if not len(ids):
            return
        layout = self.cache.pool.layout
        if (layout.has_windows and len(ids) >= MIN_CHECKPOINT) or (layout.recurrent and len(ids) > 1):
            self._keep(self.cache)
        tokens, last, n_reused = ids.tolist(), logits[-1].copy(), max(0, len(ids) - n_computed)
        self._tokens += tokens  # no call from here on: an interrupt comes before all of this or after it
        self._logits = last
        self.n_reused += n_reused
        self.n_computed += n_computed
        if not self.strategy.caches(self.n_past):
            self.cache.truncate(0)

    def _drop_stale_cells(self) -> None:
        """Drop cells of other tokens than the session's.

        Interrupts and changes to the cache leave such cells.
        """
        if self._cache is not None and not self._cache.closed:
            self._truncate_cache(self.n_cached)

    def _truncate_cache(self, n: int) -> None:
        """Keep at most the first n cells.

        None if a sliding window no longer has what is before them, or recurrent states are those after more tokens.
        """
        cache, self._ahead = self.cache, []
        if n < len(cache.tokens):
            cache.truncate(cache.floor(n))

    @locked
    def _drop_ahead(self) -> None:
        """Drop the cells of tokens that were evaluated ahead."""
        if self._ahead:
            self._drop_stale_cells()

    def _keep(self, sequence: KVSequence) -> None:
        """Keep a copy of a sequence in the prefix cache."""
        if self._prefixes is not None:
            self._prefixes.keep(sequence, self.model.prefix_cache_bytes)

    def _checked(self, tokens: Sequence[int], n_past: int | None = None) -> npt.NDArray[np.int32]:
        """Check that tokens are in the vocabulary and fit; int32 [n]."""
        n_vocab, given = self.model.config.n_vocab, cast(object, tokens)
        if isinstance(given, str):
            raise InvalidRequestError(f"tokens are a sequence of ids, not the text {given[:40]!r}: use encode(text)")
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
        if n_past + n_tokens > self.n_ctx:
            raise ContextOverflowError(n_past, n_tokens, self.n_ctx)


def eval_batch(work: Iterable[tuple[Session, Sequence[int]]]) -> None:
    """Evaluate the next tokens of many sessions of one model together.

    Each batch of tokens is one pass over the weights, for sessions with the same LoRA adapters.

    Each session then is as if it had evaluated its tokens by itself. Raises what `Session.eval` raises,
    InvalidRequestError if a session is there twice or the models differ; nothing has changed then.
    """
    checked = [(session, session._checked(tokens)) for session, tokens in work]
    if len({id(session) for session, _ in checked}) < len(checked):
        raise InvalidRequestError("a session is there twice: give its tokens at once")
    if len({id(session.model) for session, _ in checked}) > 1:
        raise InvalidRequestError("sessions of different models cannot be evaluated together")
    with contextlib.ExitStack() as locks:
        for session, _ in sorted(checked, key=lambda one: id(one[0])):  # in one order, or two could wait for each other
            locks.enter_context(session.lock)
        for session, ids in checked:
            session._expect_room(len(ids))  # another thread may have used it since
        if checked:
            _evaluate(checked)


def _evaluate(
    work: Sequence[tuple[Session, Ids]], *, all_logits: bool = False, progress: Progress | None = None
) -> list[Logits]:
    """Plan, evaluate and commit checked tokens; the logits of each session.

    The sessions' locks are held. Tokens and logits of a session change only in the end, when all are evaluated.
    """

    def keep(i: int, sequence: KVSequence) -> None:
        work[i][0]._keep(sequence)
        sequence.close()

    try:
        plans = [session._plan(ids, reuse=not all_logits) for session, ids in work]
        reads = any(len(ids) > 1 for _, ids in work) or any(len(missing) >= MIN_CHECKPOINT for _, missing in plans)
        checkpoint = keep if plans[0][0].pool.layout.recurrent and reads else None  # not after drafts
        results = _evaluate_plans(work, plans, all_logits=all_logits, progress=progress, checkpoint=checkpoint)
    except BaseException:
        for session, _ in work:
            session._drop_stale_cells()
        raise
    for (session, ids), (_, computed), logits in zip(work, plans, results, strict=True):
        session._commit(ids, len(computed), logits)
    return results


def _evaluate_plans(
    work: Sequence[tuple[Session, Ids]],
    plans: Sequence[tuple[KVSequence, Ids]],
    *,
    checkpoint: Checkpoint | None,
    **options: Any,
) -> list[Logits]:
    """Evaluate plans, those of each program together."""
    members: dict[tuple[tuple[Adapter, float], ...], list[int]] = {}
    for i, (session, _) in enumerate(work):
        members.setdefault(session.adapters, []).append(i)
    results: dict[int, Logits] = {}
    for group in members.values():

        def keep(i: int, sequence: KVSequence, group: Sequence[int] = group) -> None:
            assert checkpoint is not None
            checkpoint(group[i], sequence)

        program, chosen = work[group[0]][0].program, [plans[i] for i in group]
        takers = [work[i][0]._hidden_taker for i in group]
        found = evaluate(
            program,
            chosen,
            checkpoint=keep if checkpoint else None,
            hidden_out=takers if any(takers) else None,
            **options,
        )
        results |= zip(group, found, strict=True)
    return [results[i] for i in range(len(work))]


def _checked_seed(seed: int | None) -> int:
    """Check a seed; None and -1 are a random one."""
    if seed is None or (is_integer(seed) and seed == -1):
        return secrets.randbits(32)
    if not is_integer(seed) or seed < 0:
        raise InvalidRequestError(
            f"seed must be an integer of at least 0, or None or -1 for a random one, not {seed!r}"
        )
    return int(seed)
