"""Hugging Face checkpoints of MiniMax-Text-01, M1, M2 and the text of M3."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np

from llamacli.plugin import PLUS_ONE, Checkpoint, Settings, field, hookimpl

LLAMACLI_API = 1


def _sparse(name: str) -> Callable[[Settings], int]:
    """Number of attention to chosen blocks."""
    return lambda settings: int(settings["sparse_attention_config"][name])


def _residual_scale(settings: Settings) -> float:
    """Factor of all residual branches; that of their results is 1."""
    kinds = ("full_attention", "linear_attention", "mlp")
    alphas, betas = ({settings[f"layernorm_{kind}_{name}"] for kind in kinds} for name in ("alpha", "beta"))
    if len(alphas) > 1 or betas != {1}:
        raise ValueError(f"layernorm_*_alpha are {sorted(alphas)} and betas {sorted(betas)}, expected one, and 1")
    return float(alphas.pop())


def _silent(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Added tokens whose embeddings are zeros, which are not sampled."""
    first = min(map(int, tokenizer.get("added_tokens_decoder", ())), default=settings["vocab_size"])
    rows = settings["numbers"]("model.embed_tokens.weight", slice(first, None))
    found = (first + np.flatnonzero(~rows.any(axis=1))).tolist()
    return {"tokenizer.ggml.suppress_tokens": found} if found else {}


_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}, "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"self_attn.index_{x}": f"indexer.{x}" for x in ("q_proj", "k_proj", "q_norm", "k_norm")},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    **{f"block_sparse_moe.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    **{f"block_sparse_moe.experts.w{i}": f"ffn_{x}_exps" for i, x in enumerate(("gate", "down", "up"), 1)},
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.e_score_correction": "exp_probs_b",
}  # fmt: skip
_NORMS = ("attn_norm", "ffn_norm", "output_norm", "attn_q_norm", "attn_k_norm", "indexer.q_norm", "indexer.k_norm")
_M2 = {"expert_feed_forward_length": field("intermediate_size"), "rope.dimension_count": field("rotary_dim")}

CHECKPOINTS = (
    Checkpoint(
        "minimax-01", ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        {"residual_scale": _residual_scale, "rope.dimension_count": field("rotary_dim")},
        pre=("minimax-m2", "qwen2"), tokenizer=_silent, names="minimax-m2",
        tensors={
            f"model.layers.{{}}.self_attn.{name}": f"blk.{{}}.{target}" for name, target in (
                ("norm", "attn_norm_2"), ("qkv_proj", "attn_qkv"), ("out_proj", "attn_output"),
                ("output_gate", "attn_gate"),
            )
        },
    ),
    Checkpoint(
        "minimax-m2", ("MiniMaxM2ForCausalLM",), _M2,
        {"rms_norm_eps": 1e-6, "rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 8, "num_local_experts": 256,
         "num_experts_per_tok": 8, "scoring_func": "sigmoid", "rotary_dim": 64},
        pre=("minimax-m2", "qwen2"), drop=(r"\.mtp_",),
    ),
    Checkpoint(
        "minimax-m3", ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        _M2 | {
            "expert_shared_count": field("n_shared_experts"),
            "expert_weights_scale": field("routed_scaling_factor", kind=float), "expert_weights_norm": True,
            "attention.indexer.head_count": _sparse("sparse_num_index_heads"),
            "attention.indexer.key_length": _sparse("sparse_index_dim"),
            "attention.indexer.top_k": _sparse("sparse_topk_blocks"),
            "attention.indexer.block_size": _sparse("sparse_block_size"),
            "attention.indexer.local_blocks": _sparse("sparse_local_block"),
            "leading_dense_block_count": lambda settings: len(
                list(takewhile(lambda sparse: not sparse, settings["moe_layer_freq"]))
            ),
        },
        {"rms_norm_eps": 1e-6, "rope_theta": 5e6, "head_dim": 128, "num_key_value_heads": 4, "num_local_experts": 128,
         "num_experts_per_tok": 4, "rotary_dim": 64, "routed_scaling_factor": 2.0},
        pre=("minimax-m2", "qwen2"),
        tensors={"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"} | {
            f"model.layers.{{}}.{name}": f"blk.{{}}.{target}" for name, target in _NAMES.items()
        },
        convert={f"{name}.weight": PLUS_ONE for name in _NORMS},
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
