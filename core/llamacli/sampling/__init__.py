"""Choosing the next token from logits."""

from llamacli.sampling.params import SamplingParams
from llamacli.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingParams"]
