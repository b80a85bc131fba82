"""Hugging Face checkpoints of OLMo, OLMo 2, OLMo 3 and OLMoE."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import INTERLEAVED, Checkpoint, Settings, field, hookimpl, rope_of

LLAMACLI_API = 1

_PERIOD = 4
"""Layers of OLMo 3 from one with full attention to the next, where config.json has no layer_types."""


def _pattern(settings: Settings) -> list[bool] | None:
    if "sliding_window" not in settings:
        return None
    if kinds := settings.get("layer_types"):
        return [kind == "sliding_attention" for kind in kinds]
    return [(i + 1) % _PERIOD != 0 for i in range(settings["num_hidden_layers"])]


def _sliding_base(settings: Settings) -> float | None:
    if "sliding_window" not in settings:
        return None
    own = settings["rope_parameters"].get("sliding_attention", rope_of(settings))
    return float(own["rope_theta"])


_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    "num_key_value_heads": lambda settings: settings["num_attention_heads"],
}  # fmt: skip
_KEYS: dict[str, Any] = {
    "attention.sliding_window": lambda settings: settings.get("sliding_window"),
    "attention.sliding_window_pattern": _pattern,
    "rope.freq_base_swa": _sliding_base,
}

FIRST = Checkpoint(
    "olmo", ("OlmoForCausalLM", "OLMoForCausalLM"),
    {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": field("clip_qkv", kind=float)},
    {name: value for name, value in _DEFAULTS.items() if name != "rms_norm_eps"}, pre=("olmo", "gpt-2"),
     convert=INTERLEAVED,
)  # fmt: skip
SECOND = Checkpoint("olmo2", ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _KEYS, _DEFAULTS, pre=("dbrx", "olmo"))
MIXTURE = Checkpoint(
    "olmoe", ("OlmoeForCausalLM",), {},
    _DEFAULTS | {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8}, pre=("dbrx", "olmo"),
    rename=((r"(\.experts\.(?:down|gate_up)_proj)$", r"\1.weight"),),
    split={r"\.experts\.gate_up_proj\.weight$": (".experts.gate_proj.weight", ".experts.up_proj.weight")},
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in (FIRST, SECOND, MIXTURE):
        register(checkpoint)
