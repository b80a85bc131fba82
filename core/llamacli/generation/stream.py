"""Token streams: evaluated tokens with their KV cache and logits."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from llamacli.engine import Program, Prompts
from llamacli.engine.adapters import AdaptersLike, key_of
from llamacli.engine.batching import Chunk, Logits, TakeHidden, check_inputs, evaluate
from llamacli.engine.compiled_model import CompiledModel, KVTypes
from llamacli.errors import ClosedError, ContextOverflowError, EmbeddingModelError, InvalidRequestError
from llamacli.generation.drafting import Draft
from llamacli.generation.text import DrawnText
from llamacli.inputs import Contents, Inputs, cell_keys, tokens_of
from llamacli.kv import CacheStrategy, KVSequence
from llamacli.kv.prefixes import n_common
from llamacli.loaders import Progress
from llamacli.sampling import SamplerChain, SamplerState, SamplingParams, as_logits
from llamacli.util.locking import fork_safe, locked
from llamacli.util.numbers import is_integer

_NO_LOGITS = "no token has been evaluated yet, so there are no logits"

MIN_CHECKPOINT = 64
"""Minimum length of a prompt at whose end sliding windows are checkpointed; recurrent states are after any prompt, and
after so many tokens that are evaluated again."""


class TokenSequence(ABC):
    """Tokens of one text, with their KV cache, logits and sampler.

    A step evaluates chunks of any number of sequences, and goes on with each sequence that has logits: `draw` a token,
    `take` it into the text, `advance` behind it. A sequence whose draft had the token has logits again.

    - `lock`: held while a token is drawn, or accepted.
    - `params`: sampling parameters of draws that are given none.
    - `text`: the text that is generated, None without. `draft`: its drafts, None without.
    """

    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    text: DrawnText[Any] | None = None
    draft: Draft | None = None
    params: SamplingParams | SamplerChain = SamplingParams()
    _tokens: list[int]
    _sampler: SamplerState
    _logits: Logits | None = None
    _ahead: Sequence[tuple[int, Logits]] = ()  # drafted tokens behind the last one in the cache, with logits after each
    _accepted: Sequence[int] = ()  # the token that was drawn last, until it is evaluated

    @property
    @abstractmethod
    def cache(self) -> KVSequence:
        """KV cache, which holds the first tokens, and after them drafted ones."""

    @property
    @abstractmethod
    def n_missing(self) -> int:
        """Tokens to evaluate before the next draw."""

    @property
    @abstractmethod
    def n_left(self) -> int:
        """Tokens that may still be drawn."""

    @property
    def context(self) -> list[int]:
        """All tokens accepted so far; the last `n_missing` are to be evaluated."""
        return self._tokens

    def draw(self, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw the next token from a copy of `logits`.

        Only the random generator changes. Pass the token to `accept`, for penalties and grammars to count it, and to
        `eval`, to continue with it.
        """
        with self.lock:
            if self._logits is None:
                raise InvalidRequestError(_NO_LOGITS)
            return self._sampler.draw(self._logits, self.params if params is None else params)

    def take(self, token: int) -> list[Any]:
        """Add a drawn token; returns the text that is certain now."""
        assert self.text is not None
        return self.text.take(token, self._sampler.logprobs, is_last=self.n_left == 1)

    def is_ahead(self, token: int) -> bool:
        """True if the draft that was evaluated continues with a token."""
        return (
            bool(self._ahead)
            and self._ahead[0][0] == token
            and len(self.cache.tokens) == len(self._tokens) + len(self._ahead)
        )

    def advance(self, token: int, *, accept: bool = False) -> bool:
        """Go on behind a drawn token; True if the draft had it.

        Then `logits` are already the next token's. Else it is to be evaluated, and the rest of the draft is dropped.
        With `accept` it counts as generated, for penalties and grammars.
        """
        with self.lock:
            if accept:
                self._sampler.accept(token)
            if self._ahead and self.is_ahead(token):
                if self.draft is not None:
                    self.draft.accepts(token)
                (_, logits), ahead = self._ahead[0], self._ahead[1:]
                self._tokens += (token,)  # no call from here on: an interrupt comes before all of this or after it
                self._logits, self._ahead = logits, ahead
                return True
            if self._ahead or self.draft is not None:
                self.settle()
            self._accepted = (token,)
            return False

    def settle(self) -> None:
        """Drop evaluated draft tokens that were not drawn."""
        if self.draft is not None and self.draft.tokens:
            self.draft.settle()
        if self._ahead:
            self._truncate_cache(len(self._tokens))

    def drop_draft(self) -> None:
        """Generate without drafts from now on."""
        self.draft = None

    def _truncate_cache(self, n: int) -> None:
        """Keep at most the first n cells.

        None if a sliding window has lost the cells before them, or recurrent states have gone on beyond them.
        """
        cache, self._ahead = self.cache, ()
        if n < len(cache.tokens):
            cache.truncate(cache.floor(n))


class TokenStream(TokenSequence):
    """Evaluated tokens of one text, with their KV cache and logits.

    Streams of one model never affect each other's results. Calls from several threads wait for one another; `close`
    too waits for the evaluation that another thread is in. `llamacli.Session` adds sampling and generation.

    - `n_past`: tokens evaluated so far, which is the next token's position.
    - `logits`: float32 [n_vocab], of the last token evaluated.
    - `n_ctx`: the context size, in tokens.
    - `tokens`: the tokens evaluated so far, as content keys: ids, and negative numbers for other `Inputs`.
    - `n_cached`: how many of the first tokens the cache holds.
    - `n_reused`: how many tokens came from the prefix cache: they share pages with a stream that had evaluated them.
    - `n_computed`: tokens run through the model for it so far, with each repetition.
    - `progress`: called with the tokens evaluated so far, and all, while more than a batch of them is; may be set.
    - `adapters`: its LoRA adapters, with their scales.

    `tokens` is the only record of what has been evaluated, and changes only once all is done. The cache holds the first
    of them: strategies and sliding windows may drop cells, and an interrupt may leave cells of other tokens. So every
    evaluation plans (drop stale cells, share cells with other streams, evaluate what is missing), evaluates, commits.
    """

    def __init__(
        self,
        model: CompiledModel,
        *,
        n_ctx: int | None = None,
        kv_type: KVTypes | None = None,
        strategy: str | CacheStrategy = CacheStrategy.ALWAYS,
        reuse: bool = True,
        adapters: AdaptersLike | None = None,
        sequence: KVSequence | None = None,
    ):
        """Create an empty stream, or continue a `sequence`.

        Its cells must be of the same adapters. Arguments are described at `llamacli.Model.create_session`.
        """
        if model.program.needs_whole_input:
            raise EmbeddingModelError(
                "tokens of this model attend to later ones, so it cannot generate text: use it for embeddings, or "
                "llamacli.fill_masks if it is one of masked diffusion"
            )
        self.adapters = model.adapters if adapters is None else model.check_adapters(adapters)
        if sequence is None:
            n_ctx, variant = model.context_size(n_ctx), key_of(self.adapters)
            sequence = KVSequence(model.kv_pool(kv_type), n_ctx, model.program.rope_variant(n_ctx), variant)
        self._adapted = model.keep_program(self.adapters)  # compiled now, so that errors and waiting come here
        self.model, self.n_ctx, self.strategy = model, sequence.seq_len, CacheStrategy.of(strategy)
        self.lock = fork_safe(threading.RLock())
        self._cache: KVSequence | None = sequence
        self._contents = Contents()
        self._tokens, self._n_prompt = tokens_of(sequence.tokens)
        self._has_ways = model.program.prompts is Prompts.TILES  # prompts go another way than generated tokens
        self._prefixes = model.prefixes(sequence.kv_type, self.n_ctx) if reuse else None
        if self._prefixes is not None:
            self._prefixes.add(sequence)
        self.n_reused = self.n_computed = 0
        self.progress: Progress | None = None
        self._take_hidden: TakeHidden | None = None  # takes the hidden states of evaluated tokens

    @property
    def cache(self) -> KVSequence:
        """KV cache of the stream.

        Raises ClosedError after its own close(), and after its cache's.
        """
        if self._cache is None or self._cache.closed:
            raise ClosedError("the session is closed")
        return self._cache

    @property
    def program(self) -> Program:
        """The forward pass of the model with the stream's adapters."""
        return self.model.program_with(self.adapters)

    @property
    def n_past(self) -> int:
        """Number of tokens evaluated so far."""
        return len(self._tokens)

    @property
    def pos_max(self) -> int:
        """Position of the last token, -1 if there is none.

        Of several components, the largest.
        """
        return self._contents.next_position(self._tokens) - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens evaluated so far, as content keys.

        Keys are ids, and negative numbers for other inputs.
        """
        return tuple(self._tokens)

    @property
    def context(self) -> list[int]:
        """Tokens evaluated so far, and the one accepted behind them."""
        return [*self._tokens, *self._accepted]

    @property
    def n_missing(self) -> int:
        """Tokens of the context that the cache does not hold."""
        return len(self._tokens) + len(self._accepted) - self.n_cached

    @property
    def n_left(self) -> int:
        """Tokens that the text and the context have room for."""
        n_room = self.n_ctx - len(self._tokens)
        return n_room if self.text is None else min(self.text.n_left, n_room)

    @property
    def n_cached(self) -> int:
        """Number of tokens, from the first on, that the cache holds.

        Later cells were dropped by a `strategy` or a sliding window; their tokens are evaluated again before new ones.
        """
        return n_common(self.cache.tokens, self._cell_keys())

    def _cell_keys(self) -> list[int]:
        if self._has_ways and self._n_prompt < len(self._tokens):
            return cell_keys(self._tokens, self._n_prompt)
        return self._tokens

    @property
    def logits(self) -> Logits:
        """Logits after the last token, float32 [n_vocab].

        Raises InvalidRequestError before the first eval.
        """
        if self._logits is None:
            raise InvalidRequestError(_NO_LOGITS)
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

    def eval(
        self, tokens: Sequence[int] | Inputs, *, all_logits: bool = False, generated: bool = False
    ) -> Logits | None:
        """Evaluate tokens behind the evaluated ones.

        `tokens` are ids, or an `Inputs` with embeddings, positions or bidirectional spans. `logits` become the
        last token's. Returns float32 [len(tokens), n_vocab] with `all_logits`, else None. No tokens change nothing.
        How tokens are split over calls does not change results. They are a prompt, unless they were `generated`; that
        makes a difference for models with `prompts` by tiles, where generated tokens become a prompt, and are evaluated
        again, once a prompt follows them.

        Raises InvalidRequestError for an id that is not in the vocabulary or inputs that the model cannot compute, and
        ContextOverflowError if the tokens do not fit, both before anything is evaluated.
        """
        with self.lock:
            ids = self._checked(tokens)
            may_be_ahead = self._ahead and (generated or not self._has_ways) and not all_logits
            if may_be_ahead and len(ids) == 1 and isinstance(ids, list) and self.is_ahead(ids[0]):
                self.advance(ids[0])
                return None
            try:
                chunk = self._chunk(ids, all_logits=all_logits, generated=generated)
                (logits,) = evaluate(self.model.program_with, [chunk], progress=self.progress)
            except BaseException:
                self._drop_stale_cells()
                raise
            self._commit(ids, chunk, logits[-1:].copy() if all_logits else logits, generated=generated)
            if not all_logits:
                return None
            return logits if len(ids) else np.empty((0, self.model.config.n_vocab), np.float32)

    @locked
    def eval_ahead(self, token: int, draft: Sequence[int]) -> None:
        """Evaluate a token and, in the same pass, a draft behind it.

        Afterwards the stream is as after `eval([token])`. While the next tokens equal the draft, `eval` of each
        costs nothing; any other use of the stream drops the draft. With recurrent states, accepted draft tokens before
        the first rejected one are evaluated again in the next call. Raises what `eval` raises for all of the tokens.
        """
        ids = self._checked([token, *draft])
        if len(ids) == 1 or self.strategy is not CacheStrategy.ALWAYS:
            self.eval([token], generated=True)
            return
        _evaluate([(self, ids)], n_ahead=len(ids) - 1, generated=[True])

    @locked
    def rewind(self, n_past: int) -> None:
        """Truncate the context to its first `n_past` tokens.

        The logits are cleared until the next `eval`. Where layers with a sliding window have lost cells that a token
        there would see, or recurrent states have gone on, that `eval` computes them again, from the
        nearest checkpoint on: ends of prompts are checkpoints, unless the stream was created without `reuse`. Raises
        InvalidRequestError if `n_past` is not from 0 to the present number of tokens, or within a bidirectional span.
        """
        if not is_integer(n_past) or not 0 <= n_past <= self.n_past:
            raise InvalidRequestError(f"n_past must be an integer from 0 to {self.n_past}, not {n_past!r}")
        if self._contents:
            self._contents.expect_whole(self._tokens, int(n_past))
        self._truncate_cache(int(n_past))
        del self._tokens[n_past:]
        self._n_prompt = min(self._n_prompt, int(n_past))
        if self._contents:
            self._contents.keep(self._tokens)
        self._logits = None
        self.n_reused = min(self.n_reused, int(n_past))

    @locked
    def remove_range(self, p0: int, p1: int = -1) -> None:
        """Remove the tokens at positions `p0` to `p1` - 1.

        A `p1` of -1 is the end, and then this is `rewind`. Tokens behind the gap move up, as llama.cpp's context shift
        does: their keys are rotated to their new positions (RoPE), and what they have attended to stays in them. The
        logits stay too. With recurrent states, or a strategy that may drop cells, they are evaluated again instead, at
        the next `eval`. Raises InvalidRequestError, changing nothing, for a range outside the context, or if a sliding
        window has lost cells that would be seen.
        """
        stop = self.n_past if is_integer(p1) and p1 == -1 else p1
        if not is_integer(p0) or not is_integer(stop) or not 0 <= p0 <= stop <= self.n_past:
            raise InvalidRequestError(f"positions {p0!r} to {p1!r} are not within the {self.n_past} of the session")
        if stop == self.n_past:
            self.rewind(p0)
            return
        if self._contents:
            raise InvalidRequestError(
                "the context has embeddings, explicit positions or spans, whose later tokens cannot move up: rewind it"
            )
        program, by = self.program, stop - p0
        is_kept = self.strategy is CacheStrategy.ALWAYS and not self.cache.pool.layout.recurrent
        if is_kept and len(self.cache.tokens) == self.n_past:
            self.cache.remove(p0, stop, lambda layer, keys: program.shift_keys(layer, keys, by, self.n_ctx))
        else:
            self._truncate_cache(p0)
        del self._tokens[p0:stop]
        self._n_prompt -= max(0, min(self._n_prompt, stop) - p0)
        self.n_reused = min(self.n_reused, self.n_past)

    @locked
    def clear_and_reseed(self, sinks: Sequence[int], tail: Sequence[int]) -> None:
        """Restart the context with attention sinks and the last tokens.

        As in StreamingLLM (Xiao et al. 2023), both are evaluated from position 0 on, so that a text can go on without
        end. Raises what `eval` raises, InvalidRequestError if there is no token at all, both before anything changes.
        """
        tokens = [*sinks, *tail]
        if not len(self._checked(tokens, n_past=0)):
            raise InvalidRequestError("sinks and tail are both empty: at least one token is needed")
        if self.program.has_encoder:
            raise InvalidRequestError("the context begins with a text for the encoder, which tokens cannot replace")
        self.rewind(0)
        self.eval(tokens)

    @locked
    def checkpoint(self) -> KVSequence:
        """Pin the current KV cache, so that other streams can reuse it.

        With it, layers with a sliding window can be rewound to here from far beyond, and recurrent states at all. It
        lasts as long as it is referred to and not closed.
        """
        sequence = self.cache.fork()
        if self._prefixes is not None:
            self._prefixes.add(sequence)
        return sequence

    @locked
    def reuse(self, tokens: Sequence[int]) -> int:
        """Continue with the first `tokens` that the prefix cache holds.

        Returns how many. These are all but the last at most. None is evaluated, so there are no logits then until the
        next `eval`. Raises what `eval` raises.
        """
        ids = self._checked(tokens)
        n = max(0, len(ids) - len(self._chunk(ids).ids))
        if n:
            self._tokens += (ids.keys if isinstance(ids, Inputs) else ids)[:n]
            self._n_prompt = len(self._tokens)
            self._logits = None
            self.n_reused += n
        return n

    @locked
    def close(self) -> None:
        """Free the KV cache, which the prefix cache may keep.

        Closing twice does nothing.
        """
        if self._cache is not None:
            self._keep(self._cache)
            self._cache.close()
        self._cache = self._adapted = None

    def _chunk(
        self, ids: list[int] | Inputs, *, all_logits: bool = False, n_ahead: int = 0, generated: bool = False
    ) -> Chunk:
        """Chunk of `ids`, after any earlier tokens that are not cached.

        Tokens that the prefix cache holds are left out, unless the logits of several are wanted.
        """
        sequence, n_last, n_given = self.cache, len(ids) if all_logits else 1 + n_ahead, len(ids) - n_ahead
        if self._ahead and len(ids) and len(sequence.tokens) == len(self._tokens) + len(self._ahead):
            self._truncate_cache(self.n_past)  # of drafted tokens: what is before them needs no comparison
        if sequence.first_stale_cell is not None and self.strategy is not CacheStrategy.ALWAYS:
            self._truncate_cache(sequence.first_stale_cell)  # if they were dropped later, the logits would be others
        n_held, n_tokens = len(self._tokens), len(self._tokens) + len(ids)
        n_prompt = (
            self._n_prompt if generated else n_tokens
        )  # that is wanted: tokens of another way are evaluated again
        is_next = generated or not self._has_ways or self._n_prompt == n_held
        if len(ids) == 1 and isinstance(ids, list) and len(sequence.tokens) == n_held and is_next:
            if self._contents.cells:
                ids = self._contents.following(self._tokens, ids)
        elif len(ids):
            self._drop_stale_cells()
            tokens = [*self._tokens, *(ids.keys if isinstance(ids, Inputs) else ids)]
            wanted = cell_keys(tokens, n_prompt) if self._has_ways else tokens
            if not is_next:
                self._truncate_cache(n_common(sequence.tokens, wanted))
            if self._prefixes is not None and self.strategy is CacheStrategy.ALWAYS and not (all_logits or n_ahead):
                if self.model.prompt_cache is not None:
                    self.model.prompt_cache.load(self._prefixes, sequence, wanted, self.model.prefix_cache_bytes)
                self._prefixes.reuse(sequence, wanted)
            start = len(sequence.tokens)
            ids = self._contents.slice(tokens, start) if self._contents else tokens[start:]
        reads = n_given > 1 or len(ids) >= MIN_CHECKPOINT  # not what is evaluated again after drafts
        keep = self._keep if sequence.pool.layout.recurrent and reads and not n_ahead else None
        n_generated = min(len(ids), n_tokens - n_prompt) if self._has_ways else 0
        return Chunk(sequence, ids, self.adapters, n_last, n_ahead, n_generated, keep, take_hidden=self._take_hidden)

    def _commit(self, ids: list[int] | Inputs, chunk: Chunk, rows: Logits, *, generated: bool) -> None:
        """Append evaluated `ids` to the tokens, except drafted ones.

        `rows` are the logits of the last token before the draft, and of the draft's tokens; they are kept.
        """
        if not len(ids):
            return
        layout, n_new = chunk.cache.pool.layout, len(ids) - chunk.n_ahead
        if (layout.has_windows and n_new >= MIN_CHECKPOINT) or (layout.recurrent and n_new > 1):
            self._keep(chunk.cache)
        keys = ids.keys if isinstance(ids, Inputs) else ids
        tokens, ahead = keys[:n_new], list(zip(keys[n_new:], rows[1:], strict=True))
        last, n_computed = rows[0], len(chunk.ids)
        n_reused, n_prompt = max(0, len(ids) - n_computed), self._n_prompt if generated else self.n_past + n_new
        self._tokens += tokens  # no call from here on: an interrupt comes before all of this or after it
        self._n_prompt = n_prompt
        self._logits, self._ahead, self._accepted = last, ahead, ()
        self.n_reused += n_reused
        self.n_computed += n_computed
        if self.strategy is not CacheStrategy.ALWAYS and not self.strategy.caches(self.n_past):
            chunk.cache.truncate(0)

    def _drop_stale_cells(self) -> None:
        """Drop cells of other tokens than the stream's.

        Interrupts and changes to the cache leave such cells.
        """
        if self._cache is not None and not self._cache.closed:
            self._truncate_cache(self.n_cached)

    @locked
    def _drop_ahead(self) -> None:
        """Drop the cells of tokens that were evaluated ahead."""
        if self._ahead:
            self._drop_stale_cells()

    def _keep(self, sequence: KVSequence) -> None:
        if self._prefixes is not None:
            self._prefixes.keep(sequence, self.model.prefix_cache_bytes)

    def _checked(self, tokens: Sequence[int] | Inputs, n_past: int | None = None) -> list[int] | Inputs:
        """Check that tokens can be evaluated and fit.

        Returns ids, or the inputs, whose contents are added.
        """
        if isinstance(tokens, Inputs):
            self._expect_room(len(tokens), n_past)
            check_inputs(self.program.graph, tokens)
            if not tokens.is_plain:
                self._contents.add(tokens, self._tokens)
                return tokens
            tokens = tokens.keys
        n_vocab, given = self.model.config.n_vocab, cast(object, tokens)
        if isinstance(given, str):
            raise InvalidRequestError(f"tokens are a sequence of ids, not the text {given[:40]!r}: use encode(text)")
        try:
            ids = list(tokens)
        except TypeError:
            raise InvalidRequestError(f"tokens are a sequence of ids, not {tokens!r}") from None
        for i, token in enumerate(ids):
            if type(token) is not int:
                ids[i] = int(token) if is_integer(token) else -1
            if not 0 <= ids[i] < n_vocab:
                raise InvalidRequestError(f"token {token!r} at index {i} is not an id from 0 to {n_vocab - 1}")
        if (len(self._tokens) if n_past is None else n_past) + len(ids) > self.n_ctx:
            self._expect_room(len(ids), n_past)
        return ids

    def _expect_room(self, n_tokens: int, n_past: int | None = None) -> None:
        n_past = len(self._tokens) if n_past is None else n_past
        if n_past + n_tokens > self.n_ctx:
            raise ContextOverflowError(n_past, n_tokens, self.n_ctx)


def eval_batch(work: Iterable[tuple[TokenStream, Sequence[int] | Inputs]], *, generated: Iterable[bool] = ()) -> None:
    """Evaluate the next tokens of many sessions of one model together.

    Each batch of tokens is one pass over the weights, for sessions with the same LoRA adapters. `generated` says for
    each session whether its tokens were generated, as for `TokenStream.eval`; by default they are prompts.

    Each session then is as if it had evaluated its tokens by itself. Raises what `TokenStream.eval` raises,
    InvalidRequestError if a session is there twice or the models differ; nothing has changed then.
    """
    checked = [(stream, stream._checked(tokens)) for stream, tokens in work]
    if len({id(stream) for stream, _ in checked}) < len(checked):
        raise InvalidRequestError("a session is there twice: give its tokens at once")
    if len({id(stream.model) for stream, _ in checked}) > 1:
        raise InvalidRequestError("sessions of different models cannot be evaluated together")
    ways = [*generated] or [False] * len(checked)
    if len(ways) != len(checked):
        raise InvalidRequestError(f"generated has {len(ways)} entries for {len(checked)} sessions")
    with contextlib.ExitStack() as locks:
        for stream, _ in sorted(checked, key=lambda one: id(one[0])):  # in one order, or two could wait for each other
            locks.enter_context(stream.lock)
        for stream, ids in checked:
            stream._expect_room(len(ids))  # another thread may have used it since
        if checked:
            _evaluate(checked, generated=ways)


def _evaluate(
    work: Sequence[tuple[TokenStream, list[int] | Inputs]], *, n_ahead: int = 0, generated: Sequence[bool]
) -> None:
    """Evaluate and commit checked tokens.

    The streams' locks are held. Tokens and logits of a stream change only in the end, when all are evaluated. The last
    `n_ahead` tokens of each are only drafted.
    """
    try:
        chunks = [
            stream._chunk(ids, n_ahead=n_ahead, generated=is_generated)
            for (stream, ids), is_generated in zip(work, generated, strict=True)
        ]
        results = evaluate(work[0][0].model.program_with, chunks)
    except BaseException:
        for stream, _ in work:
            stream._drop_stale_cells()
        raise
    is_shared = len(work) > 1  # memory with the logits of other streams
    for (stream, ids), chunk, logits, is_generated in zip(work, chunks, results, generated, strict=True):
        rows = logits[-1 - n_ahead :]
        stream._commit(ids, chunk, rows.copy() if is_shared else rows, generated=is_generated)
