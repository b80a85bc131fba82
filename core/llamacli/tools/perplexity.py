"""Perplexity by llama.cpp's method, so that results are comparable.

The tokens are split into chunks of `n_ctx`, without an incomplete last one. Each chunk is evaluated independently, its
first token replaced by BOS if the model uses it. Tokens in the second half of each chunk are scored: perplexity is the
exponential of their mean negative log-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.compiled_model import KVTypes
from llamacli.errors import InvalidRequestError
from llamacli.model import Model
from llamacli.sampling import perplexity_of, surprisal
from llamacli.tools.importance import chunks_of, number_of_chunks
from llamacli.util.numbers import is_integer

MIN_CONTEXT = 4

Logits = npt.NDArray[np.float32]


@attrs.frozen
class Estimate:
    """Perplexity so far, `value` ± `error` (one standard error), over `n_scored` tokens."""

    n_chunks: int
    n_scored: int
    value: float
    error: float


def perplexity_tokens(model: Model, text: str) -> list[int]:
    """Encode a text with BOS if the model wants it, without EOS."""
    return model.tokenizer.encode_prompt(text)


def perplexity(
    model: Model,
    tokens: Sequence[int],
    *,
    n_ctx: int = 512,
    max_chunks: int | None = None,
    kv_type: KVTypes | None = None,
) -> Iterator[Estimate]:
    """Yield the estimate after each chunk; the last one is the result.

    Raises InvalidRequestError if the tokens do not fill two chunks, `n_ctx` is less than MIN_CONTEXT, or logits are not
    finite.
    """
    check_tokens(tokens, n_ctx)
    return estimates(scored_chunks(model, tokens, n_ctx, number_of_chunks(tokens, n_ctx, max_chunks), kv_type))


def check_tokens(tokens: Sequence[int], n_ctx: int) -> None:
    """Check the length of chunks, and that tokens fill two; InvalidRequestError."""
    if not is_integer(n_ctx) or n_ctx < MIN_CONTEXT:
        raise InvalidRequestError(f"n_ctx must be an integer of at least {MIN_CONTEXT}, not {n_ctx!r}")
    if len(tokens) < 2 * n_ctx:
        raise InvalidRequestError(
            f"the text has {len(tokens)} tokens, and chunks of {n_ctx} need at least {2 * n_ctx}: "
            "use a longer text or a smaller context"
        )


def scored_chunks(
    model: Model, tokens: Sequence[int], n_ctx: int, n_chunks: int, kv_type: KVTypes | None
) -> Iterator[tuple[Logits, list[int]]]:
    """Logits of each chunk's second half, float32 [n_scored, n_vocab], and its tokens."""
    first = n_ctx // 2
    with model.create_session(n_ctx=n_ctx, kv_type=kv_type, reuse=False) as session:
        for chunk, ids in enumerate(chunks_of(model, tokens, n_ctx, n_chunks), start=1):
            session.rewind(0)
            session.eval(ids[:first])
            logits = session.eval(ids[first:-1], all_logits=True)
            assert logits is not None
            if not (logits < np.inf).all():  # -inf is valid: a token that cannot follow
                raise InvalidRequestError(f"the model's logits in chunk {chunk} are not finite")
            yield logits, ids[first + 1 :]


def estimates(chunks: Iterable[tuple[Logits, list[int]]]) -> Iterator[Estimate]:
    """Yield the estimate after each of `scored_chunks`."""
    n_scored, total, squares = 0, 0.0, 0.0
    for chunk, (logits, ids) in enumerate(chunks, start=1):
        for row, token in zip(logits, ids, strict=True):
            surprise = surprisal(row, token)
            n_scored, total, squares = n_scored + 1, total + surprise, squares + surprise**2
        yield _estimate(chunk, n_scored, total, squares)


def _estimate(n_chunks: int, n_scored: int, total: float, squares: float) -> Estimate:
    value = perplexity_of(total, n_scored)
    variance = max(0.0, squares / n_scored - (total / n_scored) ** 2)
    error = math.sqrt(variance / (n_scored - 1)) if n_scored > 1 else math.nan
    return Estimate(n_chunks, n_scored, value, error * value)
