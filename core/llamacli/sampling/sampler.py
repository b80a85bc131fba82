"""Sampler interface and sampler chains."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self, cast

import attrs

from llamacli.errors import plugin_errors
from llamacli.sampling.candidates import MAX_STEPS, Candidates, Steps


class Sampler(ABC):
    """Step of a sampler chain.

    A sampler with state overrides `accept`, `reset` and `clone`. The tokens accepted so far are in
    `candidates.history`, and random numbers come from `candidates.random`, so most samplers need no state of their own.
    """

    @abstractmethod
    def apply(self, candidates: Candidates) -> None:
        """Change the candidates' logits, remove some, or choose one."""

    def restrict(self, candidates: Candidates) -> None:
        """Remove tokens that are forbidden whatever their logits; default: none."""
        return

    def accept(self, token: int) -> None:
        """Update the state with a token that was accepted."""
        return

    def reset(self) -> None:
        """Reset the state for a new text."""
        return

    def clone(self) -> Self:
        """An independent sampler in the same state."""
        return self


class Restriction(Sampler):
    """Sampler of which `restrict` is the whole effect."""

    def apply(self, candidates: Candidates) -> None:
        """Remove the forbidden tokens."""
        self.restrict(candidates)


class CompiledSampler(Sampler):
    """Sampler without state that a kernel applies.

    Neighbours in a chain are applied in one call.

    - `kind`: its kind in `llamacli.kernels.sampling`. `value`: by default its only parameter, 0 without.
    """

    kind: int

    @property
    def value(self) -> float:
        """Value of the kernel's step."""
        return float(next(iter(attrs.astuple(cast(Any, self))), 0))

    def apply(self, candidates: Candidates) -> None:
        candidates.apply(Steps((self.kind, self.value)))


class SamplerChain(Sampler):
    """Samplers applied in order until one draws a token.

    The last one should draw: Greedy, Draw, Mirostat or AdaptiveP. `n_probs` is the number of top log-probabilities to
    report beside the drawn token's; 0 reports none. `params` are the SamplingParams that `build_chain`
    made it of, None for others.
    """

    def __init__(self, samplers: Iterable[Sampler], n_probs: int = 0, params: Any = None):
        self.n_probs, self.params = n_probs, params
        self._prepare(tuple(samplers))

    def _prepare(self, samplers: tuple[Sampler, ...]) -> None:
        self.samplers = samplers
        self._accepting = [sampler for sampler in samplers if type(sampler).accept is not Sampler.accept]
        self._parts: list[Sampler | Steps] = []  # neighbours that are compiled are one part
        for is_compiled, group in itertools.groupby(samplers, _is_compiled):
            if is_compiled:
                pairs = [(sampler.kind, sampler.value) for sampler in cast(Iterable[CompiledSampler], group)]
                self._parts += [Steps(*pairs[i : i + MAX_STEPS]) for i in range(0, len(pairs), MAX_STEPS)]
            else:
                self._parts += group

    def apply(self, candidates: Candidates) -> None:
        """Apply each sampler in order."""
        for part in self._parts:
            if isinstance(part, Steps):
                candidates.apply(part)
            else:
                _run(part, part.apply, candidates)
            if candidates.chosen is not None:
                return

    def restrict(self, candidates: Candidates) -> None:
        """Apply each sampler's `restrict`."""
        for sampler in self.samplers:
            _run(sampler, sampler.restrict, candidates)

    def accept(self, token: int) -> None:
        """Pass the token to every sampler."""
        for sampler in self._accepting:
            sampler.accept(token)

    def reset(self) -> None:
        """Reset every sampler."""
        for sampler in self.samplers:
            sampler.reset()

    def clone(self) -> Self:
        """A chain of clones."""
        other = copy.copy(self)  # keeps the class of a derived one
        other._prepare(tuple(sampler.clone() for sampler in self.samplers))
        return other

    def __repr__(self) -> str:
        return f"SamplerChain([{', '.join(map(repr, self.samplers))}])"


class Steer(Sampler):
    """Sampler that calls a function, which changes or removes candidates."""

    def __init__(self, function: Callable[[Candidates], None]):
        self.function = function

    def apply(self, candidates: Candidates) -> None:
        """Call the function; NaN and minus infinity alone are refused afterwards."""
        self.function(candidates)
        candidates.check_drawable()


def steered(chain: SamplerChain, steer: Callable[[Candidates], None]) -> SamplerChain:
    """Chain of the same samplers with `steer` after the restricting ones.

    These are the grammar, banned tokens and the logit bias, as far as they are at the beginning of the chain.
    """
    samplers = chain.samplers
    free = (i for i, sampler in enumerate(samplers) if type(sampler).restrict is Sampler.restrict)
    first = next(free, len(samplers))
    return SamplerChain([*samplers[:first], Steer(steer), *samplers[first:]], chain.n_probs)


def _is_compiled(sampler: Sampler) -> bool:
    return isinstance(sampler, CompiledSampler) and type(sampler).apply is CompiledSampler.apply


def _run(sampler: Sampler, step: Callable[[Candidates], None], candidates: Candidates) -> None:
    name = type(sampler).__name__
    try:
        step(candidates)
    except Exception:
        with plugin_errors(f"sampler {name}"):
            raise
    candidates.check(name)
