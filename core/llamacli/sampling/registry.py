"""Registry of samplers by name, and construction of chains."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.sampling.choice import AdaptiveP, Draw, Greedy, Mirostat, MirostatV2
from llamacli.sampling.grammar import Grammar
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.penalties import Dry, LogitBias, Penalties, SuppressTokens, expect_tokens, sequence_breakers
from llamacli.sampling.reasoning import GrammarAfter
from llamacli.sampling.sampler import Sampler, SamplerChain
from llamacli.sampling.temperature import DynamicTemperature, Temperature
from llamacli.sampling.triggers import LazyGrammar
from llamacli.sampling.truncation import MinP, TopK, TopNSigma, TopP, TypicalP, Xtc
from llamacli.tokenizer import Tokenizer


@attrs.frozen
class SamplerType:
    """A sampler that `SamplingParams.samplers` can name.

    - `name`: in lower case, with underscores; hyphens, or nothing, are accepted in their place.
    - `make(params, tokenizer)`: the sampler, or None if the parameters disable it. The tokenizer may be None.
    - `when_greedy`: applied in greedy decoding too.
    - `aliases`: other names.
    """

    name: str
    make: Callable[[SamplingParams, Tokenizer | None], Sampler | None]
    when_greedy: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All names, normalised."""
        return frozenset(map(simplified, (self.name, *self.aliases)))


FindSampler = Callable[[str], SamplerType | None]


def build_chain(
    params: SamplingParams, tokenizer: Tokenizer | None = None, find: FindSampler | None = None
) -> SamplerChain:
    """Build the sampler chain for these parameters; `find` looks up plugins' samplers.

    Samplers that forbid tokens come first, unless `params.samplers` names them elsewhere; the one that draws comes
    last. Raises InvalidRequestError for an unknown sampler name.
    """
    types = [_named(name, find) for name in params.samplers]
    first = [kind for kind in _FIRST if kind not in types]
    last: Sampler
    if params.temperature <= 0:
        types, last = [kind for kind in types if kind.when_greedy], Greedy()
    elif params.mirostat:
        types = [kind for kind in types if kind in _FIRST] + [_TEMPERATURE]
        last = (Mirostat if params.mirostat == 1 else MirostatV2)(params.mirostat_tau, params.mirostat_eta)
    elif params.adaptive_target >= 0:
        last = AdaptiveP(params.adaptive_target, params.adaptive_decay)
    else:
        last = Draw()
    made = (kind.make(params, tokenizer) for kind in (*first, *types))
    return SamplerChain([*(sampler for sampler in made if sampler is not None), last], params.n_probs, params)


def simplified(name: str) -> str:
    """Normalise a sampler's name for comparison."""
    return name.lower().replace("-", "").replace("_", "").strip()


def sampler_type(name: str, find: FindSampler | None = None) -> SamplerType | None:
    """Look up a sampler by name; None if unknown."""
    return _BY_NAME.get(simplified(name)) or (find(name) if find is not None else None)


def _named(name: str, find: FindSampler | None) -> SamplerType:
    kind = sampler_type(name, find)
    if kind is None:
        known = ", ".join(kind.name for kind in BUILT_IN)
        raise InvalidRequestError(f"samplers: unknown sampler {name!r} (built in: {known})")
    return kind


def _grammar(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
    if params.grammar is params.json_schema is None:
        for name in ("grammar_triggers", "grammar_after"):
            if getattr(params, name):
                raise InvalidRequestError(f"{name} need a grammar or a json_schema")
        return None
    if params.grammar is not None and params.json_schema is not None:
        raise InvalidRequestError("grammar and json_schema exclude each other")
    if tokenizer is None:
        raise InvalidRequestError("a grammar or JSON Schema needs a tokenizer")
    if params.grammar is not None:
        grammar = Grammar.from_gbnf(params.grammar, tokenizer)
    else:
        grammar = Grammar.from_json_schema(str(params.json_schema), tokenizer)
    if params.grammar_triggers:
        return LazyGrammar(grammar, params.grammar_triggers, params.grammar_after)
    if params.grammar_after:
        return GrammarAfter(grammar, params.grammar_after[0], params.grammar_after[1:])
    return grammar


def _suppress_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
    tokens = params.suppress_tokens + (tokenizer.suppressed if tokenizer is not None else ())
    if tokenizer is not None:
        expect_tokens(params.suppress_tokens, tokenizer.n_vocab, "suppress_tokens")
    return SuppressTokens(tokens) if tokens else None


def _logit_bias(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
    if tokenizer is not None:
        expect_tokens([token for token, _ in params.logit_bias], tokenizer.n_vocab, "logit_bias")
    return LogitBias(params.logit_bias) if params.logit_bias else None


def _penalties(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
    neutral = (
        params.repeat_penalty <= 0 or params.repeat_penalty == 1
    ) and params.frequency_penalty == params.presence_penalty == 0
    if neutral or params.repeat_last_n <= 0:
        return None
    return Penalties(params.repeat_last_n, params.repeat_penalty, params.frequency_penalty, params.presence_penalty)


def _dry(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
    if params.dry_multiplier <= 0 or params.dry_penalty_last_n <= 0:
        return None
    breakers = sequence_breakers(tokenizer, params.dry_sequence_breakers) if tokenizer is not None else {}
    return Dry(params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_penalty_last_n, breakers)


def _temperature(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
    if params.dynatemp_range > 0:
        return DynamicTemperature(params.temperature, params.dynatemp_range, params.dynatemp_exponent)
    return Temperature(params.temperature) if params.temperature != 1 else None


def _typical_p(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
    return TypicalP(params.typical_p) if params.typical_p < 1 else None


def _xtc(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
    if params.xtc_probability <= 0 or params.xtc_threshold > 0.5:
        return None
    return Xtc(params.xtc_probability, params.xtc_threshold)


_TEMPERATURE = SamplerType("temperature", _temperature, aliases=("temp",))
_FIRST = (
    SamplerType("grammar", _grammar, when_greedy=True),
    SamplerType("suppress_tokens", _suppress_tokens, when_greedy=True),
    SamplerType("logit_bias", _logit_bias, when_greedy=True),
)
BUILT_IN = (
    *_FIRST,
    SamplerType("penalties", _penalties, when_greedy=True),
    SamplerType("dry", _dry, when_greedy=True),
    _TEMPERATURE,
    SamplerType("top_n_sigma", lambda params, _: TopNSigma(params.top_n_sigma) if params.top_n_sigma > 0 else None),
    SamplerType("top_k", lambda params, _: TopK(params.top_k) if params.top_k > 0 else None),
    SamplerType("typ_p", _typical_p, aliases=("typ", "typical", "typical_p")),
    SamplerType("top_p", lambda params, _: TopP(params.top_p) if params.top_p < 1 else None, aliases=("nucleus",)),
    SamplerType("min_p", lambda params, _: MinP(params.min_p) if params.min_p > 0 else None),
    SamplerType("xtc", _xtc),
    SamplerType("adaptive_p", lambda params, _: None),  # draws, so build_chain puts it last
)
"""Samplers of the core."""
_BY_NAME = {name: kind for kind in BUILT_IN for name in kind.names}
