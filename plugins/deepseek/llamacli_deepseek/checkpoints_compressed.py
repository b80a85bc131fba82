"""Hugging Face checkpoints of DeepSeek-V4, under the names of its authors."""

from collections.abc import Callable

from llamacli.plugin import Checkpoint, Settings, field, hookimpl
from llamacli_deepseek.checkpoints import PRE

LLAMACLI_API = 1

_BLOCK = {
    **{f"hc_{kind}_{part}": f"hc_{kind}_{part}" for kind in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.attn_sink": "attn_sinks", "attn.wq_a": "attn_q_a", "attn.wq_b": "attn_q_b", "attn.q_norm": "attn_q_a_norm",
    "attn.wkv": "attn_kv", "attn.kv_norm": "attn_kv_a_norm", "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b", "attn.indexer.wq_b": "indexer.attn_q_b", "attn.indexer.weights_proj": "indexer.proj",
    **{f"attn.{place}compressor.{name}": f"{target}_compressor_{part}"
       for place, target in (("", "attn"), ("indexer.", "indexer"))
       for name, part in (("ape", "ape"), ("wkv", "kv"), ("wgate", "gate"), ("norm", "norm"))},
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "ffn.gate": "ffn_gate_inp",
    "ffn.gate.selection": "exp_probs_b", "ffn.gate.selection_vl": "exp_probs_b_vl",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    **{f"ffn.{place}.w{i}": f"ffn_{target}_{end}" for place, end in (("experts", "exps"), ("shared_experts", "shexp"))
       for i, target in ((1, "gate"), (2, "down"), (3, "up"))},
}  # fmt: skip


def _limit(settings: Settings) -> list[float]:
    return [float(settings["swiglu_limit"])] * int(settings["num_hidden_layers"])


def _unread(settings: Settings) -> tuple[str, ...]:
    """Other modalities, prediction, and biases that tables of experts replace."""
    hashed = "|".join(str(i) for i in range(settings["num_hash_layers"]))
    return (r"^(aligner\.|image_|mtp\.)", *([rf"^layers\.({hashed})\.ffn\.gate\.bias$"] if hashed else []))


CHECKPOINTS = (
    Checkpoint(
        "deepseek4", ("DeepseekV4ForCausalLM",),
        {
            "rope.dimension_count": field("qk_rope_head_dim"), "attention.q_lora_rank": field("q_lora_rank"),
            "attention.sliding_window": field("sliding_window"),
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "expert_shared_count": field("n_shared_experts"),
            "expert_weights_scale": field("routed_scaling_factor", kind=float),
            "expert_weights_norm": field("norm_topk_prob", kind=bool),
            "swiglu_clamp_exp": _limit, "swiglu_clamp_shexp": _limit,
            **{f"attention.indexer.{name}": field(f"index_{source}") for name, source in (
                ("head_count", "n_heads"), ("key_length", "head_dim"), ("top_k", "topk"))},
            "attention.output_group_count": field("o_groups"), "attention.output_lora_rank": field("o_lora_rank"),
            "attention.compress_ratios": field("compress_ratios", kind=list),
            "attention.compress_rope_freq_base": field("compress_rope_theta", kind=float),
            "hyper_connection.count": field("hc_mult"),
            "hyper_connection.sinkhorn_iterations": field("hc_sinkhorn_iters"),
            "hyper_connection.epsilon": field("hc_eps", kind=float), "hash_layer_count": field("num_hash_layers"),
            "embedding_length_out": lambda settings: settings["hidden_size"] * settings["hc_mult"],
        },
        pre=PRE, drop=_unread,
        rename=(
            (r"(hc_\w+_(?:fn|base|scale)|\.attn_sink|\.ape|\.tid2eid)$", r"\1.weight"),
            (r"\.gate\.bias(_vl)?$", r".gate.selection\1.bias"),
        ),
        tensors={f"layers.{{}}.{name}": f"blk.{{}}.{target}" for name, target in _BLOCK.items()} | {
            "embed": "token_embd", "norm": "output_norm", "head": "output",
            **{f"hc_head_{part}": f"output_hc_{part}" for part in ("fn", "base", "scale")},
        },
        types={"BF16": "BF16", "F32": "F32", "F8_E4M3": "Q8_0", "F8_E5M2": "Q8_0", "I64": "I32", "I32": "I32"},
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
