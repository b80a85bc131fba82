"""Tiny models with state space layers: Mamba, Mamba-2, Jamba and Falcon-H1."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size

Shapes = dict[str, tuple[int, ...]]


def scan_shapes(n_embd: int, d_inner: int, d_state: int, dt_rank: int, taps: int) -> Shapes:
    """Tensors of a selective scan."""
    return {
        "ssm_in.weight": (2 * d_inner, n_embd),
        "ssm_conv1d.weight": (d_inner, taps),
        "ssm_conv1d.bias": (d_inner,),
        "ssm_x.weight": (dt_rank + 2 * d_state, d_inner),
        "ssm_dt.weight": (d_inner, dt_rank),
        "ssm_dt.bias": (d_inner,),
        "ssm_a": (d_inner, d_state),
        "ssm_d": (d_inner,),
        "ssm_out.weight": (n_embd, d_inner),
    }


def duality_shapes(n_embd: int, d_inner: int, d_state: int, n_head: int, n_group: int, taps: int) -> Shapes:
    """Tensors of a layer of state space duality, without its norm."""
    d_conv = d_inner + 2 * n_group * d_state
    return {
        "ssm_in.weight": (d_inner + d_conv + n_head, n_embd),
        "ssm_conv1d.weight": (d_conv, taps),
        "ssm_conv1d.bias": (d_conv,),
        "ssm_dt.bias": (n_head,),
        "ssm_a": (n_head, 1),
        "ssm_d": (n_head, 1),
        "ssm_out.weight": (n_embd, d_inner),
    }


def write_mamba(
    path: str | Path,
    *,
    architecture: str = "mamba",
    tokenizer: str = "test",
    n_layer: int = 3,
    n_embd: int = 64,
    d_state: int = 16,
    n_head: int = 4,
    n_group: int = 1,
    dt_rank: int = 32,
    taps: int = 4,
    n_head_attention: int = 4,
    heads_kv: list[int] | None = None,
    n_ff: int = 96,
    n_expert: int = 0,
    norm: bool = True,
    biases: bool = False,
    tied: bool = False,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path.

    `heads_kv` are the heads of keys and values of each layer of Jamba, whose second and fourth layers have `n_expert`
    experts. `norm`: Falcon-H1 normalises the result of state space layers. The rest is as in `write_model`.
    """
    n_vocab, d_inner = vocabulary_size(tokenizer), 2 * n_embd
    dual, attention = architecture in ("mamba2", "falcon-h1"), architecture in ("jamba", "falcon-h1")
    heads_kv = heads_kv or [0, 2, 0, 4]
    n_layer = len(heads_kv) if architecture == "jamba" else n_layer
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff if attention else 0,
        "attention.head_count": n_head_attention if attention else 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": taps,
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": n_head if dual else dt_rank,
        "ssm.group_count": n_group if dual else None,
    }
    if architecture == "jamba":
        keys["attention.head_count_kv"] = heads_kv
    if architecture == "falcon-h1":
        keys |= {"attention.head_count_kv": 2, "rope.freq_base": 10000.0}
    if n_expert:
        keys |= {"expert_count": n_expert, "expert_used_count": 2}
    shapes: Shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    if not tied:
        shapes["output.weight"] = (n_vocab, n_embd)
    head_dim = n_embd // n_head_attention
    for i in range(n_layer):
        block: Shapes = {"attn_norm.weight": (n_embd,)}
        n_head_kv = {"jamba": heads_kv[i % 4], "falcon-h1": 2}.get(architecture, 0)
        if dual:
            block |= duality_shapes(n_embd, d_inner, d_state, n_head, n_group, taps)
            if norm:
                block["ssm_norm.weight"] = (n_group, d_inner // n_group)
        elif not n_head_kv:
            block |= scan_shapes(n_embd, d_inner, d_state, dt_rank, taps)
            if architecture == "jamba":
                block |= {"ssm_dt_norm.weight": (dt_rank,), "ssm_b_norm.weight": (d_state,)}
                block["ssm_c_norm.weight"] = (d_state,)
        if n_head_kv:
            block["attn_q.weight"] = block["attn_output.weight"] = (n_embd, n_embd)
            block["attn_k.weight"] = block["attn_v.weight"] = (n_head_kv * head_dim, n_embd)
        if attention:
            block["ffn_norm.weight" if architecture == "jamba" else "ffn_norm"] = (n_embd,)
            experts = (n_expert,) if n_expert and i % 2 else ()
            suffix = "_exps" if experts else ""
            block[f"ffn_gate{suffix}.weight"] = block[f"ffn_up{suffix}.weight"] = (*experts, n_ff, n_embd)
            block[f"ffn_down{suffix}.weight"] = (*experts, n_embd, n_ff)
            if experts:
                block["ffn_gate_inp.weight"] = (n_expert, n_embd)
        if biases:
            names = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down")
            block |= {f"{name}.bias": block[f"{name}.weight"][:1] for name in names}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed=architecture, metadata=metadata, **rest
    )


_MAMBA2, _JAMBA, _FALCON = ({"architecture": name} for name in ("mamba2", "jamba", "falcon-h1"))

MAMBA: dict[str, dict[str, Any]] = {
    "mamba": {},
    "mamba_tied": {"tied": True, "taps": 3, "d_state": 8},
    "mamba_normed": {"metadata": {"mamba.ssm.dt_b_c_rms": True}},
    "mamba_q8_0": {"type": "Q8_0"},
    "mamba_q4_k": {"type": "Q4_K", "n_embd": 256, "dt_rank": 256},
    "mamba2": _MAMBA2,
    "mamba2_groups": _MAMBA2 | {"n_group": 2, "tied": True, "d_state": 24},
    "mamba2_wide_heads": _MAMBA2 | {"n_embd": 80, "n_head": 2, "taps": 2},
    "mamba2_q8_0": _MAMBA2 | {"type": "Q8_0"},
    "mamba2_q4_k": _MAMBA2 | {"type": "Q4_K", "n_embd": 256, "d_state": 64},
    "jamba": _JAMBA,
    "jamba_experts": _JAMBA | {"n_expert": 4, "tied": True},
    "jamba_q8_0": _JAMBA | {"type": "Q8_0", "heads_kv": [0, 4, 0, 0]},
    "falcon_h1": _FALCON,
    "falcon_h1_no_norm": _FALCON | {"norm": False, "tied": True, "n_group": 1, "n_head": 2},
    "falcon_h1_biases": _FALCON | {"biases": True, "n_group": 2},
    "falcon_h1_q8_0": _FALCON | {"type": "Q8_0"},
    "falcon_h1_q4_k": _FALCON | {"type": "Q4_K", "n_embd": 256, "n_ff": 512},
}
"""Options of `write_mamba` by the variant's name."""

VARIANTS = {name: (write_mamba, options, 1e-8) for name, options in MAMBA.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""
