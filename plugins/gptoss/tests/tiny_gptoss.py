"""Tiny models of the gpt-oss architecture."""

from pathlib import Path
from typing import Any

import numpy as np

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_gptoss(
    path: str | Path,
    *,
    tokenizer: str = "test",
    seed: str = "gptoss",
    n_layer: int = 4,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 32,
    n_ff_expert: int = 96,
    n_expert: int = 8,
    n_expert_used: int = 4,
    window: int = 8,
    **options: Any,
) -> Path:
    """Write a model of the gpt-oss architecture and return its path.

    Prompts of the goldens are longer than the window and than what YaRN takes for the original context. `options` are
    those of `write_model`.
    """
    n_vocab, n_q, n_kv = vocabulary_size(tokenizer), n_head * head_dim, n_head_kv * head_dim
    keys: dict[str, Any] = {
        "gpt-oss.context_length": 512,
        "gpt-oss.embedding_length": n_embd,
        "gpt-oss.block_count": n_layer,
        "gpt-oss.feed_forward_length": n_ff_expert,
        "gpt-oss.expert_feed_forward_length": n_ff_expert,
        "gpt-oss.expert_count": n_expert,
        "gpt-oss.expert_used_count": n_expert_used,
        "gpt-oss.attention.head_count": n_head,
        "gpt-oss.attention.head_count_kv": n_head_kv,
        "gpt-oss.attention.key_length": head_dim,
        "gpt-oss.attention.value_length": head_dim,
        "gpt-oss.attention.sliding_window": window,
        "gpt-oss.attention.layer_norm_rms_epsilon": 1e-5,
        "gpt-oss.rope.freq_base": 150000.0,
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": 32.0,
        "gpt-oss.rope.scaling.original_context_length": 32,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    for i in range(n_layer):
        matrices = {
            "attn_q": (n_q, n_embd),
            "attn_k": (n_kv, n_embd),
            "attn_v": (n_kv, n_embd),
            "attn_output": (n_embd, n_q),
            "ffn_gate_inp": (n_expert, n_embd),
            "ffn_gate_exps": (n_expert, n_ff_expert, n_embd),
            "ffn_up_exps": (n_expert, n_ff_expert, n_embd),
            "ffn_down_exps": (n_expert, n_embd, n_ff_expert),
        }
        for name, shape in matrices.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
            shapes[f"blk.{i}.{name}.bias"] = shape[:-1]
        shapes[f"blk.{i}.attn_sinks.weight"] = (n_head,)
        shapes[f"blk.{i}.attn_norm.weight"] = shapes[f"blk.{i}.post_attention_norm.weight"] = (n_embd,)
    return write_model(
        path,
        "gpt-oss",
        keys,
        shapes,
        tokenizer=tokenizer,
        seed=seed,
        **options,
    )


def _large_biases() -> dict[str, np.ndarray]:
    """Biases that make the first layers clamp their gates and ups."""
    random = np.random.RandomState(7)
    names = [f"blk.{i}.ffn_{name}_exps.bias" for i in range(2) for name in ("gate", "up")]
    return {name: 6 * random.standard_normal((8, 96)) for name in names}


PATTERN = "gpt-oss.attention.sliding_window_pattern"

GPTOSS: dict[str, dict[str, Any]] = {
    "gptoss_gqa": {},
    "gptoss_mqa": {"n_head_kv": 1},
    "gptoss_mha": {"n_head_kv": 4, "head_dim": 16},
    "gptoss_top_1": {"n_expert_used": 1},
    "gptoss_clamped": {"tensors": _large_biases()},
    "gptoss_no_yarn": {"metadata": {"gpt-oss.rope.scaling.type": None, "gpt-oss.rope.scaling.factor": None}},
    "gptoss_sliding_base": {"metadata": {"gpt-oss.rope.freq_base_swa": 1000.0}},
    "gptoss_period_3": {"metadata": {PATTERN: 3}},
    "gptoss_layers_named": {"metadata": {PATTERN: [False, True, True, False]}},
    "gptoss_mxfp4_f16": {"type": "F16", "expert_type": "MXFP4"},
    "gptoss_mxfp4_bf16": {"type": "BF16", "expert_type": "MXFP4"},
    "gptoss_mxfp4_q8_0": {"type": "Q8_0", "expert_type": "MXFP4"},
}
"""Options of `write_gptoss` by the variant's name."""

VARIANTS = {name: (write_gptoss, options, 1e-8) for name, options in GPTOSS.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""
