"""Registry of samplers by name, and construction of chains."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import attrs

from llamacli.errors import InvalidRequestError
from llamacli.sampling.choice import AdaptiveP, Draw, Greedy, Mirostat, MirostatV2
from llamacli.sampling.grammar import Grammar
from llamacli.sampling.params import SamplingParams
from llamacli.sampling.reasoning import GrammarAfter
from llamacli.sampling.sampler import Sampler, SamplerChain
from llamacli.sampling.triggers import LazyGrammar
from llamacli.tokenizer import Tokenizer
from llamacli.util.sampling_params import PARAMETERS, SAMPLERS, SamplerEntry


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


def _built_in(entry: SamplerEntry) -> SamplerType:
    module, _, name = entry.classes.split()[0].partition(".")
    kind = getattr(import_module(f"llamacli.sampling.{module}"), name)
    own = [one for one in PARAMETERS.values() if one.sampler == entry.title]

    def make(params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler | None:
        values = [getattr(params, one.name) for one in own]
        return None if own[0].is_off(values[0]) else kind(*values)

    special = _MAKE.get(entry.name, getattr(kind, "from_params", make))
    return SamplerType(entry.name, special, entry.when_greedy, entry.aliases)


_MAKE: dict[str, Callable[[SamplingParams, Tokenizer | None], Sampler | None]] = {
    "grammar": _grammar,
    "adaptive_p": lambda params, tokenizer: None,  # draws, so build_chain puts it last
}
BUILT_IN = tuple(_built_in(entry) for entry in SAMPLERS if entry.name)
"""Samplers of the core."""
_BY_NAME = {name: kind for kind in BUILT_IN for name in kind.names}
_FIRST = tuple(_BY_NAME[simplified(entry.name)] for entry in SAMPLERS if entry.first)
_TEMPERATURE = _BY_NAME["temperature"]
