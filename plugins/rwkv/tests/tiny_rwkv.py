"""Tiny models of RWKV-7."""

from pathlib import Path
from typing import Any

from llamacli.testing.models import write_model
from llamacli.testing.vocabularies import vocabulary_size


def write_rwkv(
    path: str | Path,
    *,
    tokenizer: str = "test",
    n_layer: int = 3,
    n_embd: int = 128,
    head_dim: int = 64,
    n_ff: int = 96,
    decay_rank: int = 8,
    rate_rank: int = 12,
    value_rank: int = 4,
    gate_rank: int = 16,
    first_mix: bool = True,
    metadata: dict[str, Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a model; return its path.

    `first_mix`: the first layer has the tensors of the mix of values, which nothing reads. llama.cpp's sums over
    heads need widths that are multiples of 64. The rest is as in `write_model`.
    """
    n_vocab = vocabulary_size(tokenizer)
    keys: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.decay_lora_rank": decay_rank,
        "attention.iclr_lora_rank": rate_rank,
        "attention.value_residual_mix_lora_rank": value_rank,
        "attention.gate_lora_rank": gate_rank,
        "wkv.head_size": head_dim,
        "token_shift_count": 2,
    }
    norm, square = {"weight": (n_embd,), "bias": (n_embd,)}, (n_embd, n_embd)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd), "output.weight": (n_vocab, n_embd)}
    shapes |= {f"{name}.{kind}": norm[kind] for name in ("token_embd_norm", "output_norm") for kind in norm}
    for i in range(n_layer):
        ranks = {"w": decay_rank, "a": rate_rank} | ({"v": value_rank if i else rate_rank} if i or first_mix else {})
        block: dict[str, tuple[int, ...]] = {
            "time_mix_lerp_fused": (6, 1, 1, n_embd),
            **{f"time_mix_{letter}0": (n_embd,) for letter in ranks},
            **{f"time_mix_{letter}1": (rank, n_embd) for letter, rank in ranks.items()},
            **{f"time_mix_{letter}2": (n_embd, rank) for letter, rank in ranks.items()},
            "time_mix_g1": (gate_rank, n_embd),
            "time_mix_g2": (n_embd, gate_rank),
            **dict.fromkeys(("time_mix_k_k", "time_mix_k_a", "time_mix_r_k"), (n_embd,)),
            **dict.fromkeys((f"time_mix_{name}" for name in ("receptance", "key", "value", "output")), square),
            "channel_mix_lerp_k": (1, 1, n_embd),
            "channel_mix_key": (n_ff, n_embd),
            "channel_mix_value": (n_embd, n_ff),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
        norms = ("attn_norm", "attn_norm_2", "time_mix_ln")
        shapes |= {f"blk.{i}.{name}.{kind}": norm[kind] for name in norms for kind in norm}
    prefixed = {f"rwkv7.{key}": value for key, value in keys.items()}
    return write_model(path, "rwkv7", prefixed, shapes, tokenizer=tokenizer, seed="rwkv", metadata=metadata, **rest)


_RANKS = dict.fromkeys(("decay_rank", "rate_rank", "value_rank", "gate_rank"), 32)

RWKV: dict[str, dict[str, Any]] = {
    "rwkv7": {},
    "rwkv7_wide_heads": {"n_layer": 2, "n_embd": 256, "head_dim": 128},
    "rwkv7_q8_0": {"type": "Q8_0", **_RANKS},
    "rwkv7_q4_k": {"type": "Q4_K", "n_embd": 256, "head_dim": 64, "n_ff": 512, **dict.fromkeys(_RANKS, 256)},
}
"""Options of `write_rwkv` by the variant's name."""

VARIANTS = {name: (write_rwkv, options, 1e-8) for name, options in RWKV.items()}
"""Writer, options, and bound of the NMSE of fp32 mode against the peer, by name."""
