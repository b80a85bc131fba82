"""Hugging Face checkpoints of Llama 4, Maple, Grok, Arctic and Laguna."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import (
    INTERLEAVED,
    TRANSPOSED,
    Checkpoint,
    Conversion,
    Settings,
    TokenKind,
    field,
    head_dim,
    hookimpl,
    rope_of,
    wavelength_factors,
)
from llamacli_llama import checkpoints as llama

LLAMACLI_API = 1

Shape = tuple[int, ...]


# --- Llama 4 ---


def _half(part: int) -> Conversion:
    """Gates or up matrices of experts, which lie side by side."""

    def shape(shape: Shape, settings: Settings) -> Shape:
        return *shape[:-2], shape[-1] // 2, shape[-2]

    def apply(array: Any, settings: Settings) -> Any:
        n_ff = array.shape[-1] // 2
        return array[..., part * n_ff : (part + 1) * n_ff].swapaxes(-1, -2)

    return Conversion(apply, shape)


def _without_chunks(settings: Settings) -> int | None:
    """0 where all layers attend to everything, else None."""
    kinds = settings.get("layer_types")
    return 0 if kinds and set(kinds) == {"full_attention"} else None


# --- Maple ---

_MAPLE = {"hidden_act": "silu", "num_shared_experts": 0, "norm_topk_prob": True, "nope_on_global_attention": True}
_MAPLE_CLAMP = 7.0


def _maple_vocabulary(settings: Settings) -> int:
    """Tokens of the vocabulary; ValueError for what Maple does not have."""
    for name, value in _MAPLE.items():
        if settings[name] != value:
            raise ValueError(f"{name} is {settings[name]!r}, expected {value!r}")
    return int(settings["vocab_size"])


# --- Grok ---


def _scaled(name: str, kind: Callable[[Any], Any] = float) -> Callable[[Settings], Any]:
    """Value of a field, None for folders without YaRN."""
    return lambda settings: kind(settings[name]) if settings.get("rope_type") in ("yarn", "original") else None


def _or(name: str, default: float) -> Callable[[Settings], float]:
    return lambda settings: float(settings.get(name, default))


_YARN = {
    "factor": "scaling_factor", "yarn_ext_factor": "extrapolation_factor", "yarn_attn_factor": "attn_factor",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip

# --- Arctic ---


def _redefined(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Tokens of tokenizer_config.json, which replace pieces of tokenizer.model."""
    names = [f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type")]
    tokens, scores, types = (list(settings["vocabulary"][name]) for name in names)
    for number, added in tokenizer.get("added_tokens_decoder", {}).items():
        if (i := int(number)) < len(tokens):
            unknown, special = added["content"] == tokenizer["unk_token"], bool(added.get("special"))
            own = TokenKind.UNKNOWN if unknown else TokenKind.CONTROL
            types[i] = int(own if special else TokenKind.USER_DEFINED)
            tokens[i], scores[i] = added["content"], 0.0 if special else -10000.0
    return dict(zip(names, (tokens, scores, types), strict=True))


# --- Laguna ---


def _turns(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """End of turns, a control token, and the template's own file."""
    vocabulary, ends = settings["vocabulary"], settings.get("eos_token_id")
    tokens = zip(vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"], strict=True)
    types = [int(TokenKind.CONTROL) if text == "</assistant>" else number for text, number in tokens]
    found: dict[str, Any] = {"tokenizer.ggml.token_type": types}
    if (path := settings["folder"] / "chat_template.jinja").is_file():
        found["tokenizer.chat_template"] = path.read_text("utf-8")
    others = [end for end in ends if end != settings.get("bos_token_id")] if isinstance(ends, list) else []
    return found | ({"tokenizer.ggml.eot_token_id": others[0]} if others else {})


def _share(kind: str) -> Callable[[Settings], int | None]:
    """Rotated numbers of heads in layers with this attention."""

    def found(settings: Settings) -> int | None:
        rope = settings["rope_parameters"].get(kind)
        return None if rope is None else int(settings["head_dim"] * float(rope.get("partial_rotary_factor", 1.0)))

    return found


def _n_dense(settings: Settings) -> int:
    kinds = settings["mlp_layer_types"]
    return next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))


CHECKPOINTS = (
    Checkpoint(
        "llama4", ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        llama.KEYS | {
            "feed_forward_length": field("intermediate_size_mlp"),
            "expert_feed_forward_length": field("intermediate_size"),
            "interleave_moe_layer_step": field("interleave_moe_layer_step"),
            "attention.sliding_window": _without_chunks,
        },
        {
            "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_experts_per_tok": 1, "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
        },
        pre=("llama4",), extra=wavelength_factors("llama3"),
        rename=((r"(\.experts\.(?:down|gate_up)_proj)$", r"\1.weight"),),
        whole={r"\.experts\.gate_up_proj\.": (".experts.gate_proj.", ".experts.up_proj.")},
        convert={
            "ffn_gate_exps.weight": _half(0), "ffn_up_exps.weight": _half(1), "ffn_down_exps.weight": TRANSPOSED,
        },
    ),
    Checkpoint(
        "maple", ("MapleForCausalLM",),
        {
            "vocab_size": _maple_vocabulary,
            "rope.dimension_count": lambda settings: int(
                head_dim(settings) * rope_of(settings).get("partial_rotary_factor", 1.0)
            ),
            "attention.sliding_window": field("sliding_window"),
            "attention.sliding_window_pattern": lambda settings: [
                kind == "sliding_attention" for kind in settings["layer_types"]
            ],
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "swiglu_clamp_exp": lambda settings: [_MAPLE_CLAMP] * settings["num_hidden_layers"],
        },
        {"num_shared_experts": 0, "norm_topk_prob": True, "nope_on_global_attention": False}, names="qwen3moe",
    ),
    Checkpoint(
        "grok", ("GrokForCausalLM", "Grok1ForCausalLM"),
        {f"rope.scaling.{key}": _scaled(name) for key, name in _YARN.items()} | {
            "rope.scaling.type": _scaled("rope_type", lambda kind: "yarn"),
            "rope.scaling.original_context_length": _scaled("original_max_position_embeddings", int),
            "attn_logit_softcapping": _or("attn_logit_softcapping", 30.0),
            "router_logit_softcapping": _or("router_logit_softcapping", 30.0),
            "final_logit_softcapping": lambda settings: float(settings.get("final_logit_softcapping") or 0) or None,
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "attention.temperature_length": lambda settings: settings.get("attn_temperature_len") or None,
            "attention.output_scale": lambda settings: float(
                settings.get("attn_output_multiplier", head_dim(settings) ** -0.5)
            ),
            "embedding_scale": field("embedding_multiplier_scale", kind=float),
            "logit_scale": field("output_multiplier_scale", kind=float),
        },
        vocabulary=("sentencepiece", "bpe"), pre=("grok-2",),
    ),
    Checkpoint(
        "arctic", ("ArcticForCausalLM",),
        {
            "vocab_size": field("vocab_size"),
            "rope.dimension_count": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
        },
        vocabulary=("sentencepiece",), tokenizer=_redefined, convert=INTERLEAVED,
    ),
    Checkpoint(
        "laguna", ("LagunaForCausalLM",),
        {
            "vocab_size": field("vocab_size"),
            "attention.head_count": lambda settings: settings.get("num_attention_heads_per_layer")
            or [settings["num_attention_heads"]] * settings["num_hidden_layers"],
            "attention.sliding_window": lambda settings: settings.get("sliding_window") or None,
            "rope.dimension_count": _share("full_attention"), "rope.dimension_count_swa": _share("sliding_attention"),
            "expert_feed_forward_length": field("moe_intermediate_size"),
            "expert_shared_feed_forward_length": field("shared_expert_intermediate_size"),
            "expert_weights_norm": True, "expert_gating_func": 2, "leading_dense_block_count": _n_dense,
            "expert_weights_scale": field("moe_routed_scaling_factor", kind=float),
        },
        {"mlp_layer_types": lambda settings: ["dense"] + ["sparse"] * (settings["num_hidden_layers"] - 1),
         "moe_routed_scaling_factor": 1.0},
        pre=("laguna",), tokenizer=_turns, names="dots1",
        tensors={
            "model.layers.{}.self_attn.g_proj": "blk.{}.attn_gate",
            "model.layers.{}.mlp.experts.e_score_correction": "blk.{}.exp_probs_b",
        },
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
