"""Tiny models of the LFM2 family: lfm2 and lfm2moe."""

from pathlib import Path
from typing import Any

from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_lfm(
    path: str | Path,
    *,
    architecture: str = "lfm2",
    tokenizer: str = "test",
    heads_kv: tuple[int, ...] = (0, 2, 0, 4),
    n_embd: int = 64,
    n_head: int = 4,
    n_ff: int = 96,
    n_taps: int = 3,
    n_dense: int | None = 1,
    n_ff_expert: int = 64,
    n_expert: int = 8,
    n_expert_used: int = 2,
    context_length: int = 256,
    freq_base: float = 10000.0,
    tied: bool = True,
    n_out: int = 0,
    fused: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `heads_kv` are the heads of keys and values of each layer, 0 for a convolution over `n_taps` tokens. Of a model with
    experts, the first `n_dense` layers are dense. Embeddings are `n_out` wide if it is not 0. `fused` stores queries,
    keys and values as one tensor. The rest is as in `write_model`. LFM2-1.2B is `SIZES_1_2B`.
    """
    n_vocab, head_dim, n_layer = vocabulary_size(tokenizer), n_embd // n_head, len(heads_kv)
    keys: dict[str, Any] = {
        "context_length": context_length,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": list(heads_kv),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": freq_base,
        "shortconv.l_cache": n_taps,
    }
    if architecture == "lfm2moe":
        keys |= {
            "expert_count": n_expert,
            "expert_used_count": n_expert_used,
            "expert_feed_forward_length": n_ff_expert,
            "expert_gating_func": 2,
            "leading_dense_block_count": n_dense,
        }
    first_sparse = (n_dense or 0) if architecture == "lfm2moe" else n_layer
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "token_embd_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    if n_out:
        keys["embedding_length_out"] = n_out
        shapes |= {"dense_2.weight": (n_out, n_embd), "dense_2.bias": (n_out,)}
    for i, n_head_kv in enumerate(heads_kv):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (n_embd,), "ffn_norm.weight": (n_embd,)}
        n_kv = n_head_kv * head_dim
        if n_kv and fused:
            block["attn_qkv.weight"] = (n_embd + 2 * n_kv, n_embd)
        elif n_kv:
            block["attn_q.weight"] = (n_embd, n_embd)
            block["attn_k.weight"] = block["attn_v.weight"] = (n_kv, n_embd)
        else:
            block["shortconv.conv.weight"] = (n_embd, n_taps)
            block["shortconv.in_proj.weight"] = (3 * n_embd, n_embd)
            block["shortconv.out_proj.weight"] = (n_embd, n_embd)
        if n_kv:
            block["attn_q_norm.weight"] = block["attn_k_norm.weight"] = (head_dim,)
            block["attn_output.weight"] = (n_embd, n_embd)
        if i < first_sparse:
            block["ffn_gate.weight"] = block["ffn_up.weight"] = (n_ff, n_embd)
            block["ffn_down.weight"] = (n_embd, n_ff)
        else:
            block["ffn_gate_inp.weight"] = (n_expert, n_embd)
            block["exp_probs_b.bias"] = (n_expert,)
            block["ffn_gate_exps.weight"] = block["ffn_up_exps.weight"] = (n_expert, n_ff_expert, n_embd)
            block["ffn_down_exps.weight"] = (n_expert, n_embd, n_ff_expert)
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(path, architecture, prefixed, shapes, tokenizer=tokenizer, seed="lfm", metadata=metadata, **rest)


SIZES_1_2B: dict[str, Any] = {
    "tokenizer": "test:65536",
    "heads_kv": (0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0),
    "n_embd": 2048,
    "n_head": 32,
    "n_ff": 8192,
    "context_length": 128000,
    "freq_base": 1000000.0,
}
"""Options for the sizes of LFM2-1.2B."""

_MOE = {"architecture": "lfm2moe"}
_WIDE = {"type": "Q4_K", "n_embd": 256, "n_ff": 512}

LFM: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "lfm2_untied_fused": {"tied": False, "fused": True, "n_taps": 4},
    "lfm2_window": {"metadata": {"lfm2.attention.sliding_window": 12}},
    "lfm2_dense": {"n_out": 34, "metadata": {"lfm2.attention.sliding_window": 12}},
    "lfm2_two_taps": {"heads_kv": (2, 0, 0), "n_taps": 2, "freq_base": 1000000.0},
    "lfm2_q8_0": {"type": "Q8_0"},
    "lfm2_q4_k": _WIDE,
    "lfm2moe": _MOE,
    "lfm2moe_softmax": _MOE | {"n_dense": None, "tied": False, "metadata": {"lfm2moe.expert_gating_func": 1}},
    "lfm2moe_q8_0": _MOE | {"type": "Q8_0", "heads_kv": (0, 2), "n_expert_used": 4},
    "lfm2moe_q4_k": _MOE | _WIDE | {"n_ff_expert": 256, "n_expert": 4, "n_expert_used": 4},
}
"""Options of `write_lfm` by the variant's name."""

_UNMASKED = {"metadata": {"lfm2.attention.causal": False, "lfm2.pooling_type": 2}}
ENCODERS = {
    "lfm2_unmasked": (write_lfm, _UNMASKED, 1e-8),
    "lfm2_unmasked_five_taps": (write_lfm, _UNMASKED | {"n_taps": 5, "heads_kv": (2, 0, 0)}, 1e-8),
}
"""The same of embedding models without a mask."""

VARIANTS = {name: (write_lfm, options, 1e-8) for name, options in LFM.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "lfm2": [
        HuggingFaceModel(
            "lfm2",
            {
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
            },
            keys={
                "attention.head_count_kv": lambda c: [
                    c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types
                ]
            },
        )
    ]
}
"""Models of transformers by architecture."""

INERT = ("lfm2moe_q4_k:*.exp_probs_b.bias",)
"""Selection biases of a variant whose router takes all experts."""
