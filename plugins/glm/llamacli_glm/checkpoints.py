"""Hugging Face checkpoints of ChatGLM, CogVLM, GLM-4 and its successors, Solar Open."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from llamacli.plugin import (
    Checkpoint,
    Conversion,
    ModelFormatError,
    Settings,
    field,
    head_dim,
    hookimpl,
    n_blocks,
    rope_of,
)

LLAMACLI_API = 1


def _rope_dims(settings: Settings) -> int:
    return int(head_dim(settings) * rope_of(settings).get("partial_rotary_factor", 0.5))


def _halves(array: Any, settings: Settings) -> Any:
    """Rows of heads for RoPE in sections, which rotates halves, not pairs."""
    if "mrope_section" not in rope_of(settings):
        return array
    n_rotated, heads = _rope_dims(settings), array.reshape(-1, head_dim(settings), *array.shape[1:])
    order = (slice(0, n_rotated, 2), slice(1, n_rotated, 2), slice(n_rotated, None))
    return np.concatenate([heads[:, rows] for rows in order], 1).reshape(array.shape)


def _special(**names: str) -> Callable[[str, Settings, Settings], dict[str, Any]]:
    """Keys of special tokens by their texts, unless the folder names others."""

    def keys(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
        ids = {added["content"]: int(number) for number, added in tokenizer.get("added_tokens_decoder", {}).items()}
        found = {}
        for name, text in names.items():
            if tokenizer.get(f"{name}_token") or isinstance(settings.get(f"{name}_token_id"), int):
                continue
            if text not in ids:
                raise ModelFormatError(f"tokenizer_config.json: added_tokens_decoder has no {text!r}, which GLM needs")
            found[f"tokenizer.ggml.{'unknown' if name == 'unk' else name}_token_id"] = ids[text]
        return found

    return keys


def _old_rope_dims(settings: Settings) -> int:
    width = settings.get("attention_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    return int(width * rope_of(settings).get("partial_rotary_factor", 0.5))


def _old_special(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    names = dict.fromkeys(("eos", "unk"), "<|endoftext|>") | {"eot": "<|user|>"}
    return _special(**names)(kind, tokenizer, settings) | {"tokenizer.ggml.add_bos_token": False}


_DENSE = dict.fromkeys(("eos", "unk", "bos"), "<|endoftext|>") | {"eot": "<|user|>"}
_MIXTURE = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}
_SOLAR = {"bos": "<|startoftext|>", "eos": "<|endoftext|>", "eot": "<|endoftext|>", "unk": "<unk>"}
_PRE = ("glm4", "chatglm-bpe")

_GLM4 = Checkpoint(
    "glm4", ("Glm4ForCausalLM",), {"rope.dimension_count": _rope_dims},
    {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "head_dim": 128,
     "rope_theta": 10000.0},
    pre=_PRE, tokenizer=_special(**_DENSE),
)  # fmt: skip
_GLM4V = attrs.evolve(
    _GLM4, classes=("Glm4vForConditionalGeneration",),
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "rope_theta": 10000.0},
    convert={f"attn_{name}.{kind}": Conversion(_halves) for name in "qk" for kind in ("weight", "bias")},
)  # fmt: skip
_GLM4_MOE = Checkpoint(
    "glm4moe", ("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"),
    {
        "rope.dimension_count": _rope_dims,
        "block_count": n_blocks,
        "nextn_predict_layers": lambda settings: settings.get("num_nextn_predict_layers"),
        "expert_feed_forward_length": lambda settings: settings["moe_intermediate_size"],
        "expert_shared_count": lambda settings: settings.get("n_shared_experts"),
        "leading_dense_block_count": lambda settings: settings.get("first_k_dense_replace"),
        "expert_gating_func": 2,
        "expert_weights_scale": lambda settings: float(settings["routed_scaling_factor"]),
        "expert_weights_norm": lambda settings: settings.get("norm_topk_prob"),
    },
    {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 10000.0,
     "routed_scaling_factor": 1.0},
    pre=_PRE, tokenizer=_special(**_MIXTURE),
)  # fmt: skip

CHECKPOINTS = (
    Checkpoint(
        "cogvlm", ("CogVLMForCausalLM",),
        {"vocab_size": lambda settings: settings["vocab_size"],
         "rope.dimension_count": lambda settings: settings["hidden_size"] // settings["num_attention_heads"]},
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}, ("sentencepiece", "bpe"), ("llama-bpe",),
    ),
    Checkpoint(
        "chatglm", ("ChatGLMModel", "ChatGLMForConditionalGeneration", "GlmForCausalLM"),
        {
            "context_length": lambda settings: settings.get("seq_length", settings["hidden_size"]),
            "feed_forward_length": field("ffn_hidden_size", "intermediate_size"),
            "attention.head_count_kv": field("multi_query_group_num", "num_key_value_heads", "num_attention_heads"),
            "attention.layer_norm_rms_epsilon": lambda settings: float(settings.get("layernorm_epsilon", 1e-5)),
            "attention.layer_norm_epsilon": None, "attention.key_length": None, "attention.value_length": None,
            "rope.dimension_count": _old_rope_dims,
            "rope.freq_base": lambda settings: float(10000 * settings.get("rope_ratio", 1)),
        },
        {"vocab_size": lambda settings: settings["padded_vocab_size"],
         "ffn_hidden_size": lambda settings: settings.get("intermediate_size", 4 * settings["hidden_size"])},
        pre=("chatglm-bpe", "glm4"), tokenizer=_old_special, drop=(r"\.rotary_pos_emb\.inv_freq$",),
        rename=((r"^transformer\.", ""),),
    ),
    _GLM4,
    _GLM4V,
    attrs.evolve(
        _GLM4V, classes=("GlmOcrForConditionalGeneration",),
        keys={**_GLM4.keys, "block_count": n_blocks, "nextn_predict_layers": field("num_nextn_predict_layers")},
        defaults={**_GLM4V.defaults, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    _GLM4_MOE,
    attrs.evolve(_GLM4_MOE, classes=("SolarOpenForCausalLM",), pre=("solar-open",), tokenizer=_special(**_SOLAR)),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
