"""Hugging Face checkpoints of DeepSeek-V2, V3, V3.1, R1 and GLM-4.7-Flash."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Conversion, Settings, hookimpl, rope_of

LLAMACLI_API = 1

Shape = tuple[int, ...]


def _heads(shape: Shape, settings: Settings) -> tuple[int, int, int, int]:
    """Heads, sizes of a key and a value, and rank of `kv_b_proj`."""
    n_head, n_key, n_value = (settings[name] for name in ("num_key_value_heads", "qk_nope_head_dim", "v_head_dim"))
    if len(shape) != 2 or shape[0] != n_head * (n_key + n_value):
        raise ValueError(f"shape {shape}, expected {n_head} heads of {n_key} + {n_value} rows")
    return n_head, n_key, n_value, shape[1]


def _keys_shape(shape: Shape, settings: Settings) -> Shape:
    n_head, n_key, _, rank = _heads(shape, settings)
    return n_head, rank, n_key


def _values_shape(shape: Shape, settings: Settings) -> Shape:
    n_head, _, n_value, rank = _heads(shape, settings)
    return n_head, n_value, rank


def _of_heads(array: Any, settings: Settings) -> tuple[Any, int]:
    n_head, n_key, n_value, rank = _heads(array.shape, settings)
    return array.reshape(n_head, n_key + n_value, rank), n_key


def _keys(array: Any, settings: Settings) -> Any:
    heads, n_key = _of_heads(array, settings)
    return heads[:, :n_key].swapaxes(1, 2)


def _values(array: Any, settings: Settings) -> Any:
    heads, n_key = _of_heads(array, settings)
    return heads[:, n_key:]


def _left_out(settings: Settings) -> tuple[str, ...]:
    """Blocks for multi-token prediction, and a tied output."""
    n_layer, n_more = settings["num_hidden_layers"], settings.get("num_nextn_predict_layers") or 0
    blocks = tuple(rf"^model\.layers\.{i}\." for i in range(n_layer, n_layer + n_more))
    return blocks + ((r"lm_head\.weight$",) if settings.get("tie_word_embeddings") else ())


def _dense(settings: Settings) -> int:
    n_dense = settings.get("first_k_dense_replace")
    if n_dense is None:
        return 0 if settings.get("n_routed_experts") is not None else int(settings["num_hidden_layers"])
    return int(n_dense)


def _scale(settings: Settings) -> float | None:
    scale = settings.get("routed_scaling_factor")
    return None if scale is None else float(scale)


def _log_multiplier(settings: Settings) -> float | None:
    multiplier = rope_of(settings).get("mscale_all_dim")
    return None if multiplier is None else 0.1 * multiplier


def _glm_tokens(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Special tokens that folders of GLM name by their texts only."""
    ids = {added["content"]: int(number) for number, added in tokenizer.get("added_tokens_decoder", {}).items()}
    texts = {"bos": "[gMASK]", "eot": "<|user|>", "unknown": "<|endoftext|>", "eom": "<|observation|>"}
    return {f"tokenizer.ggml.{name}_token_id": ids[text] for name, text in texts.items() if text in ids}


CHECKPOINTS = tuple(
    Checkpoint(
        "deepseek2", classes,
        {
            "vocab_size": lambda settings: settings["vocab_size"],
            "leading_dense_block_count": _dense,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": lambda settings: settings.get("q_lora_rank"),
            "attention.kv_lora_rank": lambda settings: settings["kv_lora_rank"],
            "attention.key_length": lambda settings: settings["kv_lora_rank"] + settings["qk_rope_head_dim"],
            "attention.value_length": lambda settings: settings["kv_lora_rank"],
            "attention.key_length_mla": lambda settings: settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"],
            "attention.value_length_mla": lambda settings: settings["v_head_dim"],
            "expert_feed_forward_length": lambda settings: settings["moe_intermediate_size"],
            "expert_shared_count": lambda settings: settings.get("n_shared_experts") or 0,
            "expert_weights_scale": _scale,
            "expert_weights_norm": lambda settings: settings.get("norm_topk_prob") or None,
            "rope.dimension_count": lambda settings: settings["qk_rope_head_dim"],
            "rope.scaling.yarn_log_multiplier": _log_multiplier,
        },
        {"rms_norm_eps": 1e-6, "kv_lora_rank": 512, "rope_theta": 10000.0, "max_position_embeddings": 2048,
         "num_key_value_heads": lambda settings: settings["num_attention_heads"],
         "moe_intermediate_size": lambda settings: settings["intermediate_size"]},
        pre=pre, tokenizer=tokenizer, drop=_left_out,
        whole={"kv_b_proj": ("k_b_proj", "v_b_proj")},
        convert={
            "attn_k_b.weight": Conversion(_keys, _keys_shape), "attn_v_b.weight": Conversion(_values, _values_shape),
        },
    )
    for classes, pre, tokenizer in (
        (("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"), ("deepseek-v3", "deepseek-llm"), lambda *given: {}),
        (("Glm4MoeLiteForCausalLM",), ("glm4", "chatglm-bpe"), _glm_tokens),
    )
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
