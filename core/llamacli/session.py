"""Sessions: one stream of tokens through a model, with its context, sampler and statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.architecture import checked_seq_len
from llamacli.checks import is_whole
from llamacli.engine import Span
from llamacli.errors import ClosedError, ContextOverflowError, InvalidRequestError
from llamacli.kv import N_BATCH, KVSequence
from llamacli.model import KVTypes, Model
from llamacli.sampling import LogProbs, SamplerChain, SamplerState, SamplingParams


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

    `n_prompt` tokens evaluated in `prefill_tps` tokens a second, `n_gen` accepted at `gen_tps` a second, `ttft_s`
    seconds to the first token (prompt and first draw). Rates are 0 where no time passed.
    """

    n_prompt: int = 0
    n_gen: int = 0
    ttft_s: float = 0.0
    prefill_tps: float = 0.0
    gen_tps: float = 0.0


class Session:
    """One generation stream over a model. Sessions of one model never affect each other.

    - `n_past`: tokens evaluated so far, which is the next token's position.
    - `logits`: float32 [n_vocab], of the last token evaluated; sampling changes them in place.
    - `seq_len`: how many tokens fit.
    - `stats`: figures of the last `generate`.
    """

    def __init__(self, model: Model, *, seq_len: int | None = None, kv_type: KVTypes | None = None, seed: int = 1234):
        seq_len = checked_seq_len(model.config.seq_len if seq_len is None else seq_len)
        self.model, self.seq_len = model, seq_len
        self._cache: KVSequence | None = KVSequence(model.kv_pool(kv_type), seq_len)
        self._context: list[int] = []
        self.stats = Stats()
        self._logits: npt.NDArray[np.float32] | None = None
        self._sampler = SamplerState(_checked_seed(seed), model.tokenizer, model.find_sampler)

    @property
    def cache(self) -> KVSequence:
        """The keys and values of this session. Raises ClosedError after close()."""
        if self._cache is None:
            raise ClosedError("the session is closed")
        return self._cache

    @property
    def n_past(self) -> int:
        """Tokens evaluated so far."""
        return len(self._context)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """float32 [n_vocab]: the logits after the last token. Raises InvalidRequestError before the first eval."""
        if self._logits is None:
            raise InvalidRequestError("no token has been evaluated yet, so there are no logits")
        return self._logits

    def set_seed(self, seed: int) -> None:
        """Start the stream of random draws anew: the same seed gives the same draws."""
        self._sampler.set_seed(_checked_seed(seed))

    def eval(self, tokens: Sequence[int], *, all_logits: bool = False) -> npt.NDArray[np.float32] | None:
        """Evaluate tokens at position `n_past` onwards; afterwards `logits` are those of the last one.

        Returns float32 [len(tokens), n_vocab] with `all_logits`, else None. No tokens change nothing. How tokens are
        split over calls does not change results.

        Raises InvalidRequestError for an id that is not in the vocabulary and ContextOverflowError if the tokens do not
        fit, both before anything is evaluated.
        """
        parts = self._evaluate(self._checked(tokens), all_logits=all_logits)
        if not all_logits:
            return None
        return np.concatenate(parts) if parts else np.empty((0, self.model.config.n_vocab), np.float32)

    def rewind(self, n_past: int) -> None:
        """Forget all tokens from position `n_past` on. There are no logits then until the next `eval`.

        Raises InvalidRequestError if `n_past` is not from 0 to the present position, or if layers with a sliding window
        no longer have what a token there would see.
        """
        if not is_whole(n_past) or not 0 <= n_past <= self.n_past:
            raise InvalidRequestError(f"n_past must be an integer from 0 to {self.n_past}, not {n_past!r}")
        self.cache.truncate(int(n_past))
        del self._context[n_past:]
        self._logits = None

    def sample(self, params: SamplingParams | SamplerChain | None = None) -> int:
        """Draw the next token from `logits`, which penalties and temperature change in place; greedy by default.

        The drawn token counts as generated for penalties. It is not evaluated: pass it to `eval`.
        """
        token = self._draw(params or SamplingParams())
        self._sampler.accept(token)
        return token

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

        Raises what `eval` raises for the prompt, at once; an empty prompt continues from `logits`.
        """
        params = params or SamplingParams()
        if not is_whole(max_tokens) or max_tokens < 0:
            raise InvalidRequestError(f"max_tokens must be an integer of at least 0, not {max_tokens!r}")
        return self._generate(self._checked(prompt), params, int(max_tokens), ignore_eos)

    def close(self) -> None:
        """Free the cache; closing twice does nothing."""
        if self._cache is not None:
            self._cache.close()
        self._cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self, prompt: npt.NDArray[np.int32], params: SamplingParams | SamplerChain, max_tokens: int, ignore_eos: bool
    ) -> Iterator[Token]:
        self._sampler.reset()
        self.stats = Stats()
        clock = time.perf_counter
        started = clock()
        self._evaluate(prompt)
        prefill_s = clock() - started
        text = self.model.tokenizer.stream(self._context)
        self.stats = stats = Stats(n_prompt=len(prompt), prefill_tps=_rate(len(prompt), prefill_s))
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
            self._sampler.accept(token)
            self._evaluate(np.array([token], np.int32))
            decode_s += clock() - step
            self.stats = attrs.evolve(stats, n_gen=n_gen, gen_tps=_rate(n_gen, decode_s))

    def _draw(self, params: SamplingParams | SamplerChain) -> int:
        return self._sampler.sample(self.logits, params)

    def _evaluate(self, ids: npt.NDArray[np.int32], *, all_logits: bool = False) -> list[npt.NDArray[np.float32]]:
        """Run checked ids in chunks. The position moves only when all are done, so an interrupt leaves it as it was."""
        program, cache, n_past = self.model.program, self.cache, self.n_past
        self._expect_room(len(ids))  # engines trust their caller, and `generate` may have been checked long ago
        parts = []
        try:
            for start in range(0, len(ids), N_BATCH):
                span = Span(cache, n_past + start, len(ids[start : start + N_BATCH]))
                cache.reserve(span.start, span.n)
                parts.append(program.forward(ids[start : start + span.n], [span], all_logits=all_logits))
                cache.forget(span.start + span.n, since=n_past)
        except BaseException:
            cache.truncate(n_past)
            raise
        cache.forget(n_past + len(ids))
        if parts:
            self._context += ids.tolist()
            self._logits = parts[-1][-1].copy()
        return parts

    def _checked(self, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        """The tokens as an array, once every one is known to be in the vocabulary and all of them to fit."""
        n_vocab = self.model.config.n_vocab
        for i, token in enumerate(tokens):
            if not is_whole(token) or not 0 <= token < n_vocab:
                raise InvalidRequestError(f"token {token!r} at index {i} is not an id from 0 to {n_vocab - 1}")
        self._expect_room(len(tokens))
        return np.asarray(tokens, np.int32)

    def _expect_room(self, n_tokens: int) -> None:
        if self.n_past + n_tokens > self.seq_len:
            raise ContextOverflowError(self.n_past, n_tokens, self.seq_len)


def _rate(n: int, seconds: float) -> float:
    return n / seconds if seconds > 0 else 0.0


def _checked_seed(seed: int) -> int:
    if not is_whole(seed) or seed < 0:
        raise InvalidRequestError(f"seed must be an integer of at least 0, not {seed!r}")
    return int(seed)
