"""Tiny models of Llama's kin: smollm3, internlm2, arcee and others."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.plugin import INTERLEAVED
from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_kin(
    path: str | Path,
    *,
    architecture: str,
    tokenizer: str = "test",
    seed: str | None = None,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_ff: int = 96,
    n_expert: int = 0,
    n_expert_used: int = 0,
    tied: bool = False,
    fused: bool = False,
    biases: tuple[str, ...] = (),
    rope_freqs: bool = False,
    longrope: bool = False,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `biases` are the matrices that have one, `longrope` writes factors for contexts up to 32 tokens and beyond. The
    rest is as in `write_model`.
    """
    n_vocab, width = vocabulary_size(tokenizer), head_dim or n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": width,
        "rope.freq_base": 10000.0,
    }
    if head_dim:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if n_expert:
        keys |= {"expert_count": n_expert, "expert_used_count": n_expert_used}
    content = dict(tensors or {})
    if longrope:
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 32}
        content = {
            "rope_factors_long.weight": np.linspace(1, 16, width // 2),
            "rope_factors_short.weight": np.linspace(1, 2, width // 2),
        } | content
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    if rope_freqs:
        shapes["rope_freqs.weight"] = (width // 2,)
    n_q, n_kv = n_head * width, n_head_kv * width
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (n_embd,),
        "post_attention_norm" if architecture == "seed_oss" else "ffn_norm": (n_embd,),
        "attn_output": (n_embd, n_q),
    }
    if fused:
        block["attn_qkv"] = (n_q + 2 * n_kv, n_embd)
    else:
        block |= {"attn_q": (n_q, n_embd), "attn_k": (n_kv, n_embd), "attn_v": (n_kv, n_embd)}
    network = {"ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    if architecture == "arcee":
        del network["ffn_gate"]
    if n_expert:
        block["ffn_gate_inp"] = (n_expert, n_embd)
        network = {f"{name}_exps": (n_expert, *shape) for name, shape in network.items()}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in (block | network).items()}
        shapes |= {f"blk.{i}.{name}.bias": (block | network)[name][:1] for name in biases}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    common = {"tokenizer": tokenizer, "seed": seed or architecture, "metadata": metadata, "tensors": content}
    return write_model(path, architecture, prefixed, shapes, **common, **rest)


PROJECTIONS = ("attn_q", "attn_k", "attn_v")
_LINEARS = (*PROJECTIONS, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_WIDE = {"n_embd": 256, "n_ff": 512, "type": "Q4_K"}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
_BETAS = _YARN | {
    "rope.scaling.original_context_length": 256, "rope.scaling.yarn_beta_fast": 2.0,
    "rope.scaling.yarn_beta_slow": 0.25,
}  # fmt: skip
SCALES = {"minicpm.embedding_scale": 3.0, "minicpm.residual_scale": 0.4, "minicpm.logit_scale": 0.5}
_SCALED = {"metadata": SCALES}
_LONG = _YARN | {"rope.scaling.original_context_length": 8, "rope.scaling.yarn_log_multiplier": 1.0}


def _mistral3(keys: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {f"mistral3.{key}": value for key, value in keys.items()}}


_MISTRAL3 = _mistral3(_LONG | {"attention.temperature_scale": 0.1})

KIN: dict[str, dict[str, dict[str, Any]]] = {
    "smollm3": {
        "": {"n_layer": 5},
        "mha": {"n_head_kv": 4},
        "mqa": {"n_head_kv": 1, "n_layer": 4},
        "tied": {"n_layer": 4, "tied": True},
        "biases": {"n_layer": 4, "biases": PROJECTIONS},
        "fused": {"n_layer": 4, "fused": True, "seed": "smollm3 fused"},
        "yarn": {"n_layer": 4, "metadata": {f"smollm3.{key}": value for key, value in _YARN.items()}},
        "q8_0": {"n_layer": 4, "type": "Q8_0"},
        "q4_k": {"n_layer": 4} | _WIDE,
    },
    "internlm2": {
        "": {},
        "mqa": {"n_head_kv": 1},
        "biases": {"biases": PROJECTIONS},
        "fused": {"fused": True},
        "linear": {"metadata": {"internlm2.rope.scaling.type": "linear", "internlm2.rope.scaling.factor": 2.0}},
        "q8_0": {"type": "Q8_0"},
        "q4_k": _WIDE,
    },
    "arcee": {
        "": {},
        "mqa": {"n_head_kv": 1},
        "tied": {"tied": True},
        "biases": {"biases": PROJECTIONS},
        "fused": {"fused": True},
        "head_dim": {"head_dim": 32},
        "rope_freqs": {"rope_freqs": True},
        "yarn": {"metadata": {f"arcee.{key}": value for key, value in _YARN.items()}},
        "q8_0": {"type": "Q8_0"},
        "q4_k": _WIDE,
    },
    "seed_oss": {
        "": {"biases": PROJECTIONS},
        "mqa": {"n_head_kv": 1, "biases": PROJECTIONS},
        "tied": {"tied": True, "biases": PROJECTIONS},
        "no_biases": {},
        "fused": {"fused": True, "biases": ("attn_qkv",)},
        "head_dim": {"head_dim": 32, "biases": PROJECTIONS},
        "q8_0": {"type": "Q8_0", "biases": PROJECTIONS},
        "q4_k": {"biases": PROJECTIONS} | _WIDE,
    },
    "minicpm": {
        "": _SCALED,
        "unscaled": {},
        "zero_scales": {"metadata": {"minicpm.embedding_scale": 0.0, "minicpm.residual_scale": 0.0}},
        "mqa": {"n_head_kv": 1} | _SCALED,
        "tied": {"tied": True, "metadata": SCALES | {"minicpm.embedding_scale": 0.2}},
        "biases": {"biases": _LINEARS} | _SCALED,
        "rope_freqs": {"rope_freqs": True} | _SCALED,
        "longrope": {"longrope": True, "seed": "long"} | _SCALED,
        "longrope_short": {
            "longrope": True,
            "seed": "long",
            "metadata": SCALES | {"minicpm.rope.scaling.original_context_length": 256},
        },
        "moe": {"n_ff": 64, "n_expert": 8, "n_expert_used": 2} | _SCALED,
        "q8_0": {"type": "Q8_0"} | _SCALED,
        "q4_k": _WIDE | _SCALED,
    },
    "mistral3": {
        "": _MISTRAL3,
        "plain": {"rope_freqs": True},
        "mqa": {"n_head_kv": 1} | _MISTRAL3,
        "tied": {"tied": True} | _MISTRAL3,
        "biases": {"biases": _LINEARS} | _MISTRAL3,
        "head_dim": {"head_dim": 32} | _MISTRAL3,
        "temperature": {"seed": "mild"}
        | _mistral3({"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 4}),
        "yarn": _mistral3(_YARN),
        "betas": _mistral3(_BETAS),
        "multiplier": _mistral3(_LONG | {"rope.scaling.yarn_log_multiplier": 0.7, "rope.scaling.attn_factor": 1.2}),
        "moe": {"n_ff": 64, "n_expert": 8, "n_expert_used": 2} | _MISTRAL3,
        "longrope": {"longrope": True},
        "q8_0": {"type": "Q8_0"} | _MISTRAL3,
        "q4_k": _WIDE | _MISTRAL3,
    },
}
"""Options of `write_kin` by architecture and variant."""

VARIANTS = {
    "_".join(filter(None, (architecture, name))): (write_kin, {"architecture": architecture} | options, 1e-8)
    for architecture, variants in KIN.items()
    for name, options in variants.items()
}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

INERT = ("smollm3*:blk.3.attn_k.bias",)
"""Adds the same to all scores of a query without RoPE, which softmax cancels out."""

TRANSFORMERS = {
    "arcee": [HuggingFaceModel("arcee", convert=INTERLEAVED)],
    "internlm2": [HuggingFaceModel("internlm3", convert=INTERLEAVED)],
    "seed_oss": [HuggingFaceModel("seed_oss")],
    "smollm3": [HuggingFaceModel("smollm3", convert=INTERLEAVED)],
}
"""Models of transformers by architecture."""
