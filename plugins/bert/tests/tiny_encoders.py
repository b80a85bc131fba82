"""Tiny models of the encoders beside BERT."""

from typing import Any

import numpy as np

from llamacli.testing import write_architecture
from llamacli_bert.later import JinaBert2, JinaBert3, NomicBertMoe
from llamacli_bert.modern import EuroBert, LlamaEmbed, ModernBert, NeoBert
from tiny_bert import head

_COMMON = {"attention.causal": False, "pooling_type": 1, "context_length": 64}
_PLAIN_HEADS = _COMMON | {"attention.head_count_kv": 4}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    NomicBertMoe(): {
        "nomic_bert_moe": _PLAIN_HEADS | {"moe_every_n_layers": 2, "expert_count": 8, "expert_used_count": 2},
    },
    JinaBert2(): {
        "jina_bert_v2": _PLAIN_HEADS,
        "jina_bert_v2_ungated": _PLAIN_HEADS,
        "jina_bert_v2_gate": _PLAIN_HEADS,
    },
    JinaBert3(): {"jina_bert_v3": _PLAIN_HEADS},
    ModernBert(): {
        "modern_bert": _PLAIN_HEADS | {"block_count": 4, "attention.sliding_window": 8, "rope.freq_base_swa": 500.0},
        "modern_bert_full": _PLAIN_HEADS | {"hidden_activation": "silu"},
    },
    NeoBert(): {"neo_bert": _COMMON},
    EuroBert(): {"eurobert": _COMMON},
    LlamaEmbed(): {"llama_embed": _COMMON},
}
"""Keys by architecture and variant."""

PLAIN = {"eurobert", "jina_bert_v2", "jina_bert_v2_ungated", "modern_bert_full"}
"""Variants without optional tensors."""

GELU = {"jina_bert_v2", "jina_bert_v2_gate", "jina_bert_v2_ungated", "jina_bert_v3", "modern_bert", "nomic_bert_moe"}
"""Variants with GELU, which the peer reads from a table."""

INERT = ("jina_bert_v2*.attn_k.bias", "jina_bert_v2*.attn_k_norm.bias")
"""Adds the same to all scores of a query, which softmax cancels out."""


def _fused_gates() -> dict[str, np.ndarray]:
    """Matrices of gate and up in one."""
    random = np.random.RandomState(3)
    return {f"blk.{i}.ffn_up.weight": random.standard_normal((192, 64)) / 8 for i in range(2)}


def _options(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    tensors = {"tensors": _fused_gates()} if name == "jina_bert_v2" else {}
    types = {"metadata": {"tokenizer.ggml.token_type_count": 2}} if "jina" in name or "nomic" in name else {}
    return {"keys": keys, "optional": name not in PLAIN} | tensors | types


ENCODERS = {
    name: (write_architecture, {"architecture": architecture, **_options(name, keys)}, 1e-5 if name in GELU else 1e-9)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

_HEADS = {
    "jina_bert_v2_ungated": head("cls.weight", "cls.bias"),
    "modern_bert_full": head("cls.weight", "cls.norm.weight", "cls.output.weight", "cls.output.bias"),
    "neo_bert": head("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"),
}


def _classifier(name: str, tensors: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any], float]:
    write, options, exact = ENCODERS[name]
    keys = options["keys"] | {"pooling_type": 4}
    bound = 1e-4 if "modern" in name else max(exact, 1e-5)  # GELU in the head, of one small score
    return write, options | {"keys": keys, "tensors": options.get("tensors", {}) | tensors}, bound


CLASSIFIERS = {f"{name}_rank": _classifier(name, tensors) for name, tensors in _HEADS.items()}
"""Encoders with a classifier head, as `ENCODERS`."""
