"""Configurations of checkpoints whose tensors transformers names.

`tests/goldens/checkpoint_shapes.json` has names and shapes of them, recorded by `python -m oracle.checkpoint_shapes`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parents[1] / "goldens" / "checkpoint_shapes.json"
_GPT: dict[str, Any] = {
    "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_ctx": 512, "vocab_size": 320,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": 320,
    "tie_word_embeddings": False,
}  # fmt: skip


def _predicting(kind: str, model_type: str, config: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Model of gated delta nets with a head for multi-token prediction."""
    at = "mtp.layers.{0}.mlp."
    networks = {at: 96}
    if "experts" in str(config):
        networks = {f"{at}experts.{{0,1,2,3}}.": 32, f"{at}shared_expert.": 48}
    more = {f"{name}{{gate,up}}_proj.weight": [n_ff, 64] for name, n_ff in networks.items()}
    more |= {f"{name}down_proj.weight": [64, n_ff] for name, n_ff in networks.items()}
    if len(networks) > 1:
        more |= {f"{at}gate.weight": [4, 64], f"{at}shared_expert_gate.weight": [1, 64]}
    options |= {"differs": (r"\.ssm_a$",), "more": _MTP | more}
    return _model(kind, model_type, config, **options)


def _model(
    kind: str,
    model_type: str,
    config: Mapping[str, Any],
    *,
    tokenizer: str = "qwen2",
    sizes: Mapping[str, Any] = _SIZES,
    **options: Any,
) -> dict[str, Any]:
    """Model of a class and its config.json.

    Options: `pre`, another name of the pre-tokenizer; `differs`, patterns of keys and tensors that differ from
    llama.cpp's; `peer` False where its converter ends in an error; `exact`, the bound of the NMSE against
    transformers, larger where that computes GELU by erf; `transformers` False where the number of layers, 64 in the
    files that llama.cpp knows, decides about norms or RoPE, of encoders, which have no logits, of Gemma 3n and
    Apertus;
    `more` shapes of tensors that transformers does not save;
    `pooling` a mode of sentence-transformers.
    """
    return {
        "architectures": [kind], "model_type": model_type, "config": {**sizes, **config}, "tokenizer": tokenizer,
        **options,
    }  # fmt: skip


_GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "num_experts_per_tok": 2, "shared_intermediate_size": 48,
}  # fmt: skip
_GRANITE_HYBRID: dict[str, Any] = {
    "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_d_head": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32, "position_embedding_type": "nope",
}  # fmt: skip
_BERT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "layer_norm_eps": 1e-12, "vocab_size": 96, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip
_DISTIL: dict[str, Any] = {
    "dim": 64, "hidden_dim": 96, "n_heads": 4, "n_layers": 2, "max_position_embeddings": 128, "vocab_size": 96,
    "pad_token_id": 0,
}  # fmt: skip
_ROBERTA: dict[str, Any] = _BERT | {
    "max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1, "vocab_size": 320, "layer_norm_eps": 1e-5,
}  # fmt: skip
_MODERN: dict[str, Any] = {
    "num_key_value_heads": 4, "num_hidden_layers": 4, "local_attention": 64, "global_attn_every_n_layers": 3,
    "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "pad_token_id": 0,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 40,
    "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-6, "decoder_start_token_id": 0, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "head_dim": 32, "global_head_dim": 64, "num_hidden_layers": 4, "sliding_window": 64, "vocab_size": 296,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "head_dim": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
_MTP: dict[str, Any] = {
        "mtp.fc.weight": [64, 128], "mtp.norm.weight": [64], "mtp.pre_fc_norm_{embedding,hidden}.weight": [64],
        "mtp.layers.{0}.{input,post_attention}_layernorm.weight": [64],
        "mtp.layers.{0}.self_attn.q_proj.weight": [256, 64], "mtp.layers.{0}.self_attn.{k,v}_proj.weight": [64, 64],
        "mtp.layers.{0}.self_attn.o_proj.weight": [64, 128], "mtp.layers.{0}.self_attn.{q,k}_norm.weight": [32],
}  # fmt: skip
"""Tensors of a head for multi-token prediction, without its network."""

MODELS: dict[str, dict[str, Any]] = {
    "glm": _model(
        "GlmForCausalLM", "glm", {"head_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 1e4, "pad_token_id": 0},
        tokenizer="glm",
    ),
    "gpt2": _model("GPT2LMHeadModel", "gpt2", {}, tokenizer="gpt2", sizes=_GPT),
    "gptneox": _model(
        "GPTNeoXForCausalLM", "gpt_neox",
        {"num_key_value_heads": 4, "rotary_pct": 0.5, "layer_norm_eps": 1e-5, "use_parallel_residual": False},
        tokenizer="gpt2", peer=False, exact=1e-6,
    ),
    "bloom": _model(
        "BloomForCausalLM", "bloom",
        {"hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 320, "layer_norm_epsilon": 1e-5,
         "seq_length": 512},
        tokenizer="gpt2", sizes={},
    ),
    "falcon": _model(
        "FalconForCausalLM", "falcon",
        {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320, "num_kv_heads": 2,
         "layer_norm_epsilon": 1e-5, "new_decoder_architecture": True, "bias": False},
        tokenizer="gpt2", sizes={}, exact=1e-6,
    ),
    "falcon_7b": _model(
        "FalconForCausalLM", "falcon",
        {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320, "multi_query": True,
         "layer_norm_epsilon": 1e-5, "new_decoder_architecture": False, "bias": False, "parallel_attn": True},
        tokenizer="gpt2", sizes={}, peer=False, exact=1e-6,
    ),
    "starcoder": _model("GPTBigCodeForCausalLM", "gpt_bigcode", {"multi_query": True}, tokenizer="gpt2", sizes=_GPT),
    "starcoder2": _model(
        "Starcoder2ForCausalLM", "starcoder2", {"norm_epsilon": 1e-5, "rope_theta": 1e5, "use_bias": True},
        tokenizer="gpt2",
    ),
    "stablelm": _model(
        "StableLmForCausalLM", "stablelm",
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "rope_theta": 1e4, "use_parallel_residual": False,
         "use_qkv_bias": True},
        tokenizer="gpt2",
    ),
    "stablelm2_12b": _model(
        "StableLmForCausalLM", "stablelm",
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "rope_theta": 1e4, "use_parallel_residual": True,
         "qk_layernorm": True},
        tokenizer="gpt2", peer=False,
    ),
    "mpt": _model(
        "MPTForCausalLM", "mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 4, "max_seq_len": 512, "vocab_size": 320,
         "attn_config": {"clip_qkv": 6.0, "alibi": True, "alibi_bias_max": 8}},
        tokenizer="gpt2", sizes={}, pre="mpt", differs=("general.file_type",), exact=1e-6,
    ),
    "olmo": _model("OlmoForCausalLM", "olmo", {"clip_qkv": 8.0, "rope_theta": 1e4}, tokenizer="gpt2", pre="olmo"),
    "cohere": _model(
        "CohereForCausalLM", "cohere",
        {"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "rope_theta": 8e6, "use_qk_norm": False,
         "model_max_length": 1024, "tie_word_embeddings": True},
        tokenizer="gpt2",
    ),
    "cohere_plus": _model(
        "CohereForCausalLM", "cohere",
        {"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "rope_theta": 8e6, "use_qk_norm": True,
         "tie_word_embeddings": True},
        tokenizer="gpt2", transformers=False,
    ),
    "exaone4": _model(
        "Exaone4ForCausalLM", "exaone4",
        {"head_dim": 16, "rope_theta": 5e5, "sliding_window": 64, "sliding_window_pattern": "LLLG",
         "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
         "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64}},
        tokenizer="gpt2", pre="exaone4", transformers=False,
    ),
    "lfm2": _model(
        "Lfm2ForCausalLM", "lfm2",
        {"norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "layer_types": ["conv", "full_attention"],
         "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 32, "rope_theta": 1e6,
         "intermediate_size": 120, "block_ff_dim": 120, "tie_word_embeddings": True},
        tokenizer="llama3", pre="lfm2",
    ),
    "lfm2_embedding": _model(
        "Lfm2Model", "lfm2",
        {"norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "layer_types": ["conv", "full_attention"],
         "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 32, "rope_theta": 1e6,
         "intermediate_size": 120, "block_ff_dim": 120},
        tokenizer="llama3", pre="lfm2", pooling="cls_token", transformers=False,
    ),
    "lfm2moe": _model(
        "Lfm2MoeForCausalLM", "lfm2_moe",
        {"norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "layer_types": ["conv", "full_attention", "conv"],
         "num_hidden_layers": 3, "rope_theta": 1e6, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0,
         "tie_word_embeddings": True},
        tokenizer="llama3", pre="lfm2",
    ),
    "nemotron": _model(
        "NemotronForCausalLM", "nemotron",
        {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "relu2", "head_dim": 16},
        tokenizer="sentencepiece",
    ),
    "hunyuan_dense": _model(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        {"head_dim": 32, "rope_theta": 1e4, "tie_word_embeddings": True, "max_position_embeddings": 32768,
         "eod_token_id": 265,
         "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}},
         pre="hunyuan",
    ),
    "apertus": _model(
        "ApertusForCausalLM", "apertus",
        {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
                                                     "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                     "original_max_position_embeddings": 64}},
        transformers=False,
    ),
    "minimax_m2": _model(
        "MiniMaxM2ForCausalLM", "minimax_m2",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 5e6,
         "scoring_func": "sigmoid"},
    ),
    "ernie_moe": _model(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe",
        {"head_dim": 32, "intermediate_size": 128, "rope_theta": 5e5, "moe_num_experts": 4, "moe_k": 2,
         "moe_layer_interval": 1,
         "moe_layer_start_index": 1, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
        tokenizer="sentencepiece",
    ),
    "dots1": _model(
        "Dots1ForCausalLM", "dots1",
        {"head_dim": 32, "rope_theta": 1e7, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "moe_intermediate_size": 32, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
         "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid"},
    ),
    "granitemoe": _model(
        "GraniteMoeForCausalLM", "granitemoe",
        {"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
         "logits_scaling": 8.0, "rope_theta": 1e4, "num_local_experts": 4, "num_experts_per_tok": 2},
        tokenizer="gpt2",
    ),
    "granitemoe_shared": _model(
        "GraniteMoeSharedForCausalLM", "granitemoeshared",
        {"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
         "logits_scaling": 8.0, "rope_theta": 1e4, "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 48},
        tokenizer="gpt2",
    ),
    "ministral3": _model(
        "Ministral3ForCausalLM", "ministral3",
        {"head_dim": 16,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "original_max_position_embeddings": 128, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        tokenizer="llama3",
    ),
    "glm47flash": _model(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite",
        {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
         "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
         "n_group": 1, "topk_group": 1, "rope_theta": 1e6, "scoring_func": "sigmoid"},
        tokenizer="glm",
    ),
    "mamba": _model(
        "MambaForCausalLM", "mamba",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320, "state_size": 16, "conv_kernel": 4, "expand": 2,
         "time_step_rank": 4, "layer_norm_epsilon": 1e-5, "intermediate_size": 128, "tie_word_embeddings": True},
        tokenizer="gpt2", sizes={}, pre="olmo", differs=(r"\.ssm_a$",),
    ),
    "mamba2": _model(
        "Mamba2ForCausalLM", "mamba2",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320, "state_size": 16, "conv_kernel": 4, "expand": 2,
         "head_dim": 16, "num_heads": 8, "n_groups": 2, "layer_norm_epsilon": 1e-5, "chunk_size": 32,
         "tie_word_embeddings": True},
        tokenizer="gpt2", sizes={}, pre="olmo", differs=(r"\.ssm_a$",),
    ),
    **{
        name: _predicting(kind, model_type, config)
        for name, kind, model_type, config in (
            ("qwen3next", "Qwen3NextForCausalLM", "qwen3_next", _DELTA | _QWEN_EXPERTS),
            ("qwen35", "Qwen3_5ForCausalLM", "qwen3_5_text", _DELTA | {"mtp_num_hidden_layers": 1}),
            ("qwen35moe", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text",
             _DELTA | _QWEN_EXPERTS | {"mtp_num_hidden_layers": 1}),
        )
    },
    "qwen35_vl": _predicting(
        "Qwen3_5ForConditionalGeneration", "qwen3_5",
        {"text_config": _SIZES | _DELTA | {"mtp_num_hidden_layers": 1}, "vision_config": _VISION},
        sizes={},
    ),
    "qwen35moe_vl": _predicting(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
        {"text_config": _SIZES | _DELTA | _QWEN_EXPERTS | {"mtp_num_hidden_layers": 1}, "vision_config": _VISION},
        sizes={},
    ),
    "qwen2vl": _model(
        "Qwen2VLForConditionalGeneration", "qwen2_vl",
        {"text_config": _SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                                      "mrope_section": [2, 3, 3]}},
         "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}},
        sizes={},
    ),
    "mellum": _model(
        "MellumForCausalLM", "mellum",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 64,
         "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "beta_fast": 32.0,
                                "beta_slow": 1.0, "original_max_position_embeddings": 128},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    ),
    "qwen25vl": _model(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl",
        {"text_config": _SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                                      "mrope_section": [2, 3, 3]}},
         "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64,
                           "out_hidden_size": 64}},
        sizes={},
    ),
    "qwen3vl": _model(
        "Qwen3VLForConditionalGeneration", "qwen3_vl",
        {"text_config": _SIZES | {"head_dim": 32, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
         "vision_config": _VISION | {"deepstack_visual_indexes": [0]}},
        sizes={},
    ),
    "qwen3vlmoe": _model(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe",
        {"text_config": _SIZES | {
            "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5],
                                "mrope_interleaved": True}},
         "vision_config": _VISION | {"deepstack_visual_indexes": [0]}},
        sizes={},
        more={"model.language_model.layers.{0,1}.mlp.experts.gate_up_proj": [4, 64, 96],
              "model.language_model.layers.{0,1}.mlp.experts.down_proj": [4, 48, 64]},
    ),
    "falcon_mamba": _model(
        "FalconMambaForCausalLM", "falcon_mamba",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320, "state_size": 16, "conv_kernel": 4, "expand": 2,
         "time_step_rank": 4, "layer_norm_epsilon": 1e-5, "mixer_rms_eps": 1e-5,
         "intermediate_size": 128, "tie_word_embeddings": False},
        tokenizer="gpt2", sizes={}, pre="olmo", differs=(r"\.ssm_a$",),
    ),
    "falcon_h1": _model(
        "FalconH1ForCausalLM", "falcon_h1",
        {"head_dim": 32, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2,
         "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "rope_theta": 1e6, "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0,
         "mlp_multipliers": [0.75, 0.3], "key_multiplier": 0.4, "attention_out_multiplier": 0.9,
         "attention_in_multiplier": 1.1, "ssm_multipliers": [0.35, 0.25, 0.5, 0.7, 0.6], "ssm_in_multiplier": 1.2,
         "ssm_out_multiplier": 0.8},
        tokenizer="gpt2", differs=(r"\.ssm_a$",),
    ),
    "jamba": _model(
        "JambaForCausalLM", "jamba",
        {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "num_experts": 4,
         "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2,
         "attn_layer_offset": 1, "use_mamba_kernels": False},
        tokenizer="sentencepiece", differs=(r"\.ssm_a$",),
    ),
    "granite_hybrid": _model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", _GRANITE | _GRANITE_HYBRID | {"num_local_experts": 4},
        tokenizer="gpt2", differs=(r"\.ssm_a$",),
    ),
    "granite_hybrid_dense": _model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid",
        _GRANITE | _GRANITE_HYBRID | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96},
        tokenizer="gpt2", differs=(r"\.ssm_a$",),
    ),
    "granite_attention": _model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid",
        _GRANITE | _GRANITE_HYBRID
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96, "rope_theta": 1e4,
           "layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
        tokenizer="gpt2",
    ),
    "granite_attention_moe": _model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid",
        _GRANITE | _GRANITE_HYBRID | {"num_local_experts": 4, "rope_theta": 1e4,
                                      "layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
        tokenizer="gpt2",
    ),
    "mistral3": _model(
        "Mistral3ForConditionalGeneration", "mistral3",
        {"text_config": _SIZES | {"model_type": "mistral", "head_dim": 32, "rope_theta": 1e8},
         "vision_config": {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1, "image_size": 28,
                           "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 14}},
        tokenizer="llama3", sizes={},
    ),
    "llama4": _model(
        "Llama4ForCausalLM", "llama4_text",
        {"head_dim": 16, "rope_theta": 5e5, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32,
         "intermediate_size_mlp": 96, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64}},
        tokenizer="gpt4o", pre="llama4",
    ),
    "muse_glimmer": _model(
        "MuseGlimmerForConditionalGeneration", "muse_glimmer",
        {"text_config": _SIZES | {"model_type": "muse_glimmer_text", "head_dim": 32, "num_hidden_layers": 4,
                                  "rope_theta": 5e5, "sliding_window": 64, "qk_scale_factor": 2.5,
                                  "output_multiplier": 0.5},
         "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "intermediate_size": 64, "patch_size": 14}},
        tokenizer="llama3", sizes={},
    ),
    "nemotron_3": _model(
        "NemotronHForCausalLM", "nemotron_h",
        {"head_dim": 32, "hybrid_override_pattern": "ME*E", "num_hidden_layers": 4, "ssm_state_size": 16,
         "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 32,
         "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32,
         "moe_shared_expert_intermediate_size": 48, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5,
         "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "layer_norm_epsilon": 1e-5,
         "use_mamba_kernels": False},
        tokenizer="llama3_merged", differs=(r"\.ssm_a$",),
    ),
    "nemotron_h": _model(
        "NemotronHForCausalLM", "nemotron_h",
        {"head_dim": 32, "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4, "ssm_state_size": 16,
         "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 32,
         "layer_norm_epsilon": 1e-5, "use_mamba_kernels": False},
        tokenizer="llama3_merged", peer=False,
    ),
    "gemma3n": _model(
        "Gemma3nForCausalLM", "gemma3n_text",
        {"head_dim": 32, "num_hidden_layers": 4, "intermediate_size": [96] * 4, "sliding_window": 64,
         "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 64,
         "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 312, "altup_num_inputs": 4,
         "altup_active_idx": 0, "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0], "final_logit_softcapping": 30.0,
         "altup_correct_scale": True, "tie_word_embeddings": True,
         "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        tokenizer="sentencepiece", transformers=False,
    ),
    "gemma_embedding": _model(
        "Gemma3TextModel", "gemma3_text",
        {"head_dim": 32, "sliding_window": 64, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
         "query_pre_attn_scalar": 32, "num_hidden_layers": 3, "use_bidirectional_attention": True,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        tokenizer="sentencepiece", pooling="mean_tokens", transformers=False,
    ),
    "gemma4": _model(
        "Gemma4ForCausalLM", "gemma4_text",
        _GEMMA4 | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 296,
                   "use_double_wide_mlp": True, "num_global_key_value_heads": None},
        tokenizer="ranked", pre="",
    ),
    "gemma4_moe": _model(
        "Gemma4ForCausalLM", "gemma4_text",
        _GEMMA4 | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                   "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                   "moe_intermediate_size": 32},
        tokenizer="ranked", pre="",
    ),
    "gemma4_unified": _model(
        "Gemma4UnifiedForConditionalGeneration", "gemma4_unified",
        {"text_config": _SIZES | _GEMMA4 | {"num_kv_shared_layers": 0, "num_global_key_value_heads": None,
                                            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
                                            "moe_intermediate_size": None}},
        sizes={},
        tokenizer="ranked", pre="", generation={"suppress_tokens": [3, 4]},
    ),
    "gemma4_assistant": _model(
        "Gemma4AssistantForCausalLM", "gemma4_assistant",
        {"backbone_hidden_size": 96, "use_ordered_embeddings": False,
         "text_config": _SIZES | _GEMMA4 | {"num_kv_shared_layers": 4, "num_global_key_value_heads": None,
                                            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
                                            "final_logit_softcapping": None}},
        sizes={}, tokenizer="ranked", pre="", transformers=False,
    ),
    "bert": _model(
        "BertModel", "bert", _BERT, tokenizer="wordpiece", sizes={}, pooling="mean_tokens", transformers=False
    ),
    "bert_masked": _model(
        "BertForMaskedLM", "bert", _BERT, tokenizer="wordpiece", sizes={}, pooling="cls_token", transformers=False
    ),
    "bert_classifier": _model(
        "BertForSequenceClassification", "bert", _BERT | {"id2label": {"0": "no", "1": "maybe", "2": "yes"}},
        tokenizer="wordpiece", sizes={}, transformers=False,
    ),
    "distilbert": _model(
        "DistilBertForMaskedLM", "distilbert", _DISTIL, tokenizer="wordpiece", sizes={}, pooling="mean_tokens",
        transformers=False,
    ),
    "distilbert_classifier": _model(
        "DistilBertForSequenceClassification", "distilbert",
        _DISTIL | {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, tokenizer="wordpiece", sizes={},
        transformers=False,
    ),
    "eurobert": _model(
        "EuroBertModel", "eurobert", {"rope_theta": 250000.0, "pad_token_id": 263, "classifier_pooling": "mean"},
        tokenizer="llama3", pooling="mean_tokens", transformers=False,
    ),
    "xlm_roberta": _model(
        "XLMRobertaModel", "xlm-roberta", _ROBERTA | {"vocab_size": 40}, tokenizer="xlm_roberta", sizes={},
        pooling="cls_token", transformers=False,
    ),
    "xlm_roberta_classifier": _model(
        "XLMRobertaForSequenceClassification", "xlm-roberta",
        _ROBERTA | {"vocab_size": 40, "id2label": {"0": "LABEL_0"}},
        tokenizer="xlm_roberta_spm", sizes={}, transformers=False,
    ),
    "roberta": _model(
        "RobertaModel", "roberta", _ROBERTA, tokenizer="roberta", sizes={}, pooling="mean_tokens", transformers=False
    ),
    "roberta_classifier": _model(
        "RobertaForSequenceClassification", "roberta", _ROBERTA | {"id2label": {"0": "no", "1": "maybe", "2": "yes"}},
        tokenizer="roberta", sizes={}, transformers=False,
    ),
    "modernbert": _model(
        "ModernBertModel", "modernbert", _MODERN, tokenizer="roberta", pooling="cls_token", transformers=False
    ),
    "modernbert_classifier": _model(
        "ModernBertForSequenceClassification", "modernbert",
        _MODERN | {"id2label": {"0": "relevance"}, "classifier_pooling": "mean", "hidden_activation": "silu"},
        tokenizer="roberta", transformers=False,
    ),
    "t5": _model(
        "T5ForConditionalGeneration", "t5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        tokenizer="unigram", sizes={}, transformers=False, more={"lm_head.weight": [40, 64]},
    ),
    "t5_tied": _model(
        "T5ForConditionalGeneration", "t5", _T5 | {"n_positions": 128}, tokenizer="unigram", sizes={},
        transformers=False,
    ),
    "umt5": _model(
        "UMT5ForConditionalGeneration", "umt5",
        _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, tokenizer="unigram", sizes={},
        transformers=False, more={"lm_head.weight": [40, 64]},
    ),
    "t5encoder": _model("T5EncoderModel", "t5", _T5, tokenizer="unigram", sizes={}, transformers=False),
    "laguna": _model(
        "LagunaForCausalLM", "laguna",
        {"head_dim": 32, "num_attention_heads_per_layer": [4, 6, 4], "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "sliding_window": 64,
         "num_hidden_layers": 3, "moe_routed_scaling_factor": 2.5, "bos_token_id": 263, "eos_token_id": [263, 265],
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "beta_fast": 32.0,
                                "beta_slow": 1.0, "original_max_position_embeddings": 128,
                                "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
        tokenizer="laguna", jinja=True,
    ),
    "afmoe": _model(
        "AfmoeForCausalLM", "afmoe",
        {"head_dim": 16, "rope_theta": 1e4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 64, "num_hidden_layers": 4,
         "global_attn_every_n_layers": 4, "score_func": "sigmoid", "route_scale": 2.0, "route_norm": True,
         "mup_enabled": True},
        tokenizer="llama3",
    ),
}  # fmt: skip
"""Checkpoints by name: class, model type, config.json and kind of tokenizer."""


def compact(shapes: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Shapes by names with `{0,1}` for numbers whose tensors share it."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[str, ...]]] = {}
    for name, shape in shapes.items():
        numbers = tuple(re.findall(r"(?<=\.)\d+(?=\.)", name))
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "{}", name), tuple(shape)), []).append(numbers)
    found: dict[str, list[int]] = {}
    for (pattern, shape), members in groups.items():
        sets = [sorted(set(column), key=int) for column in zip(*members, strict=True)]
        whole = len(members) == len(list(itertools.product(*sets)))
        for numbers in [sets] if whole else [[[number] for number in member] for member in members]:
            name = pattern
            for column in numbers:
                name = name.replace("{}", "{" + ",".join(column) + "}", 1)
            found[name] = list(shape)
    return found


def expanded(shapes: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """Shapes by the names of single tensors, of those of `compact`."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        columns = [text.split(",") for text in re.findall(r"\{(.*?)\}", name)]
        for numbers in itertools.product(*columns):
            parts = iter(numbers)
            found[re.sub(r"\{.*?\}", lambda _, parts=parts: next(parts), name)] = tuple(shape)
    return found


def cases() -> dict[str, dict[str, Any]]:
    """Cases of `MODELS` with the recorded shapes."""
    recorded = json.loads(SHAPES.read_text())
    return {
        name: {**case, "shapes": expanded(recorded[name]) | expanded(case.get("more", {}))}
        for name, case in MODELS.items()
        if name in recorded
    }
