"""Tiny models of EXAONE 3 and K-EXAONE."""

from typing import Any

from llamacli.testing import HuggingFaceModel, write_architecture
from llamacli_exaone import Exaone, ExaoneMoe

_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
_SIGMOID = _EXPERTS | {"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Exaone(): {"exaone": {}, "exaone_plain": {"attention.head_count_kv": 4}},
    ExaoneMoe(): {
        "exaone_moe": _SIGMOID | {
            "block_count": 5, "attention.sliding_window": 8, "leading_dense_block_count": 1,
            "expert_shared_feed_forward_length": 64,
        },
        "exaone_moe_nextn": _SIGMOID | {
            "attention.sliding_window": 8, "attention.sliding_window_pattern": 2, "leading_dense_block_count": 1,
        },
        "exaone_moe_plain": _SIGMOID | {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
    },
}  # fmt: skip
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {"exaone_plain", "exaone_moe_plain"}

NEXTN = {"exaone_moe_nextn": {"n_nextn": 1, "without": ["rope_freqs.weight"]}}
"""Options of variants with multi-token-prediction heads."""

VARIANTS = {
    name: (
        write_architecture,
        {"architecture": architecture, "keys": keys, "optional": name not in PLAIN} | NEXTN.get(name, {}),
        1e-9,
    )
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "exaone-moe": [
        HuggingFaceModel(
            "exaone_moe",
            {"num_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            keys={"expert_gating_func": 2},
            tensors={"model.layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias"},
        )
    ],
}
"""Models of transformers by architecture."""
