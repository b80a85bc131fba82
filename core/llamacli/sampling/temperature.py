"""Temperature samplers."""

from __future__ import annotations

import math

import attrs

from llamacli.kernels import sampling as kernels
from llamacli.sampling.candidates import Candidates, Steps
from llamacli.sampling.checks import number
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.sampler import CompiledSampler, Sampler
from llamacli.tokenizer import Tokenizer


@attrs.frozen
class Temperature(CompiledSampler):
    """Divide logits by a temperature; 0 or less keeps one token.

    That is the first of the most probable ones, as where the temperature is so low that float32 overflows.
    """

    kind = kernels.TEMPERATURE
    temperature: float = number()

    @classmethod
    def from_params(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
        """Sampler of these parameters; None if they turn it off."""
        if params.dynatemp_range > 0:
            return DynamicTemperature(params.temperature, params.dynatemp_range, params.dynatemp_exponent)
        return cls(params.temperature) if params.temperature != 1 else None


@attrs.frozen
class DynamicTemperature(Sampler):
    """Entropy-dependent temperature from `temperature - spread` to `temperature + spread` (kalomaze).

    The normalised entropy to the power of `exponent` is mapped to this range, low for certain distributions and high
    for even ones; its lower end is at least 0. As in llama.cpp.
    """

    temperature: float = number()
    spread: float = number(low=0)
    exponent: float = number(1.0, low=0)

    def apply(self, candidates: Candidates) -> None:
        """Divide the logits by the temperature of this distribution."""
        if len(candidates) < 2:
            return
        low, high = max(0.0, self.temperature - self.spread), self.temperature + self.spread
        share = min(max(candidates.entropy() / math.log(len(candidates)), 0.0), 1.0)
        candidates.apply(Steps((kernels.TEMPERATURE, low + (high - low) * share**self.exponent)))
