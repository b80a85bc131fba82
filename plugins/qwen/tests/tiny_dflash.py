"""Tiny DFlash draft heads."""

from typing import Any

import numpy as np

from llamacli.testing import write_architecture
from llamacli_qwen.dflash import DFlash

LAYERS = (0, 2)
"""Layers of the model whose inputs they read."""

IDS = np.random.RandomState(6).permutation(128)[:40].astype(np.int64)

_OUTPUT = (0.1 * np.random.RandomState(7).standard_normal((40, 64))).astype(np.float32)
_KEYS: dict[str, Any] = {"target_layers": list(LAYERS), "block_size": 6, "attention.key_length": 16}
_OPTIONS: dict[str, Any] = {"architecture": DFlash(), "metadata": {"tokenizer.ggml.mask_token_id": 5}}
_SHARED = ["token_embd.weight", "output.weight", "d2t", "rope_freqs.weight"] + [
    f"blk.{i}.{name}.weight"
    for i in range(2)
    for name in ("attn_sinks", "post_attention_norm", "post_ffw_norm", "layer_output_scale")
]

RANK = 16
"""Width of the Markov heads of DSpark, and of the selectors of DFlash 2."""

_SELECTOR: dict[str, Any] = {
    "conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 5,
}  # fmt: skip


def _markov(n_draft: int) -> dict[str, np.ndarray]:
    random = np.random.RandomState(8)
    return {
        f"markov_w{i}.weight": random.standard_normal((n, RANK)).astype(np.float32) for i, n in ((1, 128), (2, n_draft))
    }


HEADS = {
    "dflash": (write_architecture, _OPTIONS | {"keys": _KEYS, "without": _SHARED}, 1e-9),
    "dflash_all": (
        write_architecture,
        _OPTIONS
        | {
            "keys": _KEYS
            | {
                "embedding_scale": 3.0, "attention.value_scale": 0.7, "attention.sliding_window": 8,
                "attention.sliding_window_pattern": [True, False],
            },
            "tensors": {"d2t": IDS, "output.weight": _OUTPUT},
            "without": ["blk.1.attn_v.weight"],
        },
        1e-9,
    ),
    "dflash_causal": (
        write_architecture,
        _OPTIONS
        | {"keys": _KEYS | {"attention.causal": True, "hidden_activation": "gelu"}, "without": _SHARED[2:]},
        1e-5,
    ),
    "dspark": (
        write_architecture,
        _OPTIONS | {
            "keys": _KEYS, "without": _SHARED,
            "tensors": _markov(128) | {
                "conf_proj.weight": np.full((1, 64 + RANK), 0.1, np.float32), "conf_proj.bias": np.ones(1, np.float32),
            },
        },
        1e-9,
    ),
    "dspark_bonus": (
        write_architecture,
        _OPTIONS | {
            "keys": _KEYS | {"sample_from_anchor": False}, "without": _SHARED[3:],
            "tensors": {"d2t": IDS, "output.weight": _OUTPUT, "markov_w2.scale": np.full(1, 0.5, np.float32)}
            | _markov(40),
        },
        1e-9,
    ),
    "dflash2": (write_architecture, _OPTIONS | {"keys": _KEYS | _SELECTOR, "without": _SHARED}, 1e-9),
    "dflash2_all": (
        write_architecture,
        _OPTIONS
        | {
            "keys": _KEYS
            | _SELECTOR
            | {
                "conv_kernel_size": 8, "conv_group_size": 64, "selector_top_k": 3, "logit_scale": 0.5,
                "final_logit_softcapping": 2.0, "attention.value_scale": 0.7,
            },
            "without": ["d2t", "rope_freqs.weight", "blk.0.attn_sinks.weight"],
        },
        1e-9,
    ),
}  # fmt: skip
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""
