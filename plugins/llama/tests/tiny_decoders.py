"""Tiny models of the decoders beside Llama, from 2023 to 2026."""

from typing import Any

from llamacli.testing import write_architecture
from llamacli_llama.afmoe import Afmoe, Laguna
from llamacli_llama.bitnet import BitNet
from llamacli_llama.glimmer import MuseGlimmer
from llamacli_llama.hrm import HrmText
from llamacli_llama.maincoder import Maincoder
from llamacli_llama.maple import Maple
from llamacli_llama.mimo2 import Mimo2
from llamacli_llama.nanbeige import Nanbeige
from llamacli_llama.pangu import PanguEmbedded
from llamacli_llama.smallthinker import SmallThinker
from llamacli_llama.spark import Spark
from llamacli_llama.step35 import Step35
from llamacli_llama.talkie import Talkie

_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
_SIGMOID = _EXPERTS | {"expert_gating_func": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}


def _sliding(*pattern: bool) -> dict[str, Any]:
    window = {"attention.sliding_window": 8, "attention.sliding_window_pattern": list(pattern)}
    return {"block_count": len(pattern), **window}


MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Afmoe(): {
        "afmoe": _SIGMOID | _sliding(True, False) | {"expert_shared_count": 1},
        "afmoe_dense_first": _EXPERTS | {
            "block_count": 5, "attention.sliding_window": 8, "expert_shared_count": 0, "leading_dense_block_count": 2,
        },
    },
    Laguna(): {
        "laguna": _SIGMOID | _YARN | _sliding(False, True, True) | {
            "attention.head_count": [4, 8, 2], "attention.head_count_kv": [2, 4, 2], "attention.key_length": 16,
            "leading_dense_block_count": 1, "rope.dimension_count": 8, "rope.dimension_count_swa": 16,
            "rope.freq_base_swa": 500.0,
        },
        "laguna_full": _EXPERTS | {"expert_shared_count": 2, "leading_dense_block_count": 0},
    },
    BitNet(): {"bitnet": {}},
    MuseGlimmer(): {
        "muse_glimmer": {
            "block_count": 4, "attention.sliding_window": 8, "logit_scale": 0.5, "rope.freq_base_swa": 500.0,
            "rope.scaling.type": "linear", "rope.scaling.factor": 4.0,
        },
        "muse_glimmer_capped": _sliding(False, True) | {"logit_scale": 3.0, "final_logit_softcapping": 2.0},
    },
    HrmText(): {
        "hrm_text": {
            "block_count": 12, "hrm.layers_per_stack": 2, "hrm.h_cycles": 2, "hrm.l_cycles": 2, "embedding_scale": 4.0,
        },
    },
    Maincoder(): {"maincoder": {}, "maincoder_mqa": {"attention.head_count_kv": 1}},
    Maple(): {
        "maple": _EXPERTS | _sliding(True, False, True) | {
            "swiglu_clamp_exp": [0.05, 0.0, 0.1], "rope.dimension_count_swa": 8, "rope.freq_base_swa": 500.0,
        },
    },
    Mimo2(): {
        "mimo2": _EXPERTS | _sliding(True, False, True) | {
            "attention.head_count_kv": [4, 2, 1], "attention.key_length": 32, "attention.value_length": 16,
            "attention.value_scale": 0.7, "leading_dense_block_count": 1, "rope.dimension_count": 16,
            "rope.freq_base_swa": 500.0,
        },
        "mimo2_nextn": _EXPERTS | _sliding(True, False, False) | {"nextn_predict_layers": 1},
    },
    Nanbeige(): {
        "nanbeige": {"num_loops": 2},
        "nanbeige_no_norm": {"num_loops": 3, "skip_loop_final_norm": True},
        "nanbeige_once": {},
    },
    PanguEmbedded(): {"pangu": {}, "pangu_yarn": _YARN},
    SmallThinker(): {
        "smallthinker": _EXPERTS | {"expert_gating_func": 2, "block_count": 5, "attention.sliding_window": 8},
        "smallthinker_full": _EXPERTS | {"expert_gating_func": 1},
    },
    Spark(): {
        "spark": _sliding(True, False) | {
            "attention.head_count": [4, 8], "attention.head_count_kv": [2, 4], "rope.freq_base_swa": 500.0,
        },
    },
    Step35(): {
        "step35": _SIGMOID | _sliding(False, True, True) | {
            "attention.head_count": [4, 2, 2], "attention.head_count_kv": [2, 1, 1], "attention.key_length": 32,
            "attention.value_length": 32, "leading_dense_block_count": 1, "swiglu_clamp_exp": [0.0, 0.05, 0.0],
            "swiglu_clamp_shexp": [0.05, 0.0, 0.05], "rope.freq_base_swa": 500.0,
            "expert_shared_feed_forward_length": 48,
        },
        "step35_nextn": _SIGMOID | _sliding(False, True, False) | {
            "nextn_predict_layers": 1, "expert_shared_feed_forward_length": 64,
        },
    },
    Talkie(): {"talkie": {"logit_scale": 0.7}},
}  # fmt: skip
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {
    "laguna_full",
    "maincoder",
    "nanbeige_once",
    "pangu",
    "smallthinker_full",
    "step35_nextn",
    "muse_glimmer_capped",
}
INERT = ("smallthinker:blk.0.attn_k.bias", "smallthinker:blk.4.attn_k.bias")
"""Adds the same to all scores of a query in layers without RoPE, which softmax cancels out."""

GELU = {"spark"}
"""Variants with GELU, which the peer reads from a table."""

VARIANTS = {
    name: (
        write_architecture,
        {"architecture": architecture, "keys": keys, "optional": name not in PLAIN},
        1e-5 if name in GELU else 1e-9,
    )
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""
