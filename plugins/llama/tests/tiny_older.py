"""Tiny models of Llama's older relatives."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_llama.grok import Grok
from llamacli_llama.older import Arctic, Baichuan, Dbrx, OpenElm, Orion, Plamo, Refact, Xverse
from llamacli_llama.plamo import Plamo2, Plamo3

_EXPERTS = {"expert_count": 8, "expert_used_count": 2}
_SMALL = {"embedding_length": 32, "attention.head_count": 2, "attention.head_count_kv": 2, "feed_forward_length": 32}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Baichuan(): {"baichuan": _SMALL | {"block_count": 32}, "baichuan_13b": _SMALL | {"block_count": 40}},
    Refact(): {"refact": {"attention.head_count_kv": 1}},
    Orion(): {"orion": {}},
    Xverse(): {"xverse": {}},
    Plamo(): {"plamo": {}},
    OpenElm(): {
        "openelm": {
            "attention.head_count": [4, 6], "attention.head_count_kv": [2, 3], "feed_forward_length": [64, 96],
            "attention.key_length": 16, "attention.value_length": 16,
        },
    },
    Plamo2(): {
        "plamo2": {
            # llama.cpp 0c1e57098 never returns from RoPE of a file whose first layer has no heads, as PLaMo 2's own.
            "attention.head_count": [4, 0], "attention.head_count_kv": [2, 0], "attention.key_length": 16,
            "attention.value_length": 16, "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16,
            "ssm.time_step_rank": 2, "ssm.group_count": 0,
        },
    },
    Plamo3(): {
        "plamo3": {
            "block_count": 3, "attention.sliding_window": 8, "attention.sliding_window_pattern": 2,
            "rope.freq_base_swa": 100.0,
        },
        "plamo3_scaled": {
            "block_count": 3, "attention.sliding_window": 8, "attention.sliding_window_pattern": 2,
            "rope.freq_base": 500.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0,
        },
        "plamo3_by_layer": {
            "attention.head_count": [4, 2], "attention.head_count_kv": [2, 1], "feed_forward_length": [96, 64],
            "attention.key_length": 16, "attention.value_length": 16,
        },
    },
    Arctic(): {"arctic": _EXPERTS},
    Dbrx(): {"dbrx": _EXPERTS | {"attention.clamp_kqv": 0.5}},
    Grok(): {
        "grok": _EXPERTS,
        "grok_2": _EXPERTS | {
            "expert_feed_forward_length": 32, "embedding_scale": 20.0, "logit_scale": 0.5,
            "final_logit_softcapping": 5.0, "attention.output_scale": 0.2, "attn_logit_softcapping": 2.0,
        },
        "grok_yarn": _EXPERTS | {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256,
            "rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.yarn_beta_fast": 2.0,
            "rope.scaling.yarn_beta_slow": 0.25, "rope.scaling.yarn_attn_factor": 0.7,
        },
        "grok_magnitude": _EXPERTS | {
            "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.3, "rope.scaling.yarn_attn_factor": 0.5,
        },
    },
}  # fmt: skip
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN: set[str] = {"baichuan", "grok"}

INERT = ("refact:*.attn_k.bias", "baichuan_13b:*.attn_k.bias")
"""Adds the same to all scores of a query without RoPE, which softmax cancels out."""

VARIANTS = {
    name: (
        write_architecture,
        {"architecture": architecture, "keys": keys, "optional": name not in PLAIN},
        1e-5 if "grok" in name else 1e-9,  # the peer reads GELU from a table
    )
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""
