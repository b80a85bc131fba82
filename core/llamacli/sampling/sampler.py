"""What a sampler is, and chains of them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Self

from llamacli.errors import plugin_errors
from llamacli.sampling.candidates import Candidates


class Sampler(ABC):
    """One step from logits to a token.

    A sampler that learns from what is written has state: it overrides `accept`, `reset` and `clone`. What is merely
    looked up in the tokens written so far stands in `candidates.history`, and random numbers come from
    `candidates.random`, so that most samplers have no state.
    """

    @abstractmethod
    def apply(self, candidates: Candidates) -> None:
        """Change the candidates' logits, take some out, or choose one."""

    def restrict(self, candidates: Candidates) -> None:
        """Take out what may not be drawn here whatever its logit, if that is what this sampler is for."""
        return

    def accept(self, token: int) -> None:
        """Learn that a token has been written."""
        return

    def reset(self) -> None:
        """Forget all tokens: a new text begins."""
        return

    def clone(self) -> Self:
        """A sampler in the same state, which from now on goes its own way."""
        return self


class SamplerChain(Sampler):
    """Samplers one after the other, until one chooses. The last one should: Greedy, Draw, Mirostat or AdaptiveP.

    `n_probs`: how many tokens' log-probabilities are wanted beside the drawn one's; 0 for none at all.
    """

    def __init__(self, samplers: Iterable[Sampler], n_probs: int = 0):
        self.samplers, self.n_probs = tuple(samplers), n_probs

    def apply(self, candidates: Candidates) -> None:
        """Apply each sampler in turn."""
        for sampler in self.samplers:
            _run(sampler, sampler.apply, candidates)
            if candidates.chosen is not None:
                return

    def restrict(self, candidates: Candidates) -> None:
        """Let each sampler take out what may not be drawn."""
        for sampler in self.samplers:
            _run(sampler, sampler.restrict, candidates)

    def accept(self, token: int) -> None:
        """Let every sampler know."""
        for sampler in self.samplers:
            sampler.accept(token)

    def reset(self) -> None:
        """Reset every sampler."""
        for sampler in self.samplers:
            sampler.reset()

    def clone(self) -> Self:
        """A chain of clones."""
        other = copy.copy(self)  # which may be of a class derived from this one
        other.samplers = tuple(sampler.clone() for sampler in self.samplers)
        return other

    def __repr__(self) -> str:
        return f"SamplerChain([{', '.join(map(repr, self.samplers))}])"


def _run(sampler: Sampler, step: Callable[[Candidates], None], candidates: Candidates) -> None:
    """Let a sampler, which may be a plugin's, work on candidates, and look at what it has left."""
    name = type(sampler).__name__
    with plugin_errors(f"sampler {name}"):
        step(candidates)
    candidates.check(name)
