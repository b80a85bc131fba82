"""Parts of a model file in terms of verbs.

For files whose architecture no plugin runs: which verbs it needs, which of these the core has, and what is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from llamacli.gguf import Metadata
from llamacli.graph import verbs

_NAMES: tuple[tuple[str, str, str], ...] = (
    (r"token_embd", "embed", "token embedding"),
    (r"position_embd", "positions", "learned positions"),
    (r"token_types", "add", "token types"),
    (r"rope_freqs|rope_factors_\w+", "rope", "factors of RoPE"),
    (r"ssm_conv1d|shortconv\.conv|ssm_conv1d_[qkv]", "short_conv", "causal convolution"),
    (r"ssm_\w+|shortconv\.\w+|time_mix_\w+|channel_mix_\w+", "linear_state", "recurrence"),
    (r"attn_(q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)", "linear", "latent attention"),
    (r"(.*\.|.*_)?norm\w*|attn_\w+_norm|\w+_norm_\d", "rms_norm", "norm, or g.layer_norm"),
    (r"indexer\..+|attn_rel_b|hc_.+|attn_compressor.+", "", "sparse or relative attention"),
    (r"attn_sinks", "attention", "attention sinks"),
    (r"attn_(q|k|v|qkv|output|gate)", "attention", "attention"),
    (r"exp_probs_b|ffn_gate_inp|ffn_(gate|up|down|gate_up)_exps", "moe", "mixture of experts"),
    (r"ffn_(gate|up|down|gate_up)(_shexp|_chexp)?|ffn_gate_inp_shexp", "swiglu", "feed-forward network, or g.map"),
    (r"nextn\..+", "linear", "multi-token prediction, which table.block(nextn=True) declares"),
    (r"output|cls(\.\w+)?", "linear", "output layer"),
    (r"(altup|laurel|per_layer|inp_gate|proj)\w*", "", "per-layer streams"),
)
"""Names of tensors, without block and suffix: pattern, verb ("" for none of the core), and what they are."""


@attrs.frozen
class Part:
    """Tensors of one name in all blocks.

    `name` is that without block and suffix, `shape` the first one's; `verb` computes with them, "" if none is known.
    """

    name: str
    shape: tuple[int, ...]
    verb: str
    meaning: str


def parts_of(shapes: Mapping[str, Sequence[int]]) -> list[Part]:
    """List the parts of a file, by tensor shapes, rows first."""
    found: dict[str, Part] = {}
    for full, shape in shapes.items():
        name = base_name(full)
        if name not in found:
            match = next(((verb, text) for pattern, verb, text in _NAMES if re.fullmatch(pattern, name)), ("", ""))
            found[name] = Part(name, tuple(shape), *match)
    return list(found.values())


def base_name(full: str) -> str:
    """Name of a tensor without its block and suffix."""
    return re.sub(r"^blk\.\d+\.|\.(weight|bias|scale)$", "", full)


def own_keys(metadata: Metadata) -> list[str]:
    """Keys of the architecture that `Config.from_gguf` and `Rope.from_gguf` do not read."""
    prefix = f"{metadata.get('general.architecture')}."
    return [key for key in metadata if key.startswith(prefix) and key.removeprefix(prefix) not in COMMON_KEYS]


COMMON_KEYS = frozenset(
    {
        "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "expert_count", "expert_used_count",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
        "rope.scaling.original_context_length",
    }
)  # fmt: skip
"""Keys that every decoder has, without the architecture's name in front."""


def describe_parts(metadata: Metadata, shapes: Mapping[str, Sequence[int]]) -> str:
    """Describe a file: verbs that it needs, unknown tensors and keys."""
    known = verbs()
    parts = parts_of(shapes)
    needed = sorted({part.verb for part in parts if part.verb in known})
    missing = [part for part in parts if part.meaning and part.verb not in known]
    unknown = [part for part in parts if not part.meaning]
    texts = [f"its tensors are computed by {', '.join(f'g.{verb}' for verb in needed)}"] if needed else []
    if missing:
        texts.append(f"no verb of this core computes {_listed(missing)}")
    if unknown:
        texts.append(f"unknown tensors: {_listed(unknown)}")
    if keys := own_keys(metadata):
        prefix = f"{metadata.get('general.architecture')}."
        texts.append(f"its own keys: {', '.join(key.removeprefix(prefix) for key in keys)}")
    return "; ".join(texts)


def _listed(parts: Iterable[Part]) -> str:
    def text(part: Part) -> str:
        return f"{part.name} {part.shape}{f' ({part.meaning})' if part.meaning else ''}"

    return ", ".join(map(text, parts))
