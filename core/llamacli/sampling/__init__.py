"""Samplers, grammars and log-probabilities: the next token from logits."""

from llamacli.sampling.candidates import Candidates, as_logits
from llamacli.sampling.choice import AdaptiveP, Draw, Greedy, Mirostat, MirostatV2
from llamacli.sampling.grammar import Grammar
from llamacli.sampling.logprobs import LogProbs
from llamacli.sampling.merging import merge_logits
from llamacli.sampling.metrics import Level, Metrics, entropy, perplexity_of, surprisal
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.penalties import Dry, LogitBias, Penalties, SuppressTokens, sequence_breakers
from llamacli.sampling.reasoning import GrammarAfter
from llamacli.sampling.registry import BUILT_IN, FindSampler, SamplerType, build_chain, sampler_type, simplified
from llamacli.sampling.restrictions import AllowedTokens, BadWords, MinTokens
from llamacli.sampling.sampler import Sampler, SamplerChain
from llamacli.sampling.state import SamplerState
from llamacli.sampling.stop_strings import StopStrings
from llamacli.sampling.temperature import DynamicTemperature, Temperature
from llamacli.sampling.triggers import LazyGrammar
from llamacli.sampling.truncation import MinP, TopK, TopNSigma, TopP, TypicalP, Xtc
from llamacli.util.sampling_params import DEFAULT_ORDER

__all__ = [
    "BUILT_IN",
    "DEFAULT_ORDER",
    "AdaptiveP",
    "AllowedTokens",
    "BadWords",
    "Candidates",
    "Draw",
    "Dry",
    "DynamicTemperature",
    "FindSampler",
    "Grammar",
    "GrammarAfter",
    "Greedy",
    "LazyGrammar",
    "Level",
    "LogProbs",
    "LogitBias",
    "Metrics",
    "MinP",
    "MinTokens",
    "Mirostat",
    "MirostatV2",
    "Penalties",
    "Sampler",
    "SamplerChain",
    "SamplerState",
    "SamplerType",
    "SamplingParams",
    "StopStrings",
    "SuppressTokens",
    "Temperature",
    "TopK",
    "TopNSigma",
    "TopP",
    "TypicalP",
    "Xtc",
    "as_logits",
    "build_chain",
    "entropy",
    "merge_logits",
    "perplexity_of",
    "sampler_type",
    "sequence_breakers",
    "simplified",
    "surprisal",
]
