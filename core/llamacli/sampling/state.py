"""A stream of draws: what a session keeps from one token to the next."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np

from llamacli.errors import InvalidRequestError
from llamacli.sampling.candidates import Candidates, Logits
from llamacli.sampling.logprobs import LogProbs, log_probabilities
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.registry import FindSampler, build_chain
from llamacli.sampling.sampler import SamplerChain
from llamacli.tokenizer import Tokenizer


class SamplerState:
    """Draws tokens. The same seed, logits and parameters give the same tokens.

    - `history`: the tokens accepted since the last `reset`, oldest first.
    - `logprobs`: of the last draw, where `n_probs` asks for them, else None.
    """

    def __init__(self, seed: int, tokenizer: Tokenizer | None = None, find: FindSampler | None = None):
        self._tokenizer, self._find = tokenizer, find
        self._chain = SamplerChain(())
        self._params: SamplingParams | SamplerChain = self._chain
        self.history: list[int] = []
        self.logprobs: LogProbs | None = None
        self._candidates = Candidates(np.random.default_rng(), self.history)
        self._unmodified = Candidates(self._candidates.random)
        self.set_seed(seed)

    def set_seed(self, seed: int) -> None:
        """Start the random numbers anew."""
        self._candidates.random = np.random.Generator(np.random.PCG64(seed))

    def sample(self, logits: Logits, params: SamplingParams | SamplerChain) -> int:
        """Draw a token id from float32 [n_vocab] logits, which may change in place.

        What has been accepted counts as long as the parameters stay equal, or the chain the same object; the history
        counts in any case. Raises InvalidRequestError if a logit is NaN, or if all are minus infinity or forbidden.
        """
        self.use(params)
        candidates, n_probs = self._candidates, self._chain.n_probs
        candidates.start(logits)
        if n_probs:
            self._unmodified.start(logits.copy())
        self._chain.apply(candidates)
        if candidates.chosen is None:
            raise InvalidRequestError("the last sampler of the chain chooses no token; Greedy or Draw would")
        self.logprobs = log_probabilities(self._unmodified, candidates.chosen, n_probs) if n_probs else None
        return candidates.chosen

    @property
    def candidates(self) -> Candidates:
        """What the last token was drawn from, until the next draw. Raises InvalidRequestError if none was."""
        if self._candidates.chosen is None:
            raise InvalidRequestError("no token has been drawn yet, so there are no candidates")
        return self._candidates

    def legal(self, logits: Logits, params: SamplingParams | SamplerChain) -> Candidates:
        """The tokens that `sample` may draw whatever their logits are, so long as these are finite. Nothing is drawn.

        Raises InvalidRequestError if a logit is NaN, or if there is no such token.
        """
        self.use(params)
        candidates = Candidates(self._candidates.random, self.history)
        candidates.start(logits.copy())
        self._chain.restrict(candidates)
        candidates.keep_where(candidates.logits > -np.inf)
        return candidates

    def accept(self, token: int) -> None:
        """Learn that a token has been written. Raises InvalidRequestError if a grammar does not allow it."""
        self._chain.accept(token)
        self.history.append(token)

    def reset(self) -> None:
        """Forget all tokens: a new text begins. The stream of random numbers goes on."""
        self.history.clear()
        self._chain.reset()

    @property
    def draws(self) -> dict[str, Any]:
        """Where the stream of random numbers and the history stand, as JSON can keep it; may be set, to go on there."""
        return {"random": self._candidates.random.bit_generator.state, "history": list(self.history)}

    @draws.setter
    def draws(self, value: dict[str, Any]) -> None:
        history = [int(token) for token in value["history"]]
        self._candidates.random.bit_generator.state = value["random"]
        self.history[:] = history

    def clone(self) -> Self:
        """A state that draws the same tokens as this one from here on."""
        other = type(self)(0, self._tokenizer, self._find)
        other.history += self.history
        other._candidates.random = copy.deepcopy(self._candidates.random)
        other._params, other._chain = self._params, self._chain.clone()
        return other

    def use(self, params: SamplingParams | SamplerChain) -> None:
        """Make the chain that these parameters ask for, or a clone of the one given; `sample` would.

        Raises InvalidRequestError if there is none.
        """
        if params is self._params or (isinstance(params, SamplingParams) and params == self._params):
            return
        if isinstance(params, SamplingParams):
            self._chain = build_chain(params, self._tokenizer, self._find)
        elif isinstance(params, SamplerChain):
            self._chain = params.clone()  # other texts may follow the same one
        else:
            raise InvalidRequestError(f"tokens are drawn by SamplingParams or a SamplerChain, not {params!r}")
        self._params = params
