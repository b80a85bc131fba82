"""Tiny models of the Qwen family, dense and with experts."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import random_tensor, write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_qwen(
    path: str | Path,
    *,
    architecture: str = "qwen2",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    head_dim: int | None = None,
    n_ff: int = 96,
    n_ff_expert: int | None = None,
    n_ff_shared: int | None = None,
    n_expert: int = 8,
    n_expert_used: int = 2,
    tied: bool = False,
    biases: bool = True,
    output_bias: bool = False,
    fused: bool = False,
    sections: tuple[int, int, int, int] | None = None,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `biases` are those of queries, keys and values, which only qwen2, qwen2moe and qwen2vl have. `fused` stores these
    three as one. `sections` are those of M-RoPE, for the architectures that have it; by default the first three share
    the pairs of a head. Widths of experts that are None stand in no key: routed ones are then `n_ff // n_expert_used`
    wide, shared ones `n_ff`. The epsilon of qwen2vl is 0, for the peer (llama.cpp 0c1e57098) does not read its key. The
    base of M-RoPE is small, so that it matters whether slow pairs are rotated. The rest is as in `write_model`.
    """
    moe, normed = architecture.endswith("moe"), architecture.startswith("qwen3")
    has_sections = "vl" in architecture or architecture == "qwen3tts"
    n_vocab, n_head_kv, width = vocabulary_size(tokenizer), n_head_kv or n_head, head_dim or n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 0.0 if architecture == "qwen2vl" else 1e-6,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": 100.0 if has_sections else 1000000.0,
    }
    if has_sections:
        third = width // 6
        keys["rope.dimension_sections"] = list(sections or (width // 2 - 2 * third, third, third, 0))
    if moe:
        keys |= {
            "expert_count": n_expert,
            "expert_used_count": n_expert_used,
            "expert_feed_forward_length": n_ff_expert,
            "expert_shared_feed_forward_length": n_ff_shared,
        }

    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (3072 if architecture == "qwen3tts" else n_vocab, n_embd)
    if output_bias:
        shapes["output.bias"] = (n_vocab,)
    n_q, n_kv = n_head * width, n_head_kv * width
    projections = {"attn_qkv": n_q + 2 * n_kv} if fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    n_routed, n_shared = n_ff_expert or n_ff // n_expert_used, n_ff_shared or n_ff
    for i in range(n_layer):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
        for name, n_out in projections.items():
            block[f"{name}.weight"] = (n_out, n_embd)
            if biases and not normed:
                block[f"{name}.bias"] = (n_out,)
        block["attn_output.weight"] = (n_embd, n_q)
        if normed:
            block["attn_q_norm.weight"] = block["attn_k_norm.weight"] = (width,)
        if moe:
            block["ffn_gate_inp.weight"] = (n_expert, n_embd)
            block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_routed, n_embd)
            block["ffn_down_exps.weight"] = (n_expert, n_embd, n_routed)
        else:
            block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
            block["ffn_down.weight"] = (n_embd, n_ff)
        if architecture == "qwen2moe":
            block["ffn_gate_inp_shexp.weight"] = (n_embd,)
            block["ffn_gate_shexp.weight"] = block["ffn_up_shexp.weight"] = (n_shared, n_embd)
            block["ffn_down_shexp.weight"] = (n_embd, n_shared)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}

    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed=architecture, metadata=metadata, **rest
    )


def _yarn(architecture: str) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    return {f"{architecture}.rope.scaling.{key}": value for key, value in scaling.items()}


_ROUTED = {"n_head_kv": 2, "n_ff": 128, "n_ff_expert": 96}
_SHARED = _ROUTED | {"n_ff_shared": 160}
_WIDE = {"n_embd": 256, "n_head_kv": 2, "n_ff": 512, "n_ff_expert": 256}

_QWEN2VL = {"architecture": "qwen2vl", "n_head_kv": 2}
_QWEN3VL = {"architecture": "qwen3vl", "n_head_kv": 2}
_QWEN3VLMOE = {"architecture": "qwen3vlmoe", "n_head_kv": 2}

QWEN: dict[str, dict[str, Any]] = {
    "qwen2_mha": {},
    "qwen2_gqa": {"n_head_kv": 2},
    "qwen2_mqa": {"n_head_kv": 1},
    "qwen2_tied": {"n_head_kv": 2, "tied": True},
    "qwen2_output_bias": {"n_head_kv": 2, "output_bias": True},
    "qwen2_no_biases": {"n_head_kv": 2, "biases": False},
    "qwen2_fused": {"n_head_kv": 2, "fused": True},
    "qwen2_yarn": {"n_head_kv": 2, "metadata": _yarn("qwen2")},
    "qwen2_q8_0": {"n_head_kv": 2, "type": "Q8_0"},
    "qwen2_fused_q8_0": {"n_head_kv": 2, "fused": True, "type": "Q8_0"},
    "qwen2_q4_k": {"n_embd": 256, "n_head_kv": 2, "n_ff": 512, "type": "Q4_K"},
    "qwen2moe": {"architecture": "qwen2moe"} | _SHARED,
    "qwen2moe_default_widths": {"architecture": "qwen2moe", "n_head_kv": 2, "n_ff": 128},
    "qwen2moe_top4": {"architecture": "qwen2moe", "n_expert": 12, "n_expert_used": 4} | _SHARED,
    "qwen2moe_q8_0": {"architecture": "qwen2moe", "type": "Q8_0"} | _SHARED,
    "qwen2moe_q4_k": {"architecture": "qwen2moe", "type": "Q4_K", "n_ff_shared": 512} | _WIDE,
    "qwen3_mha": {"architecture": "qwen3"},
    "qwen3_gqa": {"architecture": "qwen3", "n_head_kv": 2},
    "qwen3_mqa": {"architecture": "qwen3", "n_head_kv": 1},
    "qwen3_tied": {"architecture": "qwen3", "n_head_kv": 2, "tied": True},
    "qwen3_head_dim": {"architecture": "qwen3", "n_head_kv": 2, "head_dim": 32},
    "qwen3_yarn": {"architecture": "qwen3", "n_head_kv": 2, "head_dim": 32, "metadata": _yarn("qwen3")},
    "qwen3_q8_0": {"architecture": "qwen3", "n_head_kv": 2, "head_dim": 32, "type": "Q8_0"},
    "qwen3_q4_k": {"architecture": "qwen3", "n_embd": 256, "n_head_kv": 2, "n_ff": 512, "type": "Q4_K"},
    "qwen3moe": {"architecture": "qwen3moe", "head_dim": 32} | _ROUTED,
    "qwen3moe_default_width": {"architecture": "qwen3moe", "n_head_kv": 2, "n_ff": 128, "head_dim": 32},
    "qwen3moe_top1": {"architecture": "qwen3moe", "n_expert": 4, "n_expert_used": 1} | _ROUTED,
    "qwen3moe_q8_0": {"architecture": "qwen3moe", "n_expert_used": 3, "type": "Q8_0"} | _ROUTED,
    "qwen3moe_q4_k": {"architecture": "qwen3moe", "type": "Q4_K"} | _WIDE,
    "qwen2vl": _QWEN2VL,
    "qwen2vl_tied": _QWEN2VL | {"tied": True, "fused": True, "biases": False},
    "qwen2vl_four_sections": _QWEN2VL | {"sections": (2, 1, 2, 3)},
    "qwen2vl_repeated_sections": _QWEN2VL | {"n_head_kv": 1, "sections": (1, 1, 1, 2)},
    "qwen2vl_yarn": _QWEN2VL | {"sections": (3, 2, 2, 1), "metadata": _yarn("qwen2vl")},
    "qwen2vl_q8_0": _QWEN2VL | {"type": "Q8_0"},
    "qwen2vl_q4_k": _QWEN2VL | {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
    "qwen3vl": _QWEN3VL,
    "qwen3vl_all_rotated": _QWEN3VL | {"head_dim": 32, "tied": True},
    "qwen3vl_four_sections": _QWEN3VL | {"n_head_kv": 1, "sections": (3, 1, 2, 2)},
    "qwen3vl_repeated_sections": _QWEN3VL | {"sections": (2, 1, 1, 0)},
    "qwen3vl_deepstack": _QWEN3VL | {"metadata": {"qwen3vl.n_deepstack_layers": 2}},
    "qwen3vl_yarn": _QWEN3VL | {"n_head_kv": 1, "metadata": _yarn("qwen3vl")},
    "qwen3vl_q8_0": _QWEN3VL | {"type": "Q8_0"},
    "qwen3vl_q4_k": _QWEN3VL | {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
    "qwen3tts": {"architecture": "qwen3tts", "n_head_kv": 2, "tokenizer": "test:3136"},
    "qwen3vlmoe": _QWEN3VLMOE | _ROUTED,
    "qwen3vlmoe_default_width": _QWEN3VLMOE | {"n_ff": 128, "tied": True},
    "qwen3vlmoe_top4": _QWEN3VLMOE | _ROUTED | {"n_expert": 12, "n_expert_used": 4},
    "qwen3vlmoe_q8_0": _QWEN3VLMOE | _ROUTED | {"n_expert_used": 3, "type": "Q8_0"},
    "qwen3vlmoe_q4_k": _QWEN3VLMOE | _WIDE | {"n_expert": 4, "type": "Q4_K"},
    "qwen3moe_mxfp4": {"architecture": "qwen3moe", "type": "Q8_0", "expert_type": "MXFP4"} | _ROUTED,
}
"""Options of `write_qwen` by the variant's name."""

VARIANTS = {name: (write_qwen, options, 1e-8) for name, options in QWEN.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "qwen2": [HuggingFaceModel("qwen2")],
    "qwen2moe": [HuggingFaceModel("qwen2_moe", {"num_experts": 8, "shared_expert_intermediate_size": 48})],
    "qwen3": [HuggingFaceModel("qwen3")],
    "qwen3moe": [HuggingFaceModel("qwen3_moe", {"num_experts": 8, "norm_topk_prob": True})],
}
"""Models of transformers by architecture."""

RERANK = "<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"

CLASSIFIERS = {
    "qwen3_rank": (
        write_qwen,
        {
            "architecture": "qwen3",
            "tensors": {"cls.output.weight": random_tensor("head", "cls.output.weight", (2, 64), "F32")[0]},
            "metadata": {
                "qwen3.pooling_type": 4,
                "qwen3.classifier.output_labels": ["yes", "no"],
                "tokenizer.chat_template.rerank": RERANK,
            },
        },
        1e-9,
    ),
}
"""Qwen3-Reranker: a classifier head of two rows, as `VARIANTS`."""

UNREAD = ("*.n_deepstack_layers",)
"""A key that only embeddings of pictures depend on."""
