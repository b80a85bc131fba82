"""Drafter interface of speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from llamacli.engine.batching import TakeHidden
from llamacli.engine.compiled_model import CompiledModel

Logits = npt.NDArray[np.float32]


class Drafter(Protocol):
    """Proposer of the tokens that may come next (speculative decoding).

    Proposals change how fast a text comes and never the text. `llamacli.generation.drafters` has drafters. A drafter
    with a method `take_hidden`, a `llamacli.engine.batching.TakeHidden`, gets the hidden states of all tokens that the
    model evaluates, before the next `draft`.
    """

    def begin(self, model: CompiledModel) -> None:
        """Prepare for a text of a model.

        Raises InvalidRequestError if the drafter cannot propose its tokens.
        """

    def draft(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` tokens that may follow those given; none is allowed.

        The sequence grows afterwards: it must not be changed or kept.
        """


def hidden_taker(drafter: Drafter | None) -> TakeHidden | None:
    """Method of a drafter that takes hidden states, or None."""
    return cast(TakeHidden | None, getattr(drafter, "take_hidden", None))


def likely_tokens(
    tokens: Sequence[int], limit: int, min_probability: float, logits_after: Callable[[Sequence[int]], Logits]
) -> list[int]:
    """Most probable tokens after others, while they are probable enough.

    At most `limit`, each at least `min_probability` probable. `logits_after` evaluates the next tokens and returns the
    logits of the last one.
    """
    found: list[int] = []
    while len(found) < limit and (token := _likely_token(logits_after(tokens), min_probability)) is not None:
        found.append(token)
        tokens = [token]
    return found


def _likely_token(logits: Logits, min_probability: float) -> int | None:
    """Most probable token of logits, if it is probable enough.

    None if it is less than `min_probability` probable, or if logits are not finite.
    """
    token = int(np.argmax(logits))
    with np.errstate(all="ignore"):
        probability = 1 / np.exp(logits - logits[token], dtype=np.float64).sum()
    return token if probability >= min_probability else None
