"""Tiny models of the GLM family: chatglm, glm4, glm4moe."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size

Shapes = dict[str, tuple[int, ...]]


def write_glm(
    path: str | Path,
    *,
    architecture: str = "glm4",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_nextn: int = 0,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    n_rot: int | None = None,
    n_ff: int = 96,
    tied: bool = False,
    biases: bool = False,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the three architectures; return its path.

    `biases` are those of queries, keys and values; `fused` stores these three as one.
    `n_rot` dimensions of each head are rotated, half of them by default. There are `n_nextn` blocks behind `n_layer`.
    Other options are those of `_mixture` and `write_model`.
    """
    n_vocab, width = vocabulary_size(tokenizer), head_dim or n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "block_count": n_layer + n_nextn,
        "nextn_predict_layers": n_nextn or None,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": n_rot or width // 2,
        "rope.freq_base": 10000.0,
    }
    n_q, n_kv = n_head * width, n_head_kv * width
    projections = {"attn_qkv": n_q + 2 * n_kv} if fused else {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv}
    common: Shapes = {"attn_norm.weight": (n_embd,), "attn_output.weight": (n_embd, n_q)}
    for name, n_out in projections.items():
        common[f"{name}.weight"] = (n_out, n_embd)
        if biases:
            common[f"{name}.bias"] = (n_out,)
    if architecture == "glm4moe":
        options = {name: rest.pop(name) for name in tuple(rest) if name in MIXTURE}
        more, blocks = _mixture(n_layer + n_nextn, n_embd, width, n_ff, **MIXTURE | options)
        keys |= more
    else:
        block = {"ffn_norm.weight": (n_embd,), "ffn_up.weight": (2 * n_ff, n_embd), "ffn_down.weight": (n_embd, n_ff)}
        if architecture == "glm4":
            block |= {"post_attention_norm.weight": (n_embd,), "post_ffw_norm.weight": (n_embd,)}
        blocks = [block] * (n_layer + n_nextn)

    shapes: Shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    nextn = {"eh_proj": (n_embd, 2 * n_embd), "enorm": (n_embd,), "hnorm": (n_embd,), "shared_head_norm": (n_embd,)}
    for i, block in enumerate(blocks):
        draft = {f"nextn.{name}.weight": shape for name, shape in nextn.items()} if i >= n_layer else {}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in (common | block | draft).items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed=architecture, metadata=metadata, **rest
    )


MIXTURE: dict[str, Any] = {"n_dense": 1, "n_expert": 8, "n_used": 2, "n_shared": 1, "n_ff_expert": 64, "qk_norm": False}
"""Default options of mixtures of experts."""


def _mixture(
    n_blocks: int,
    n_embd: int,
    head_dim: int,
    n_ff: int,
    *,
    n_dense: int,
    n_expert: int,
    n_used: int,
    n_shared: int,
    n_ff_expert: int,
    qk_norm: bool,
) -> tuple[dict[str, Any], list[Shapes]]:
    """Keys, and tensors of each block; the first `n_dense` are dense."""
    keys = {
        "expert_count": n_expert,
        "expert_used_count": n_used,
        "expert_shared_count": n_shared,
        "expert_feed_forward_length": n_ff_expert,
        "leading_dense_block_count": n_dense,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }
    norms: Shapes = {"post_attention_norm.weight": (n_embd,)}
    if qk_norm:
        norms |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    n_ff_shared = n_shared * n_ff_expert
    dense: Shapes = {
        "ffn_gate.weight": (n_ff, n_embd), "ffn_up.weight": (n_ff, n_embd), "ffn_down.weight": (n_embd, n_ff),
    }  # fmt: skip
    sparse: Shapes = {
        "ffn_gate_inp.weight": (n_expert, n_embd),
        "exp_probs_b.bias": (n_expert,),
        "ffn_gate_exps.weight": (n_expert, n_ff_expert, n_embd),
        "ffn_up_exps.weight": (n_expert, n_ff_expert, n_embd),
        "ffn_down_exps.weight": (n_expert, n_embd, n_ff_expert),
        "ffn_gate_shexp.weight": (n_ff_shared, n_embd),
        "ffn_up_shexp.weight": (n_ff_shared, n_embd),
        "ffn_down_shexp.weight": (n_embd, n_ff_shared),
    }
    return keys, [norms | (dense if i < n_dense else sparse) for i in range(n_blocks)]


def _keys(architecture: str, **values: Any) -> dict[str, Any]:
    return {"metadata": {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}}


_YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}
_CHATGLM = {"architecture": "chatglm"}
_MOE = {"architecture": "glm4moe", "n_layer": 3, "biases": True}
_WIDE = {"n_embd": 256, "n_ff": 512, "type": "Q4_K"}

GLM: dict[str, dict[str, Any]] = {
    "chatglm": _CHATGLM | {"fused": True, "biases": True},
    "chatglm_mqa": _CHATGLM | {"n_head_kv": 1, "tied": True},
    "chatglm_q8_0": _CHATGLM | {"fused": True, "biases": True, "type": "Q8_0"},
    "chatglm_q4_k": _CHATGLM | _WIDE,
    "glm4": {},
    "glm4_biases": {"n_head_kv": 4, "biases": True},
    "glm4_fused": {"n_head_kv": 1, "fused": True, "biases": True, "tied": True},
    "glm4_head_dim": {"head_dim": 32},
    "glm4_full_rope": {"n_rot": 16} | _keys("glm4", **_YARN),
    "glm4_sections": _keys("glm4", rope__dimension_sections=[2, 1, 1, 0]),
    "glm4_four_sections": _keys("glm4", rope__dimension_sections=[1, 1, 1, 1]),
    "glm4_nextn": {"n_nextn": 1},
    "glm4_q8_0": {"type": "Q8_0"},
    "glm4_q4_k": _WIDE,
    "glm4moe": _MOE,
    "glm4moe_qk_norm": _MOE | {"qk_norm": True, "biases": False, "fused": True, "head_dim": 32},
    "glm4moe_tied": _MOE | {"tied": True},
    "glm4moe_plain_weights": _MOE | _keys("glm4moe", expert_weights_norm=False, expert_weights_scale=1.0),
    "glm4moe_default_keys": _MOE | {"n_dense": 0} | _keys(
        "glm4moe", expert_weights_norm=None, expert_weights_scale=None, expert_gating_func=None,
        leading_dense_block_count=None, expert_group_count=None, expert_group_used_count=None,
    ),
    "glm4moe_softmax": _MOE | _keys("glm4moe", expert_gating_func=1),
    "glm4moe_softmax_of_chosen": _MOE | {"n_used": 3}
    | _keys("glm4moe", expert_gating_func=3, expert_weights_scale=0.0),
    "glm4moe_dense": _MOE | {"n_dense": 3},
    "glm4moe_shared": _MOE | {"n_shared": 2, "n_used": 3},
    "glm4moe_sections": _MOE | _keys("glm4moe", rope__dimension_sections=[2, 1, 1, 0]),
    "glm4moe_nextn": _MOE | {"n_nextn": 1},
    "glm4moe_q8_0": _MOE | {"type": "Q8_0"},
    "glm4moe_q4_k": _MOE | {"n_ff_expert": 256, "qk_norm": True} | _WIDE,
}  # fmt: skip
"""Options of `write_glm` by the variant's name."""

VARIANTS = {name: (write_glm, options, 1e-8) for name, options in GLM.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

SIGMOID_EXPERTS = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

TRANSFORMERS = {
    "glm4": [
        HuggingFaceModel(
            "glm4",
            tensors={
                "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
                "model.layers.{}.post_self_attn_layernorm.weight": "blk.{}.post_attention_norm.weight",
                "model.layers.{}.post_mlp_layernorm.weight": "blk.{}.post_ffw_norm.weight",
            },
        )
    ],
    "glm4moe": [
        HuggingFaceModel(
            "glm4_moe",
            SIGMOID_EXPERTS,
            keys={"expert_gating_func": 2},
            tensors={
                "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
                "model.layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
            },
        )
    ],
}
"""Models of transformers by architecture."""
