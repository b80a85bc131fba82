"""Drafters of speculative decoding, and the time that drafts may cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from llamacli.engine.batching import TakeHidden
from llamacli.engine.compiled_model import CompiledModel

Logits = npt.NDArray[np.float32]

MAX_COST = 0.005
"""Share of the time of a text's passes that drafts may cost in vain, beside one pass."""

_NEWEST = 0.1
"""Weight of the newest time in the usual time."""


class Drafter(Protocol):
    """Proposer of the tokens that may come next (speculative decoding).

    Proposals change how fast a text comes and never the text. `llamacli.speculation` has drafters. One that has a
    method `take_hidden`, a `llamacli.engine.batching.TakeHidden`, gets the hidden states of all tokens that the model
    evaluates, before the next `draft`.
    """

    def begin(self, model: CompiledModel) -> None:
        """Prepare for a text of a model.

        Raises InvalidRequestError if the drafter cannot propose its tokens.
        """

    def draft(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` tokens that may follow those given; none is allowed.

        The sequence grows afterwards: it must not be changed or kept.
        """

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """Learn how many of the first tokens of the last draft came.

        Not called for empty drafts.
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


class Budget:
    """Budget of time for drafts.

    With it, texts that cannot be predicted lose little.
    Drafts gain the passes that they spare, and cost drafting and longer passes. They are allowed until they have cost
    more than they gained by one pass and MAX_COST of all passes. Each counts with its usual time, in seconds, because a
    pause of the machine is no fault of a draft. This is done for every token: it has to be cheap.
    """

    def __init__(self) -> None:
        self._passes: dict[int, float] = {}
        self._drafting = self._gained = 0.0
        self._n = 0

    @property
    def allows(self) -> bool:
        """True if a draft may be tried.

        A pass over one token has been timed, and drafts have not cost too much.
        """
        return self._gained + (1 + MAX_COST * self._n) * self._passes.get(1, 0.0) > 0

    def add_pass(self, n_tokens: int, seconds: float) -> None:
        """Add the time of a pass over so many tokens."""
        self._passes[n_tokens] = _usual(self._passes.get(n_tokens, 0.0), seconds)
        self._n += 1

    def add_drafting(self, seconds: float) -> None:
        """Add the time of drafting, successful or not."""
        self._drafting = _usual(self._drafting, seconds)
        self._gained -= self._drafting

    def settle(self, n_tokens: int, n_accepted: int) -> None:
        """Add the gain or loss of a pass over so many tokens.

        They are one token, its draft, and those that are evaluated again because recurrent states went back before
        them.
        """
        one = self._passes.get(1, 0.0)
        longer = min(self._passes[n_tokens], n_tokens * one)
        self._gained += n_accepted * one - max(0.0, longer - one)


def _usual(usual: float, seconds: float) -> float:
    """Moving mean in which a long pause counts as twice the mean."""
    return usual + _NEWEST * (min(seconds, 2 * usual) - usual) if usual else seconds
