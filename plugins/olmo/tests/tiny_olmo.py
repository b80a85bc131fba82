"""Tiny models of the OLMo family: olmo2, olmoe."""

from pathlib import Path
from typing import Any

from llamacli.plugin import INTERLEAVED
from llamacli.testing import HuggingFaceModel
from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_olmo(
    path: str | Path,
    *,
    architecture: str = "olmo2",
    tokenizer: str = "test",
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int | None = None,
    n_ff: int = 96,
    n_expert: int = 8,
    n_expert_used: int = 2,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model of one of the architectures; return its path."""
    n_vocab, n_kv = vocabulary_size(tokenizer), (n_head_kv or n_head) * n_embd // n_head
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv or n_head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 500000.0,
    }
    block: dict[str, tuple[int, ...]] = {
        "attn_q": (n_embd, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_q_norm": (n_embd,),
        "attn_k_norm": (n_kv,),
        "attn_output": (n_embd, n_embd),
    }
    if architecture == "olmoe":
        keys |= {"expert_count": n_expert, "expert_used_count": n_expert_used}
        block |= {"attn_norm": (n_embd,), "ffn_norm": (n_embd,), "ffn_gate_inp": (n_expert, n_embd)}
        block |= {"ffn_gate_exps": (n_expert, n_ff, n_embd), "ffn_up_exps": (n_expert, n_ff, n_embd)}
        block |= {"ffn_down_exps": (n_expert, n_embd, n_ff)}
    else:
        block |= {"post_attention_norm": (n_embd,), "post_ffw_norm": (n_embd,)}
        block |= {"ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, n_embd),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_vocab, n_embd),
    }
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(n_layer) for name, shape in block.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_model(
        path, architecture, prefixed, shapes, tokenizer=tokenizer, seed=architecture, metadata=metadata, **rest
    )


def _keys(**values: Any) -> dict[str, Any]:
    return {"metadata": {f"olmo2.{key.replace('__', '.')}": value for key, value in values.items()}}


_YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__attn_factor": 1.2,
    "rope__scaling__original_context_length": 32,
}
_SLIDING = {"n_layer": 5, "n_head_kv": 2}
_MOE = {"architecture": "olmoe"}

OLMO: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "olmo2_gqa": {"n_head_kv": 2},
    "olmo2_mqa": {"n_head_kv": 1},
    "olmo2_yarn": _keys(**_YARN),
    "olmo2_sliding": _SLIDING | _keys(attention__sliding_window=8, **_YARN),
    "olmo2_period": _SLIDING | _keys(attention__sliding_window=8, attention__sliding_window_pattern=2),
    "olmo2_pattern": _SLIDING | _keys(
        attention__sliding_window=8, attention__sliding_window_pattern=[True, False, False, True, True], **_YARN
    ),
    "olmo2_q8_0": {"type": "Q8_0"},
    "olmo2_q4_k": {"n_embd": 256, "n_head_kv": 2, "n_ff": 512, "type": "Q4_K"},
    "olmoe": _MOE,
    "olmoe_top4": _MOE | {"n_expert": 12, "n_expert_used": 4},
    "olmoe_q8_0": _MOE | {"type": "Q8_0"},
    "olmoe_q4_k": _MOE | {"n_embd": 256, "n_ff": 512, "type": "Q4_K"},
}  # fmt: skip
"""Options of `write_olmo` by the variant's name."""

VARIANTS = {name: (write_olmo, options, 1e-8) for name, options in OLMO.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""

TRANSFORMERS = {
    "olmo": [HuggingFaceModel("olmo", keys={"attention.layer_norm_epsilon": 1e-5}, convert=INTERLEAVED)],
    "olmoe": [HuggingFaceModel("olmoe")],
    "olmo2": [HuggingFaceModel("olmo2")],
}
"""Models of transformers by architecture."""
