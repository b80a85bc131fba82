"""Drafters and drafts of speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.engine.batching import TakeHidden
from llamacli.engine.compiled_model import CompiledModel

Logits = npt.NDArray[np.float32]

_FIRST_CHANCE = 0.7
"""Probability that a drafted token comes, before any has."""
_KEPT, _KEPT_WAITING = 0.95, 0.98
"""Share of the past that counts after another draft, and after a step without one."""
_VAIN = 5
"""Drafts in vain, one after another, of which each halves what a step without a draft forgets."""


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


@attrs.define(eq=False)
class Draft:
    """Drafts of a sequence.

    - `drafter`: proposes them; `max_tokens`: their maximum length.
    - `tokens`: the draft of this step; `n_accepted`: the number of its first tokens that came.
    - `n_drafted_in_all`, `n_accepted_in_all`: the same of all drafts so far.
    - `is_warm`: true after the first draft, for which a draft model has to evaluate the prompt.
    """

    drafter: Drafter
    max_tokens: int
    tokens: Sequence[int] = ()
    n_accepted: int = 0
    n_drafted_in_all: int = 0
    n_accepted_in_all: int = 0
    is_warm: bool = False
    _came: float = 0.0
    _tried: float = 0.0
    _n_vain: int = 0

    def expected(self, n: int) -> float:
        """Tokens to expect of a draft of n tokens.

        As if each came with the same probability, if all before it did.
        """
        p = (self._came + _FIRST_CHANCE) / (self._tried + 1)
        return p * (1 - p**n) / (1 - p) if p < 1 else float(n)

    def accepts(self, token: int) -> bool:
        """True, and counted, if the draft continues with a token."""
        accepted = self.n_accepted < len(self.tokens) and self.tokens[self.n_accepted] == token
        self.n_accepted += accepted
        self.n_accepted_in_all += accepted
        return accepted

    def settle(self) -> None:
        """Learn from the fate of the draft, and end it."""
        self._learn(self.n_accepted, self.n_accepted < len(self.tokens))
        self.tokens, self.n_accepted = (), 0

    def fail(self) -> None:
        """Learn that a drafter took its time and proposed nothing."""
        self._learn(0, True)

    def _learn(self, n_came: int, missed: bool) -> None:
        self._came = _KEPT * self._came + n_came
        self._tried = _KEPT * self._tried + n_came + missed
        self._n_vain = 0 if n_came else self._n_vain + missed

    def wait(self) -> None:
        """Decay the acceptance statistics, so that drafts are tried again later.

        The later, the more drafts were in vain.
        """
        kept = 1 - (1 - _KEPT_WAITING) / 2 ** min(self._n_vain, _VAIN)
        self._came, self._tried = kept * self._came, kept * self._tried


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
