"""Hugging Face checkpoints of MiniCPM, Nanbeige, openPangu, Orion and other decoders."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from llamacli.plugin import INTERLEAVED, Checkpoint, Settings, field, head_dim, hookimpl, rope_of
from llamacli_llama import checkpoints as llama

LLAMACLI_API = 1


def _space_prefix(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    return {"tokenizer.ggml.add_space_prefix": tokenizer.get("add_prefix_space")}


def _tied_output(settings: Settings) -> tuple[str, ...]:
    return (r"^lm_head\.",) if settings.get("tie_word_embeddings") else ()


def _factors(n_rot: Callable[[Settings], int]) -> Callable[[Settings], dict[str, npt.NDArray[np.float32]]]:
    """Factors of frequencies in long and short contexts."""

    def extra(settings: Settings) -> dict[str, npt.NDArray[np.float32]]:
        factors = {name: rope_of(settings).get(f"{name}_factor") for name in ("long", "short")}
        if not any(factors.values()):
            return {}
        if wrong := [name for name, numbers in factors.items() if len(numbers or ()) != n_rot(settings) // 2]:
            raise ValueError(f"{wrong[0]}_factor is {factors[wrong[0]]}, expected {n_rot(settings) // 2} numbers")
        return {f"rope_factors_{name}.weight": np.array(numbers, np.float32) for name, numbers in factors.items()}

    return extra


def _query_width(settings: Settings) -> int:
    return int(settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"])


_WITHOUT_ROPE = {"rope.freq_base": None, "rope.scaling.type": None, "rope.scaling.factor": None}
_LATENT: dict[str, Any] = {
    "vocab_size": field("vocab_size"), "attention.kv_lora_rank": field("kv_lora_rank"),
    "attention.key_length": _query_width, "rope.dimension_count": field("qk_rope_head_dim"),
}  # fmt: skip

_LLAMA = attrs.evolve(llama.CHECKPOINTS[0], defaults=llama.DEFAULTS | {"head_dim": None})
"""Layout of relatives that transformers does not know."""

NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"} | {
    f"model.layers.{{}}.{name}": f"blk.{{}}.{target}"
    for name, target in {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.items()
}
"""Names of a decoder's tensors, for architectures that gguf lacks."""

CHECKPOINTS = (
    attrs.evolve(
        _LLAMA, classes=("Sarashina2VisionForCausalLM",), rename=((r"^llm\.", ""),), drop=(r"^norm\.",)
    ),
    attrs.evolve(
        _LLAMA, architecture="nanbeige", classes=("NanbeigeForCausalLM",), tensors=NAMES,
        keys=llama.KEYS | {
            "num_loops": lambda settings: max(int(settings.get("num_loops") or 1), 1),
            "skip_loop_final_norm": lambda settings: bool(settings.get("skip_loop_final_norm", False)),
        },
    ),
    Checkpoint(
        "minicpm", ("MiniCPMForCausalLM",),
        {
            "embedding_scale": field("scale_emb", kind=float),
            "residual_scale": lambda settings: settings["scale_depth"] / settings["num_hidden_layers"] ** 0.5,
            "logit_scale": lambda settings: settings["hidden_size"] / settings["dim_model_base"],
        },
        vocabulary=("sentencepiece",), convert=INTERLEAVED, extra=_factors(head_dim),
    ),
    Checkpoint(
        "minicpm3", ("MiniCPM3ForCausalLM",),
        _LATENT | _WITHOUT_ROPE | {"attention.value_length": None, "attention.q_lora_rank": field("q_lora_rank")},
        vocabulary=("sentencepiece",), extra=_factors(lambda settings: int(settings["qk_rope_head_dim"])),
    ),
    Checkpoint(
        "plm", ("PLMForCausalLM",), _LATENT | {"attention.value_length": field("v_head_dim")}, pre=("qwen2",)
    ),
    Checkpoint(
        "pangu-embedded", ("PanguEmbeddedForCausalLM",), llama.KEYS, {"head_dim": head_dim},
        vocabulary=("sentencepiece",), tokenizer=_space_prefix, drop=_tied_output,
    ),
    Checkpoint(
        "orion", ("OrionForCausalLM",),
        _WITHOUT_ROPE | {
            "tensor_data_layout": "Meta AI original pth",
            "context_length": field("max_sequence_length", "max_position_embeddings", "model_max_length"),
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": field("rms_norm_eps", kind=float),
        },
        {"num_key_value_heads": field("num_attention_heads")}, vocabulary=("sentencepiece",),
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
