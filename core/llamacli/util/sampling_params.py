"""Table of sampling parameters and built-in samplers.

Command line, HTTP API, web page, docs and `general.sampling.*` keys derive from this table. A new sampler is a line of
`SAMPLERS`, its fields, its place in the orders, and the class that the line names. The command line needs the table
before NumPy and attrs are imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from attrs import frozen
else:

    def frozen(**_):
        """No decorator: the command line does without attrs."""
        return lambda cls: cls


MAX_NUMBER = 1_000_000
"""Upper limit of numbers without a range of their own."""

KEYS = "general.sampling."
"""Prefix of the metadata keys in which a model's file has defaults of its own."""

SEQUENCE_KEY = KEYS + "sequence"
"""Metadata key of the order of samplers: names with semicolons between."""


class SamplerEntry(NamedTuple):
    """Built-in sampler, or what draws the token.

    - `classes`: modules of `llamacli.sampling` and classes. The first is called with the parameters in order unless the
      first of them is off, or has a `from_params`.
    - `group`: heading of its parameters on the web page.
    - `name`: its name in `SamplingParams.samplers`, "" if it has none. `aliases`: other names.
    - `when_greedy`: applied in greedy decoding too. `first`: applied before others unless it is named.
    """

    title: str
    classes: str
    group: str = ""
    name: str = ""
    aliases: tuple[str, ...] = ()
    when_greedy: bool = False
    first: bool = False


SAMPLERS = (
    SamplerEntry("Grammar", "grammar.Grammar triggers.LazyGrammar reasoning.GrammarAfter", "", "grammar",
                 when_greedy=True, first=True),
    SamplerEntry("Reasoning budget", "reasoning.ReasoningBudget", "Reasoning", "reasoning_budget", when_greedy=True,
                 first=True),
    SamplerEntry("Suppressed tokens", "penalties.SuppressTokens", "", "suppress_tokens", when_greedy=True, first=True),
    SamplerEntry("Allowed tokens", "restrictions.AllowedTokens", "", "allowed_tokens", when_greedy=True, first=True),
    SamplerEntry("Bad words", "restrictions.BadWords", "", "bad_words", when_greedy=True, first=True),
    SamplerEntry("Minimum length", "restrictions.MinTokens", "Choice of tokens", "min_tokens", when_greedy=True,
                 first=True),
    SamplerEntry("Logit bias", "penalties.LogitBias", "", "logit_bias", when_greedy=True, first=True),
    SamplerEntry("Penalties", "penalties.Penalties", "Repetition", "penalties", when_greedy=True),
    SamplerEntry("DRY", "penalties.Dry", "Repetition", "dry", when_greedy=True),
    SamplerEntry("Temperature", "temperature.Temperature temperature.DynamicTemperature", "Randomness", "temperature",
                 ("temp",)),
    SamplerEntry("Top-n-sigma", "truncation.TopNSigma", "Choice of tokens", "top_n_sigma"),
    SamplerEntry("Top-k", "truncation.TopK", "Choice of tokens", "top_k"),
    SamplerEntry("Typical-p", "truncation.TypicalP", "Choice of tokens", "typ_p", ("typ", "typical", "typical_p")),
    SamplerEntry("Top-p", "truncation.TopP", "Choice of tokens", "top_p", ("nucleus",)),
    SamplerEntry("Min-p", "truncation.MinP", "Choice of tokens", "min_p"),
    SamplerEntry("XTC", "truncation.Xtc", "Choice of tokens", "xtc"),
    SamplerEntry("Infill", "truncation.Infill", "Choice of tokens", "infill"),
    SamplerEntry("Greedy", "choice.Greedy"),
    SamplerEntry("Draw", "choice.Draw"),
    SamplerEntry("Mirostat", "choice.Mirostat choice.MirostatV2", "Mirostat"),
    SamplerEntry("Adaptive-p", "choice.AdaptiveP", "Choice of tokens", "adaptive_p"),
)  # fmt: skip
"""Built-in samplers in the order of docs/samplers.md."""

DEFAULT_ORDER = ("penalties", "dry", "temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc")
"""Order of samplers of `SamplingParams()`."""

ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""Order of samplers of llama.cpp, for command line and server where a file has none."""


class Parameter(NamedTuple):
    """Numeric parameter: a float or, if `off` is one, an integer.

    - `sampler`: title of its sampler. `off`: default of `SamplingParams`. `default`: default of llama.cpp.
    - `low`, `high`: range in files, options and requests; `high` None is no limit. `lenient`: `SamplingParams` takes
      lower numbers too, which are off.
    - `key`: metadata key below `KEYS`, "" for none. `flags`: further names of its option.
    - `names`: names in other programs.
    """

    name: str
    sampler: str
    off: float
    help: str
    default: float
    low: float
    high: float | None
    key: str
    flags: tuple[str, ...]
    names: tuple[str, ...]
    lenient: bool

    @property
    def is_integer(self) -> bool:
        """True for an integer."""
        return isinstance(self.off, int)

    def is_off(self, value: float) -> bool:
        """Test for a value that turns the sampler off."""
        return value >= self.off if self.off == self.high else value <= max(self.off, 0)


def _number(
    sampler: str, off: float, text: str, *, default: float | None = None, low: float = 0, high: float | None = None,
    key: str = "", flags: str = "", names: str = "", lenient: bool = False,
) -> Any:  # fmt: skip
    top = MAX_NUMBER if high is None and isinstance(off, float) else high
    others = f"{flags.replace('-', '_')} {key} {names}".split()
    return Parameter("", sampler, off, text, off if default is None else default, low, top, key, tuple(flags.split()),
                     tuple(others), lenient)  # fmt: skip


@frozen(kw_only=True)
class SamplingNumbers:
    """Numeric fields of SamplingParams, their values here `Parameter`s."""

    # fmt: off
    reasoning_budget: int = _number(
        "Reasoning budget", -1, "Tokens of reasoning in a chat's reply after which its end is forced; 0: no reasoning, "
        "-1: no limit.", low=-1, names="reasoning_budget_tokens thinking_budget_tokens thinking_budget "
        "thinking_token_budget")
    temperature: float = _number(
        "Temperature", 0.0, "Temperature by which logits are divided; 0: greedy decoding.", default=0.8, key="temp",
        flags="temp", lenient=True)
    dynatemp_range: float = _number("Temperature", 0.0, "Range of the dynamic temperature; 0: off.")
    dynatemp_exponent: float = _number(
        "Temperature", 1.0, "Exponent of the entropy in the dynamic temperature.", flags="dynatemp-exp")
    top_k: int = _number(
        "Top-k", 0, "Keep the k most likely tokens, and ties with the last; 0 or less: off.", default=40, low=-1,
        key="top_k", lenient=True)
    top_p: float = _number(
        "Top-p", 1.0, "Nucleus sampling: keep the most likely tokens with a total probability of p; 1: off.",
        default=0.95, high=1, key="top_p")
    min_p: float = _number(
        "Min-p", 0.0, "Drop tokens with less than p times the probability of the most likely one; 0: off.",
        default=0.05, high=1, key="min_p")
    typical_p: float = _number(
        "Typical-p", 1.0, "Locally typical sampling with a total probability of p; 1: off.", high=1, flags="typical",
        names="typ_p")
    top_n_sigma: float = _number(
        "Top-n-sigma", -1.0, "Drop tokens with logits more than n standard deviations below the maximum; 0 or less: "
        "off.", low=-MAX_NUMBER, flags="top-nsigma")
    xtc_probability: float = _number(
        "XTC", 0.0, "XTC: chance to drop all tokens above the XTC threshold but the least likely; 0: off.", high=1,
        key="xtc_probability")
    xtc_threshold: float = _number(
        "XTC", 0.1, "XTC: probability from which tokens are dropped; above 0.5: off.", high=1, key="xtc_threshold")
    repeat_penalty: float = _number(
        "Penalties", 1.0, "Penalty for repeated tokens, which divides or multiplies their logits; 1: off.",
        key="penalty_repeat", names="penalty repetition_penalty", lenient=True)
    frequency_penalty: float = _number(
        "Penalties", 0.0, "Penalty subtracted from a token's logit for each repetition; 0: off.", low=-MAX_NUMBER,
        names="penalty_freq freq_penalty")
    presence_penalty: float = _number(
        "Penalties", 0.0, "Penalty subtracted once from the logits of repeated tokens; 0: off.", low=-MAX_NUMBER,
        names="penalty_present")
    repeat_last_n: int = _number(
        "Penalties", 64, "Number of last tokens to consider for penalties; 0: none, -1: all.", low=-1,
        key="penalty_last_n", names="last_n_tokens_size", lenient=True)
    dry_multiplier: float = _number(
        "DRY", 0.0, "DRY: multiplier of the penalty for tokens that extend a repeated sequence; 0: off.")
    dry_base: float = _number(
        "DRY", 1.75, "DRY: base of the penalty, which grows exponentially with the repetition.", low=1)
    dry_allowed_length: int = _number("DRY", 2, "DRY: length of repetitions without penalty.")
    dry_penalty_last_n: int = _number(
        "DRY", 64, "DRY: number of last tokens to search for repetitions; 0: none, -1: all.", low=-1, lenient=True)
    min_tokens: int = _number(
        "Minimum length", 0, "Number of tokens before which the text does not end by itself; 0: off.")
    mirostat: int = _number(
        "Mirostat", 0, "Mirostat version 1 or 2, which replaces the other samplers but the temperature; 0: off.",
        high=2, key="mirostat", names="mirostat_mode")
    mirostat_tau: float = _number(
        "Mirostat", 5.0, "Mirostat: target entropy (tau), in bits.", key="mirostat_tau", flags="mirostat-ent")
    mirostat_eta: float = _number(
        "Mirostat", 0.1, "Mirostat: learning rate (eta).", key="mirostat_eta", flags="mirostat-lr")
    adaptive_target: float = _number(
        "Adaptive-p", -1.0, "Adaptive-p: target probability of the selected tokens; below 0: off.", low=-1, high=1)
    adaptive_decay: float = _number(
        "Adaptive-p", 0.9, "Adaptive-p: decay of the moving average, over about 1 / (1 - X) tokens.", high=0.99)
    # fmt: on


PARAMETERS = {
    name: one._replace(name=name) for name, one in vars(SamplingNumbers).items() if isinstance(one, Parameter)
}
"""Numeric parameters by name."""
