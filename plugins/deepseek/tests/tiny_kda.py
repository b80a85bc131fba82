"""Tiny models of Kimi Linear and its kin, and of sparse attention."""

from typing import Any

import numpy as np

from llamacli.testing import write_architecture
from llamacli.testing.vocabularies import vocabulary_size
from llamacli_deepseek.deepseek4 import DeepSeek4
from llamacli_deepseek.dots3 import Dots3Note
from llamacli_deepseek.glm5 import Glm5Next
from llamacli_deepseek.hy4 import HyV4
from llamacli_deepseek.k3 import KimiK3
from llamacli_deepseek.kda import BailingMoe3, KimiLinear
from llamacli_deepseek.mistral4 import Mistral4
from llamacli_deepseek.ocr import DeepSeek2Ocr
from llamacli_deepseek.sparse import DeepSeek32, GlmDsa

_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
_LATENT = {
    "attention.key_length": 80, "attention.value_length": 64, "attention.key_length_mla": 48,
    "attention.value_length_mla": 32, "attention.kv_lora_rank": 64, "rope.dimension_count": 16,
}  # fmt: skip
_DELTA = _EXPERTS | _LATENT | {
    "ssm.conv_kernel": 4, "kda.head_dim": 32, "expert_gating_func": 2, "expert_shared_count": 1,
    "leading_dense_block_count": 1,
}  # fmt: skip
_INDEXER = {"attention.indexer.head_count": 8, "attention.indexer.key_length": 64, "attention.indexer.top_k": 6}
_SHARED = _LATENT | _EXPERTS | {
    "attention.head_count_kv": 1, "attention.q_lora_rank": 32, "expert_shared_count": 1, "expert_gating_func": 2,
    "leading_dense_block_count": 1,
}  # fmt: skip
_SPARSE = _SHARED | {"expert_weights_norm": True} | _INDEXER
_STREAMS = _SHARED | {"attention.value_length_mla": 24, "hyper_connection.epsilon": 0.01}
_POOLED = _DELTA | _INDEXER | {
    "block_count": 4, "attention.q_lora_rank": 32, "attention.key_length": 64, "rope.dimension_count": 0,
    "attention.indexer.kpool": 4, "attention.indexer.top_k": 8, "attention.layer_norm_epsilon": 1e-6,
    "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 3, "hyper_connection.epsilon": 1e-6,
}  # fmt: skip
_COMPRESSED = _EXPERTS | _INDEXER | {
    "attention.head_count_kv": 1, "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16,
    "attention.q_lora_rank": 32, "attention.sliding_window": 8, "attention.output_group_count": 2,
    "attention.output_lora_rank": 32, "attention.compress_rope_freq_base": 160000.0, "expert_shared_count": 1,
    "expert_gating_func": 4, "expert_weights_norm": True, "expert_weights_scale": 1.5, "hash_layer_count": 0,
    "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 3, "hyper_connection.epsilon": 1e-6,
}  # fmt: skip
_BOUNDED = _DELTA | {"kda.gate_lower_bound": -5.0, "expert_weights_norm": True}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    KimiLinear(): {
        "kimi_linear": _DELTA | {"attention.head_count_kv": [0, 1], "expert_weights_scale": 2.5},
    },
    BailingMoe3(): {
        "bailingmoe3": _BOUNDED | {
            "block_count": 3, "attention.head_count_kv": [0, 1, 0], "attention.q_lora_rank": 32,
            "swiglu_clamp_exp": [0.0, 0.05, 0.0], "swiglu_clamp_shexp": [0.05, 0.0, 0.05],
        },
        "bailingmoe3_mrope": _BOUNDED | {
            "attention.head_count_kv": [1, 0], "rope.dimension_sections": [2, 3, 3, 0],
        },
    },
    KimiK3(): {
        "kimi_k3": _BOUNDED | {
            "block_count": 3, "attention.head_count_kv": [0, 1, 0], "attention.q_lora_rank": 32,
            "expert_latent_length": 48, "expert_weights_scale": 2.5, "attn_res.block_size": 2,
            "activation.situ_beta": 1.5, "activation.situ_linear_beta": 0.7,
        },
        "kimi_k3_plain": _DELTA | {
            "attention.head_count_kv": [1, 0], "attention.value_length": None, "attn_res.block_size": 0,
            "activation.situ_beta": 4.0, "activation.situ_linear_beta": 0.0,
        },
    },
    DeepSeek32(): {
        "deepseek32": _SPARSE | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                 "rope.scaling.original_context_length": 64},
        "deepseek32_few": _SPARSE | {"attention.indexer.top_k": 200},
    },
    GlmDsa(): {
        "glm_dsa": _SPARSE | {"block_count": 4, "attention.indexer.types": [1, 0, 1, 0], "expert_gating_func": None},
        "glm_dsa_all": _SPARSE | {"expert_weights_scale": 1.5},
        "glm_dsa_long": _SPARSE | {"block_count": 4, "context_length": 1 << 20},
    },
    Dots3Note(): {
        "dots3note": _SPARSE | {
            "block_count": 3, "attention.head_count": [2, 4, 2], "attention.head_count_kv": [1, 1, 1],
            "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True],
            "attention.indexer.types": [0, 1, 0], "rope.freq_base_swa": 500.0, "attention.kv_lora_rank_swa": 32,
            "attention.key_length_swa": 48, "attention.value_length_swa": 32, "attention.key_length_mla_swa": 40,
            "attention.value_length_mla_swa": 24,
        },
        "dots3note_dense": _SPARSE | {
            "attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True],
            "attention.indexer.types": [1, 0], "rope.freq_base_swa": 10000.0, "attention.kv_lora_rank_swa": 64,
            "attention.key_length_swa": 80, "attention.value_length_swa": 64, "attention.key_length_mla_swa": 48,
            "attention.value_length_mla_swa": 32, "expert_weights_scale": 2.0,
        },
    },
    HyV4(): {
        "hy_v4": _STREAMS | {
            "block_count": 3, "hyper_connection.count": 4, "hyper_connection.magnitude": 2.0,
            "expert_weights_norm": True, "expert_weights_scale": 2.5, "swiglu_clamp_exp": [0.0, 0.05, 0.0],
        },
        "hy_v4_indexer": _STREAMS | _INDEXER | {
            "block_count": 3, "hyper_connection.count": 4, "hyper_connection.magnitude": 2.0,
            "attention.indexer.types": [1, 0, 1],
        },
        "hy_v4_plain": _STREAMS | {"hyper_connection.count": 2, "hyper_connection.magnitude": 1.5},
    },
    DeepSeek4(): {
        "deepseek4": _COMPRESSED | {
            "block_count": 4, "attention.compress_ratios": [0, 4, 128, 4], "context_length": 1024,
            "swiglu_clamp_exp": [0.0, 0.05, 0.0, 0.0], "swiglu_clamp_shexp": 0.05,
        },
        "deepseek4_hash": _COMPRESSED | {
            "block_count": 3, "attention.compress_ratios": [0, 0, 4], "swiglu_clamp_exp": 0.05, "hash_layer_count": 2,
        },
        "deepseek4_yarn": _COMPRESSED | {
            "attention.compress_ratios": [4, 0, 4],
            "swiglu_clamp_exp": 10.0, "expert_weights_norm": False,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        },
    },
    Glm5Next(): {
        "glm5_next": _POOLED | {
            "attention.head_count_kv": [1, 0, 1, 1], "attention.indexer.types": [1, 1, 0, 1],
            "kda.gate_lower_bound": -5.0, "swiglu_clamp_exp": [0.0, 0.05, 0.0, 0.0], "swiglu_clamp_shexp": 0.05,
            "expert_weights_norm": True, "expert_weights_scale": 2.5,
        },
        "glm5_next_plain": _POOLED | {
            "block_count": 2, "attention.head_count_kv": [0, 1], "attention.indexer.kpool": 3,
            "attention.indexer.top_k": 6, "expert_gating_func": None,
        },
    },
    DeepSeek2Ocr(): {
        "deepseek2_ocr": _EXPERTS | {
            "attention.head_count_kv": 4, "expert_shared_count": 2, "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
        },
    },
    Mistral4(): {
        "mistral4": _LATENT | _EXPERTS | {
            "attention.head_count_kv": 1, "attention.q_lora_rank": 32, "expert_shared_count": 1,
        },
    },
}  # fmt: skip
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN = {"hy_v4_plain", "dots3note_dense", "glm_dsa_all", "bailingmoe3_mrope", "kimi_k3_plain"}

INERT = (
    "kimi_k3*:blk.0.attn_res_score.weight", "deepseek32_few:*.indexer.*", "deepseek4:blk.2.attn_compressor_*",
)  # fmt: skip
"""Scores of a first block, before anything was kept, indexers that choose all cells, and blocks of 128 tokens."""

HASHED = {
    f"blk.{i}.ffn_gate_tid2eid.weight": np.random.default_rng(i)
    .integers(_EXPERTS["expert_count"], size=(vocabulary_size("test"), _EXPERTS["expert_used_count"]))
    .astype(np.int32)
    for i in range(2)
}
"""Experts by token of `deepseek4_hash`."""

VARIANTS: dict[str, Any] = {
    name: (write_architecture, {"architecture": architecture, "keys": keys, "optional": name not in PLAIN}, 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
VARIANTS["deepseek4_hash"][1]["tensors"] = HASHED
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""
