"""Speculative decoding: drafters that propose the next tokens of a text.

A session evaluates the tokens proposed in one pass with the token before them, and draws each position from its own
logits, with the same samplers and random numbers as without: the text is the same bit for bit, because results do not
depend on how tokens are batched. A draft only decides how much of it comes out of one pass (Leviathan et al. 2023; the
verification by equality needs no rejection sampling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from llamacli.engine.compiled_model import CompiledModel
from llamacli.engine.heads import Head, nextn_head
from llamacli.errors import InvalidRequestError, OutOfMemoryError
from llamacli.generation.drafting import Logits, likely_tokens
from llamacli.generation.mtp import BlockContext, CacheContext, HeadContext
from llamacli.generation.stream import TokenStream
from llamacli.kv import KVSequence
from llamacli.kv.prefixes import n_common
from llamacli.util.numbers import is_integer

MAX_DRAFT = 16
"""Default maximum number of tokens of a draft."""

LIMIT_DRAFT = 256
"""Largest maximum."""

MTP: Final = "mtp"
"""Name of the model's own multi-token-prediction head in the place of a draft model's file."""

_COMPARED = 8
"""Last tokens by which prompt lookup sees that a context goes on; a mistake would only cost wrong drafts."""

_PLACES = 16
"""Places that prompt lookup compares."""


class _Limited:
    """Base of drafters whose drafts have a maximum length."""

    def __init__(self, max_tokens: int):
        self._max_tokens = checked_max_tokens(max_tokens)

    @property
    def max_tokens(self) -> int:
        """Maximum length of a draft, in tokens; may be set."""
        return self._max_tokens

    @max_tokens.setter
    def max_tokens(self, max_tokens: int) -> None:
        self._max_tokens = checked_max_tokens(max_tokens)


class PromptLookup(_Limited):
    """Drafter that continues as the last equal n-gram of the context did.

    It finds copies: quotations, edited text and code, summaries. Of the latest places with the last `min_ngram` tokens,
    it takes the first of those where most of the last `max_ngram` are equal. `max_tokens` is the maximum length of a
    draft. One object serves one session at a time. Raises InvalidRequestError for values out of range.
    """

    def __init__(self, max_tokens: int = MAX_DRAFT, *, min_ngram: int = 2, max_ngram: int = 4):
        if not is_integer(min_ngram) or not is_integer(max_ngram) or not 1 <= min_ngram <= max_ngram <= 16:
            raise InvalidRequestError(f"n-grams of {min_ngram!r} to {max_ngram!r} tokens are not within 1 to 16")
        super().__init__(max_tokens)
        self._min, self._max = int(min_ngram), int(max_ngram)
        self._clear()

    def begin(self, model: CompiledModel) -> None:
        """Accept any model: tokens are compared with tokens."""

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Tokens that may follow; see `llamacli.generation.drafting.Drafter`."""
        n = min(limit, self._max_tokens)
        if n <= 0:
            return []
        self._index(tokens)
        at = self._find()
        if not at:
            return []
        text = self._tokens[at : at + n]
        while len(text) < n:  # a repetition that reaches the end goes on repeating
            text += self._tokens[at:]
        return text[:n]

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # the last place where an n-gram ends
        self._before: list[int] = []  # for each place the one before with the same n-gram, 0 for none

    def _index(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before each new token.

        All of them anew if the context was changed.
        """
        own, size = self._tokens, self._min
        n = len(own)
        if n > len(tokens) or (n and list(tokens[max(0, n - _COMPARED) : n]) != own[-_COMPARED:]):
            self._clear()
            own, n = self._tokens, 0
        own += tokens[n:]
        ends, before = self._ends, self._before
        for end in range(max(n, size), len(own)):
            ngram = tuple(own[end - size : end])
            before.append(ends.get(ngram, 0))
            ends[ngram] = end

    def _find(self) -> int:
        """Place after tokens equal to the last ones; 0 for none."""
        tokens, size = self._tokens, self._min
        at = self._ends.get(tuple(tokens[-size:]), 0)
        best, longest = at, size
        for _ in range(_PLACES):
            if not at or longest == self._max:
                break
            n = _n_equal(tokens, at, tokens, self._max)
            if n > longest:
                best, longest = at, n
            at = self._before[at - size]
        return best


class PredictedText(_Limited):
    """Drafter that continues as a given text does (OpenAI's `prediction`).

    `text` are the last token of the prompt and those of the text that is expected behind it. Of the places there with
    the last two tokens, near the one where the draft before leads to, it takes the first of those where most of the
    last eight are equal: behind another word it goes on. `max_tokens` is the maximum length of a draft. One object
    serves one session at a time.
    """

    def __init__(self, text: Sequence[int], max_tokens: int = MAX_DRAFT):
        super().__init__(max_tokens)
        self._tokens, self._ids = list(text), np.array(text, np.int32)
        self._ahead: int | None = None  # by how much the context is longer than the text

    def begin(self, model: CompiledModel) -> None:
        """Accept any model: tokens are compared with tokens."""

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Tokens that may follow; see `llamacli.generation.drafting.Drafter`."""
        text, expected = self._tokens, 0 if self._ahead is None else len(tokens) - self._ahead
        at = expected
        if not 0 < at < len(text) or _n_equal(text, at, tokens, _COMPARED) < _COMPARED:  # no place is better else
            places = self._find(tokens[-2:])
            near = int(np.searchsorted(places, expected, "right"))
            near_places = places[max(0, near - _PLACES // 2) : near + _PLACES // 2].tolist()
            if not near_places:
                return []
            at = max(near_places, key=lambda at: (_n_equal(text, at, tokens, _COMPARED), -abs(at - expected)))
        self._ahead = len(tokens) - at
        return text[at : at + max(0, min(limit, self._max_tokens))]

    def _find(self, pair: Sequence[int]) -> npt.NDArray[np.intp]:
        """Places in the text after two tokens."""
        # Compared for each draft, in 0.1 ms for 131,000 tokens: an index of them takes longer than many drafts.
        ids = self._ids[:-1]
        if len(pair) < 2 or len(ids) < 2:
            return np.empty(0, np.intp)
        firsts = np.flatnonzero(ids[:-1] == pair[0])
        return firsts[ids[firsts + 1] == pair[1]] + 2


def _n_equal(text: Sequence[int], at: int, tokens: Sequence[int], limit: int) -> int:
    """Number of equal tokens before a place and before an end."""
    n, most = 0, min(limit, at, len(tokens))
    while n < most and text[at - 1 - n] == tokens[-1 - n]:
        n += 1
    return n


class _Predictor(Protocol):
    """Context of a model that predicts the tokens of drafts."""

    def draft(self, tokens: Sequence[int], limit: int, min_probability: float) -> list[int]:
        """Predict the tokens after a text; at most `limit`, each probable enough."""

    def close(self) -> None:
        """Free the KV cache; closing twice does nothing."""


class _ModelDrafter(_Limited):
    """Base of drafters by the most probable tokens of a model.

    `context` predicts them. Other arguments are described in the classes below.
    """

    def __init__(self, context: _Predictor, max_tokens: int, min_probability: float):
        super().__init__(max_tokens)
        if not 0 <= min_probability <= 1:
            raise InvalidRequestError(f"min_probability must be from 0 to 1, not {min_probability!r}")
        self._context, self._min_probability = context, min_probability

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Tokens that may follow; see `llamacli.generation.drafting.Drafter`."""
        n = min(limit, self._max_tokens)
        return self._context.draft(tokens, n, self._min_probability) if n > 0 else []

    def close(self) -> None:
        """Free the KV cache; closing twice does nothing."""
        self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _DraftContext:
    """Token stream of a draft model, which follows texts."""

    def __init__(self, model: CompiledModel, n_ctx: int | None = None):
        self._stream = TokenStream(model, n_ctx=n_ctx)

    def draft(self, tokens: Sequence[int], limit: int, min_probability: float) -> list[int]:
        stream, wanted = self._stream, list(tokens)
        limit = min(limit, stream.n_ctx - len(wanted))
        if limit <= 0:
            return []
        stream.rewind(min(n_common(list(stream.tokens), wanted), len(wanted) - 1))
        is_held = False

        def logits_after(tokens: Sequence[int]) -> Logits:
            nonlocal is_held
            try:
                stream.eval(tokens)
            except OutOfMemoryError:  # perhaps for what other texts have left in the prefix cache
                stream.model.prefixes(stream.cache.kv_type, stream.n_ctx).clear()
                stream.eval(tokens)
            if not is_held:  # drafted tokens are rewound
                stream.cache.hold()
                is_held = True
            return stream.logits

        return likely_tokens(wanted[stream.n_past :], limit, min_probability, logits_after)

    def close(self) -> None:
        self._stream.close()


class DraftModel(_ModelDrafter):
    """Drafter that lets a smaller model of the same vocabulary predict.

    It takes that model's most probable tokens, as long as each is at least `min_probability` probable. `max_tokens` is
    the maximum length of a draft, `n_ctx` the context of the draft model, by default its own. `close` frees its KV
    cache; the model stays the caller's. Raises InvalidRequestError for values out of range.
    """

    _fits: CompiledModel | None = None

    def __init__(
        self,
        model: CompiledModel,
        max_tokens: int = MAX_DRAFT,
        *,
        n_ctx: int | None = None,
        min_probability: float = 0.5,
    ):
        super().__init__(_DraftContext(model, n_ctx), max_tokens, min_probability)
        self.model = model

    def begin(self, model: CompiledModel) -> None:
        """Check that a model has the same vocabulary.

        Raises InvalidRequestError with the names of both if it has not.
        """
        if self._fits is not model:
            if not self.model.tokenizer.has_tokens_of(model.tokenizer):
                raise InvalidRequestError(
                    f"the draft model {self.model.name!r} has another vocabulary than the model {model.name!r}: "
                    f"{self.model.tokenizer.n_vocab} and {model.tokenizer.n_vocab} tokens"
                )
            self._fits = model


class HeadDrafter(_ModelDrafter):
    """Drafter by a draft head, which reads the model's hidden states.

    It takes the head's most probable tokens, as long as each is at least `min_probability` probable; each after the
    first is predicted from the head's own state, or all in one pass by a head that predicts blocks (DFlash). `head`
    comes of `Model.load_draft`. `max_tokens` is the maximum length of a draft, `n_ctx` the context of the head, by
    default the model's. The head has a KV cache of its own, for the tokens that are evaluated while this drafter is
    that of the session: prompts too, but not what comes from the prefix cache; some heads read the model's cache
    instead. One object serves one session at a time; `close` frees the cache. Raises InvalidRequestError for values out
    of range.
    """

    _context: HeadContext | CacheContext

    def __init__(
        self, head: Head, max_tokens: int = MAX_DRAFT, *, n_ctx: int | None = None, min_probability: float = 0.5
    ):
        if head.reads_cache:
            context: HeadContext | CacheContext = CacheContext(head)
        else:
            context = (BlockContext if head.injector else HeadContext)(head, n_ctx)
        super().__init__(context, max_tokens, min_probability)
        self.head, self.model = head, head.model

    def begin(self, model: CompiledModel) -> None:
        """Check that the text is the head's model's.

        Raises InvalidRequestError with the names of both if it is not.
        """
        if model is not self.model:
            raise InvalidRequestError(
                f"the {self.head.name} is that of the model {self.model.name!r}, not of {model.name!r}"
            )

    def take_hidden(
        self, position: int, tokens: Sequence[int], states: Logits, n_drafted: int, sequence: KVSequence | None = None
    ) -> None:
        """Take the model's hidden states; see `llamacli.engine.batching.TakeHidden`.

        Those of another model, which `begin` would refuse, are left out.
        """
        if states.shape[1] == self.head.n_passed:
            self._context.take(position, tokens, states, n_drafted, sequence)


class MtpHead(HeadDrafter):
    """Drafter by the model's own multi-token-prediction head (MTP, NextN); see `HeadDrafter`.

    The head's weights are read from the model's file by the first drafter, and are the model's then. Raises
    InvalidRequestError for a model without a head, ModelFormatError naming the tensor if the file's head is damaged or
    incomplete, or if the file has changed.
    """

    def __init__(
        self,
        model: CompiledModel,
        max_tokens: int = MAX_DRAFT,
        *,
        n_ctx: int | None = None,
        min_probability: float = 0.5,
    ):
        super().__init__(nextn_head(model), max_tokens, n_ctx=n_ctx, min_probability=min_probability)


def drafter_of(
    draft: CompiledModel | Head, max_tokens: int = MAX_DRAFT, n_ctx: int | None = None
) -> DraftModel | HeadDrafter:
    """Drafter by a result of `Model.load_draft`; `n_ctx` is a head's context."""
    return HeadDrafter(draft, max_tokens, n_ctx=n_ctx) if isinstance(draft, Head) else DraftModel(draft, max_tokens)


def checked_max_tokens(max_tokens: int) -> int:
    """Check the maximum length of a draft.

    Raises InvalidRequestError if it is not from 1 to LIMIT_DRAFT.
    """
    if not is_integer(max_tokens) or not 1 <= max_tokens <= LIMIT_DRAFT:
        raise InvalidRequestError(f"max_tokens of drafts must be from 1 to {LIMIT_DRAFT}, not {max_tokens!r}")
    return int(max_tokens)
