"""Sampler state of a session: random generator, history, sampler chain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.sampling.candidates import Candidates, Logits
from llamacli.sampling.choice import Greedy
from llamacli.sampling.logprobs import LogProbs, drawn_probabilities, log_probabilities
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.registry import FindSampler, build_chain
from llamacli.sampling.sampler import SamplerChain, steered
from llamacli.tokenizer import Tokenizer


class SamplerState:
    """Draws tokens; equal seeds, logits and parameters give equal tokens.

    - `history`: the tokens accepted since the last `reset`, oldest first.
    - `logprobs`: of the last draw if `n_probs` asks for them, else None.
    - `steer`: called with the candidates of each draw after grammars, bans and the logit bias, before all other
      samplers; None for none. Clones do not have it.
    """

    def __init__(self, seed: int, tokenizer: Tokenizer | None = None, find: FindSampler | None = None):
        self._tokenizer, self._find = tokenizer, find
        self._chain = SamplerChain(())
        self._params: SamplingParams | SamplerChain = self._chain
        self.history: list[int] = []
        self.logprobs: LogProbs | None = None
        self.steer: Callable[[Candidates], None] | None = None
        self._candidates = Candidates(np.random.default_rng(), self.history)
        self._unmodified = Candidates(self._candidates.random)
        self._copy = np.empty(0, np.float32)
        self.set_seed(seed)

    def set_seed(self, seed: int) -> None:
        """Seed the random generator."""
        self._candidates.random = np.random.Generator(np.random.PCG64(seed))

    def sample(self, logits: Logits, params: SamplingParams | SamplerChain) -> int:
        """Draw a token id from float32 [n_vocab] logits, modified in place.

        The samplers' state is kept while the parameters stay equal, or the chain is the same object; the history is
        kept in any case. Raises InvalidRequestError if a logit is NaN, or if all are minus infinity or forbidden.
        """
        if params is not self._params:
            self.use(params)
        candidates, n_probs, made_of = self._candidates, self._chain.n_probs, self._chain.params
        is_post = isinstance(made_of, SamplingParams) and made_of.post_sampling_probs
        candidates.start(logits)
        if n_probs and not is_post:
            self._unmodified.start(logits.copy())
        chain = self._chain if self.steer is None else steered(self._chain, self.steer)
        chain.apply(candidates)
        if candidates.chosen is None:
            raise InvalidRequestError("the last sampler of the chain must draw a token, as Greedy and Draw do")
        self.logprobs = None
        if n_probs and is_post:
            self.logprobs = drawn_probabilities(candidates, greedy=isinstance(chain.samplers[-1], Greedy), n=n_probs)
        elif n_probs:
            self.logprobs = log_probabilities(self._unmodified, candidates.chosen, n_probs)
        return candidates.chosen

    def draw(self, logits: Logits, params: SamplingParams | SamplerChain) -> int:
        """Draw as `sample` does, from a copy of the logits."""
        if len(self._copy) != len(logits):
            self._copy = np.empty_like(logits)
        self._copy[:] = logits
        return self.sample(self._copy, params)

    @property
    def candidates(self) -> Candidates:
        """Candidates of the last draw, until the next; InvalidRequestError before any."""
        if self._candidates.chosen is None:
            raise InvalidRequestError("no token has been drawn yet: there are no candidates")
        return self._candidates

    def legal(self, logits: Logits, params: SamplingParams | SamplerChain) -> Candidates:
        """Tokens that `sample` may draw whatever their finite logits are.

        Nothing is drawn. Raises InvalidRequestError if a logit is NaN, or if no token is allowed.
        """
        self.use(params)
        candidates = Candidates(self._candidates.random, self.history)
        candidates.start(logits.copy())
        self._chain.restrict(candidates)
        candidates.keep_where(candidates.logits > -np.inf)
        return candidates

    def accept(self, token: int) -> None:
        """Append a token and update samplers; InvalidRequestError if a grammar forbids it."""
        self._chain.accept(token)
        self.history.append(token)

    def end_reasoning(self) -> None:
        """End the reasoning of a text whose parameters have a budget."""
        from llamacli.sampling.reasoning import ReasoningBudget

        for sampler in self._chain.samplers:
            if isinstance(sampler, ReasoningBudget):
                sampler.end()

    def reset(self) -> None:
        """Clear history and samplers for a new text, not the random generator."""
        self.history.clear()
        self._chain.reset()

    @property
    def draws(self) -> dict[str, Any]:
        """State of the random generator and the history, as JSON data; settable."""
        return {"random": self._candidates.random.bit_generator.state, "history": list(self.history)}

    @draws.setter
    def draws(self, value: dict[str, Any]) -> None:
        history = [int(token) for token in value["history"]]
        self._candidates.random.bit_generator.state = value["random"]
        self.history[:] = history

    def clone(self) -> Self:
        """An independent copy that draws the same tokens."""
        other = type(self)(0, self._tokenizer, self._find)
        other.history += self.history
        other._candidates.random = copy.deepcopy(self._candidates.random)
        other._params, other._chain = self._params, self._chain.clone()
        return other

    def use(self, params: SamplingParams | SamplerChain) -> None:
        """Build the chain for these parameters, or clone the chain given.

        `sample` calls this. Raises InvalidRequestError if the parameters are not valid.
        """
        if params is self._params or (isinstance(params, SamplingParams) and params == self._params):
            return
        if isinstance(params, SamplingParams):
            self._chain = build_chain(params, self._tokenizer, self._find)
        elif isinstance(params, SamplerChain):
            self._chain = params.clone()  # the caller's chain may be used by other states
        else:
            raise InvalidRequestError(f"sampling needs SamplingParams or a SamplerChain, not {params!r}")
        self._params = params
