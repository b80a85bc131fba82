"""Tiny models of the decoders beside GPT."""

from typing import Any

from llamacli.testing import HuggingFaceModel, write_architecture
from llamacli_gpt.kin import Bloom, CodeShell, Falcon, Jais, Jais2, Mpt, StarCoder

_ALL_HEADS = {"attention.head_count_kv": 4}

MODELS: dict[Any, dict[str, dict[str, Any]]] = {
    Falcon(): {"falcon": {"attention.head_count_kv": 1}, "falcon_7b": {"attention.head_count_kv": 1}},
    Mpt(): {
        "mpt": _ALL_HEADS | {"attention.clamp_kqv": 0.5},
        "mpt_alibi": {"attention.head_count": 6, "embedding_length": 96, "attention.max_alibi_bias": 8.0},
    },
    Bloom(): {"bloom": _ALL_HEADS},
    StarCoder(): {"starcoder": {"attention.head_count_kv": 1}},
    CodeShell(): {"codeshell": {}},
    Jais(): {"jais": _ALL_HEADS | {"attention.max_alibi_bias": 8.0}},
    Jais2(): {"jais2": _ALL_HEADS},
}
"""Keys by architecture and variant; optional tensors are in all but those of `PLAIN`."""

PLAIN: set[str] = {"falcon_7b", "mpt_alibi"}

EXACT = {"jais", "jais2"}
"""Variants without GELU, which the peer reads from a table."""

_NORMS = [f"blk.{i}.attn_{name}_norm.{kind}" for i in range(2) for name in "qk" for kind in ("weight", "bias")]


def _options(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    return {"keys": keys, "optional": name not in PLAIN} | ({"without": _NORMS} if name == "mpt" else {})


VARIANTS = {
    name: (write_architecture, {"architecture": architecture, **_options(name, keys)}, 1e-9 if name in EXACT else 1e-5)
    for architecture, models in MODELS.items()
    for name, keys in models.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

_MPT = next(architecture for architecture in MODELS if architecture.name == "mpt")

UNRECORDED = {"mpt_norms": (write_architecture, {"architecture": _MPT, "keys": _ALL_HEADS}, None)}
"""Variants that the peer does not run: it asserts that fused queries, a part of a row, are contiguous."""

INERT = ("mpt_norms:*.attn_k_norm.bias",)
"""Adds the same to all scores of a query without RoPE, which softmax cancels out."""

TRANSFORMERS = {
    "jais2": [HuggingFaceModel("jais2")],
}
"""Models of transformers by architecture."""
