"""Tiny models of Nemotron-H: state spaces, attention, networks without gate."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size

Shapes = dict[str, tuple[int, ...]]


def write_nemotron_h(
    path: str | Path,
    *,
    architecture: str = "nemotron_h",
    tokenizer: str = "test",
    kinds: str = "MF*FM",
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 96,
    widths: dict[int, int] | None = None,
    used: dict[int, int] | None = None,
    n_expert: int = 8,
    n_expert_used: int = 2,
    n_ff_shared: int = 96,
    n_latent: int = 0,
    n_head_state: int = 4,
    n_group: int = 2,
    d_state: int = 16,
    biases: bool = False,
    tied: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `kinds` has a letter a layer: M state space, * attention, F feed-forward network; `widths` of experts and the
    numbers of those `used` are by layer, where they are not all alike. The rest is as in `write_model`.
    """
    moe, n_vocab, width = architecture == "nemotron_h_moe", vocabulary_size(tokenizer), n_embd // n_head
    d_inner = 2 * n_embd
    d_conv = d_inner + 2 * n_group * d_state
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": [n_ff if kind == "F" else 0 for kind in kinds],
        "block_count": len(kinds),
        "attention.head_count": n_head,
        "attention.head_count_kv": [n_head_kv if kind == "*" else 0 for kind in kinds],
        "attention.layer_norm_epsilon": 1e-3,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": n_head_state,
        "ssm.group_count": n_group,
    }
    if moe:
        keys |= {
            "expert_count": n_expert,
            "expert_used_count": [used.get(i, 0) for i in range(len(kinds))] if used else n_expert_used,
            "expert_feed_forward_length": [widths.get(i, 0) for i in range(len(kinds))] if widths else n_ff,
            "expert_shared_feed_forward_length": n_ff_shared,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "moe_latent_size": n_latent or None,
        }
    network: Shapes = {"ffn_up.weight": (n_ff, n_embd), "ffn_down.weight": (n_embd, n_ff)}
    if moe:
        inner = n_latent or n_embd
        network = {
            "ffn_gate_inp.weight": (n_expert, n_embd),
            "exp_probs_b.bias": (n_expert,),
            "ffn_up_exps.weight": (n_expert, n_ff, inner),
            "ffn_down_exps.weight": (n_expert, inner, n_ff),
            "ffn_up_shexp.weight": (n_ff_shared, n_embd),
            "ffn_down_shexp.weight": (n_embd, n_ff_shared),
        }
    if moe and n_latent:
        network |= {"ffn_latent_down.weight": (n_latent, n_embd), "ffn_latent_up.weight": (n_embd, n_latent)}
    attention: Shapes = {
        "attn_q.weight": (n_embd, n_embd),
        "attn_k.weight": (n_head_kv * width, n_embd),
        "attn_v.weight": (n_head_kv * width, n_embd),
        "attn_output.weight": (n_embd, n_embd),
    }
    space: Shapes = {
        "ssm_in.weight": (d_inner + d_conv + n_head_state, n_embd),
        "ssm_conv1d.weight": (d_conv, 4),
        "ssm_conv1d.bias": (d_conv,),
        "ssm_dt.bias": (n_head_state,),
        "ssm_a": (n_head_state, 1),
        "ssm_d": (n_head_state, 1),
        "ssm_norm.weight": (n_group, d_inner // n_group),
        "ssm_out.weight": (n_embd, d_inner),
    }
    shapes: Shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    for i, kind in enumerate(kinds):
        block = {"attn_norm.weight": (n_embd,)} | {"M": space, "*": attention, "F": network}[kind]
        if widths and kind == "F":
            block |= {
                "ffn_up_exps.weight": (n_expert, widths[i], n_latent or n_embd),
                "ffn_down_exps.weight": (n_expert, n_latent or n_embd, widths[i]),
            }
        if biases and kind != "M":
            block |= {name.replace("weight", "bias"): shape[:1] for name, shape in block.items() if "norm" not in name}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed="nemotron_h", metadata=metadata, **rest
    )


_MOE = {"architecture": "nemotron_h_moe"}

NEMOTRON_H: dict[str, dict[str, Any]] = {
    "nemotron_h": {},
    "nemotron_h_biases": {"biases": True, "tied": True},
    "nemotron_h_one_group": {"kinds": "*FM", "n_group": 1},
    "nemotron_h_q8_0": {"type": "Q8_0"},
    "nemotron_h_q4_k": {"type": "Q4_K", "n_embd": 256, "n_ff": 512, "d_state": 32},
    "nemotron_h_moe": _MOE,
    "nemotron_h_moe_latent": _MOE | {"n_latent": 32},
    "nemotron_h_moe_puzzle": _MOE | {"n_latent": 32, "widths": {1: 96, 3: 32}, "used": {1: 3, 3: 2}},
    "nemotron_h_moe_unscaled": _MOE
    | {"metadata": {"nemotron_h_moe.expert_weights_norm": False, "nemotron_h_moe.expert_weights_scale": None}},
    "nemotron_h_moe_q8_0": _MOE | {"type": "Q8_0", "kinds": "MF*F"},
}
"""Options of `write_nemotron_h` by the variant's name."""

VARIANTS = {name: (write_nemotron_h, options, 1e-8) for name, options in NEMOTRON_H.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

INERT = ("nemotron_h*:*.attn_k.bias",)
"""Adds the same to all scores of a query without RoPE, which softmax cancels out."""
