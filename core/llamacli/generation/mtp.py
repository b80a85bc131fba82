"""Context of a draft head: cache and hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamacli.engine import Chunk, evaluate
from llamacli.engine.heads import Head
from llamacli.generation.drafting import likely_tokens
from llamacli.inputs import Inputs
from llamacli.kv import KVSequence
from llamacli.kv.prefixes import n_common
from llamacli.ops.run import Span

Rows = npt.NDArray[np.float32]

_LAZY = 16
"""Tokens that wait for the next draft; if those of a prompt make them more, they are evaluated at once."""

_PATIENCE = 64
"""Generated tokens that wait for the next draft, before all are dropped: evaluating all tokens of a text that is not
drafted would cost more than drafts in vain may."""


class HeadContext:
    """Tokens of a text that a draft head has seen.

    Cell i of its KV cache is that of the token at position `first + i` of the text: of the token itself and of the
    model's hidden state at the token before. Hidden states come with `take`; those that cells have been computed of are
    dropped. Zeros take the place of one that is not known: before the first token, and after a rewind. A head with a
    file of its own has no cell of a first token. Where tokens are missing, as tokens of a prefix that another session
    had evaluated, the context starts anew behind them, and so it does after many tokens without a draft.
    """

    _first: int
    _tokens: list[int]
    _states: Rows

    def __init__(self, head: Head, n_ctx: int | None = None):
        self._head = head
        self._cache = head.sequence(n_ctx)
        self._restart(0)

    @property
    def cells(self) -> tuple[int, tuple[int, ...]]:
        """Position of the first cell in the text, and all tokens."""
        return self._first, tuple(self._cache.tokens)

    def take(
        self, position: int, tokens: Sequence[int], states: Rows, n_drafted: int, sequence: KVSequence | None = None
    ) -> None:
        """Add tokens that the model has evaluated, with their hidden states.

        They replace those at the same positions and behind; equal tokens are left as they are, because the model
        evaluates some of them twice (see `Session.eval_ahead`). Arguments are those of
        `llamacli.engine.batching.TakeHidden`. Where memory ends, the context starts anew; after `close` nothing is
        taken.
        """
        if self._cache.closed:
            return
        at = position - self._first
        if 0 <= at < len(self._tokens):
            n = min(n_common(self._tokens[at : at + len(tokens)], list(tokens)), len(tokens) - 1)
            position, at, tokens, states = position + n, at + n, tokens[n:], states[n:]
        states = self._head.states(states, self._cache)
        if not 0 <= at <= len(self._tokens) or self._lacks_state:
            self._restart(position)
            at = 0
            if self._lacks_state:
                self._first, self._states = position + 1, states[:1].copy()
                tokens, states = tokens[1:], states[1:]
                if not tokens:
                    return
        self._rewind(at, tokens[0])
        self._tokens += tokens
        self._states = np.concatenate([self._states, states])
        cache = self._cache
        if len(self._tokens) > cache.seq_len:
            self._states = self._states[:0]  # nothing is drafted beyond the head's context
            return
        n_certain = len(self._tokens) - n_drafted
        n_waiting, is_prompt = n_certain - len(cache.tokens), len(tokens) - n_drafted > 1
        if n_waiting > _PATIENCE and not is_prompt:
            self._restart(position + len(tokens))
        elif n_waiting > _LAZY and is_prompt:
            try:
                self._evaluate(self._tokens[len(cache.tokens) : n_certain], n_last=0)
            except MemoryError:
                self._restart(position + len(tokens))

    def draft(self, tokens: Sequence[int], limit: int, min_probability: float) -> list[int]:
        """Predict the tokens after a text.

        The model has not evaluated the last one of `tokens`, which are the text. At most `limit`, each at least
        `min_probability` probable. Empty if the hidden state before the last one is not known, or if they do not fit.
        """
        cache, known = self._cache, list(tokens[self._first : -1])
        n = len(known)
        limit = min(limit, cache.seq_len - n)
        if limit <= 0 or n_common(self._tokens, known) < n or len(tokens) <= self._first or self._lacks_state:
            return []
        self._rewind(n)
        state: Rows | None = None  # of the last token, once the head has run

        def logits_after(tokens: Sequence[int]) -> Rows:
            nonlocal state
            logits, state = self._evaluate(tokens) if state is None else self._run(tokens, state)
            return logits

        try:
            waiting = [*self._tokens[len(cache.tokens) :], tokens[-1]]
            return likely_tokens(waiting, limit, min_probability, logits_after)
        finally:
            self._truncate(n + 1)  # cells of drafted tokens are not of the model's hidden states

    def close(self) -> None:
        """Free the KV cache; closing twice does nothing."""
        self._cache.close()

    @property
    def _lacks_state(self) -> bool:
        """True if the first cell needs a state that is missing."""
        return self._head.fuser is not None and not len(self._states) and not self._cache.tokens

    def _restart(self, first: int) -> None:
        """Drop all tokens; `first` is the position of the next one."""
        self._cache.truncate(0)
        self._first, self._tokens = first, []
        self._states = np.empty((0, self._head.width), np.float32)

    def _rewind(self, n: int, following: int | None = None) -> None:
        """Keep the first n tokens.

        The cell of the `following` one stays if it has been computed.
        """
        if n < len(self._tokens):
            self._states = self._states[: max(0, n - len(self._tokens) + len(self._states))]
            del self._tokens[n:]
        self._truncate(n + (self._cache.tokens[n : n + 1] == [following]))

    def _truncate(self, n: int) -> None:
        """Keep the first n cells.

        Fewer where a sliding window no longer has what is before them.
        """
        if n < len(self._cache.tokens):
            self._cache.truncate(self._cache.floor(n))

    def _evaluate(self, tokens: Sequence[int], *, n_last: int = 1) -> tuple[Rows, Rows]:
        """Evaluate the next tokens with the model's hidden states; see `_run`."""
        start = len(self._cache.tokens)
        stop, known_from = start + len(tokens), len(self._tokens) - len(self._states)
        rows = np.zeros((len(tokens), self._head.width), np.float32)
        first = max(start - 1, known_from)
        if first < stop - 1:
            rows[first - start + 1 :] = self._states[first - known_from : stop - 1 - known_from]
        result = self._run(tokens, rows, n_last=n_last)
        unused = stop - 2 - known_from  # the state before the last token stays, to evaluate it again
        if unused > 0:
            self._states = self._states[unused:].copy()
        return result

    def _run(self, tokens: Sequence[int], hidden: Rows, *, n_last: int = 1) -> tuple[Rows, Rows]:
        """Run the head; logits and state of the last token.

        float32 [n_vocab] and [1, n_embd]; empty if `n_last` is 0.
        """
        last = hidden[:0]

        def keep(position: int, tokens: Sequence[int], states: Rows, n_drafted: int, sequence: KVSequence) -> None:
            nonlocal last
            last = states[-1:].copy()

        program, take_hidden = self._head.program, keep if n_last else None
        chunk = Chunk(self._cache, list(tokens), n_last=n_last, hidden_in=hidden, take_hidden=take_hidden)
        logits = evaluate(lambda _: program, [chunk])[0]
        return self._head.logits(logits)[-1] if n_last else last, last


class BlockContext(HeadContext):
    """Tokens whose states a head that predicts blocks has cached.

    Cell i of its KV cache is of the state of the token at position `first + i`. A draft is one pass over the last token
    and masks; its cells are dropped.
    """

    def draft(self, tokens: Sequence[int], limit: int, min_probability: float) -> list[int]:
        """See `HeadContext`."""
        cache, known = self._cache, list(tokens[self._first : -1])
        n, (length, mask, is_causal, first) = len(known), self._head.block
        limit = min(limit, length - first, cache.seq_len - n - first)
        if limit <= 0 or n_common(self._tokens, known) < n or len(tokens) <= self._first:
            return []
        self._rewind(n)
        if waiting := self._tokens[len(cache.tokens) :]:
            self._evaluate(waiting, n_last=0)
        program = self._head.program
        block = [tokens[-1], *[mask] * (limit + first - 1)]
        inputs = Inputs.of(block, spans=() if is_causal else [(0, len(block))])
        states = np.empty((len(block), 0), np.float32)

        def keep(position: int, tokens: Sequence[int], hidden: Rows, n_drafted: int, sequence: KVSequence) -> None:
            nonlocal states
            states = hidden.copy()

        take_hidden = keep if self._head.biases is not None else None
        try:
            chunk = Chunk(cache, inputs, n_last=limit, n_ahead=len(block), take_hidden=take_hidden)
            logits = self._head.logits(evaluate(lambda _: program, [chunk])[0])
            rows = zip(logits, states[-limit:], strict=True)
            return likely_tokens(
                tokens[-1:], limit, min_probability, lambda last: self._head.biased(*next(rows), last[0], cache)
            )
        finally:
            self._truncate(n)

    @property
    def _lacks_state(self) -> bool:
        """False: a token's cell is of its own state."""
        return False

    def _evaluate(self, tokens: Sequence[int], *, n_last: int = 1) -> tuple[Rows, Rows]:
        """Cache keys and values of the states of the next tokens."""
        start, known_from = len(self._cache.tokens), len(self._tokens) - len(self._states)
        rows = np.zeros((len(tokens), self._head.width), np.float32)
        first = max(start, known_from)
        rows[first - start :] = self._states[first - known_from : start + len(tokens) - known_from]
        injector = self._head.injector
        assert injector is not None
        evaluate(lambda _: injector, [Chunk(self._cache, list(tokens), n_last=0, hidden_in=rows)])
        self._states = self._states[start + len(tokens) - known_from :].copy()
        return rows[:0], rows[:0]


class CacheContext:
    """Last tokens of a text whose KV cache a head reads.

    The head keeps nothing itself: it needs the model's hidden state of the last token that the model has evaluated, and
    the model's sequence. Drafted tokens all take the place of the token after that one, and see the cells before it.
    """

    def __init__(self, head: Head):
        self._head = head
        self._sequence: KVSequence | None = None
        self._first, self._tokens = 0, list[int]()
        self._states = np.empty((0, head.width), np.float32)

    def take(
        self, position: int, tokens: Sequence[int], states: Rows, n_drafted: int, sequence: KVSequence | None = None
    ) -> None:
        """Keep the last tokens with their hidden states; see `HeadContext.take`."""
        at = position - self._first
        if sequence is not self._sequence or not 0 <= at <= len(self._tokens):
            self._sequence, self._first, at = sequence, position, 0
        n_dropped = max(0, at + len(tokens) - n_drafted - 2)
        self._tokens = [*self._tokens[:at], *tokens][n_dropped:]
        self._states = np.concatenate([self._states[:at], states[:, : self._head.width]])[n_dropped:].copy()
        self._first += n_dropped

    def draft(self, tokens: Sequence[int], limit: int, min_probability: float) -> list[int]:
        """See `HeadContext.draft`."""
        sequence, cell = self._sequence, len(tokens) - 2
        at = cell - self._first
        if limit <= 0 or not 0 <= at < len(self._tokens) or self._tokens[at] != tokens[-2]:
            return []
        if sequence is None or sequence.closed or len(sequence.tokens) <= cell or sequence.floor(cell + 1) <= cell:
            return []
        program, state = self._head.program, self._states[at : at + 1]

        def logits_after(tokens: Sequence[int]) -> Rows:
            nonlocal state
            inputs = Inputs.of(tokens, positions=[[cell + 1]])
            span = Span(sequence, cell, 1, state, inputs)
            with np.errstate(all="ignore"):
                logits, state = program.forward_with_hidden(inputs.ids, [span], [1])
            return self._head.logits(logits)[-1]

        return likely_tokens(tokens[-1:], limit, min_probability, logits_after)

    def close(self) -> None:
        """Forget the sequence, which stays the model's; closing twice does nothing."""
        self._sequence = None
