"""Hugging Face checkpoints of Qwen2, Qwen3, mixtures, text of Qwen-VL and Omni."""

from collections.abc import Callable
from typing import Any

from llamacli.plugin import Checkpoint, Conversion, Settings, field, hookimpl
from llamacli_qwen import checkpoints_draft, checkpoints_hybrid, checkpoints_speech
from llamacli_qwen.checkpoints_first import QWEN

LLAMACLI_API = 1

Shape = tuple[int, ...]

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
_EXPERT_KEYS: dict[str, Any] = {
    "expert_feed_forward_length": lambda settings: settings.get("moe_intermediate_size"),
    "expert_shared_feed_forward_length": lambda settings: settings.get("shared_expert_intermediate_size"),
}
_STACKED: dict[str, Any] = {
    "rename": ((r"(\.experts\.(?:down|gate_up)_proj)$", r"\1.weight"),),
    "split": {
        r"\.experts\.gate_up_proj\.weight$": (".experts.gate_proj.weight", ".experts.up_proj.weight"),
    },
}
"""Experts that transformers 5 keeps in one tensor, the gate above the up matrix."""


def _head_dim(settings: Settings) -> int:
    return int(settings["hidden_size"] // settings["num_attention_heads"])


def _experts(part: int) -> Conversion:
    """Half of the experts' gates and up matrices.

    The original has a row for each input, transformers 5 one for each output.
    """

    def shape(shape: Shape, settings: Settings) -> Shape:
        n_expert, n_row, n_column = shape
        n_embd = settings["hidden_size"]
        if n_embd not in (n_row, n_column):
            raise ValueError(f"shape {shape}, expected {n_embd} rows or columns")
        return (n_expert, n_column // 2, n_row) if n_row == n_embd else (n_expert, n_row // 2, n_column)

    def apply(array: Any, settings: Settings) -> Any:
        rows = array.swapaxes(1, 2) if array.shape[1] == settings["hidden_size"] else array
        n_ff = rows.shape[1] // 2
        return rows[:, part * n_ff : (part + 1) * n_ff]

    return Conversion(apply, shape)


_DOWN = Conversion(
    lambda array, settings: array if array.shape[1] == settings["hidden_size"] else array.swapaxes(1, 2),
    lambda shape, settings: (shape[0], settings["hidden_size"], settings["moe_intermediate_size"]),
)


def _window(settings: Settings) -> int | None:
    """Tokens that Mellum's sliding layers see; None where it has none."""
    return settings.get("sliding_window") if settings.get("use_sliding_window") in (True, None) else None


def _is_sliding(settings: Settings) -> list[bool] | None:
    return None if _window(settings) is None else [kind == "sliding_attention" for kind in settings["layer_types"]]


def _deepstack(settings: Settings) -> int:
    return len(settings.get("vision_config", {}).get("deepstack_visual_indexes", ()))


def _chat_ends(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Ends of messages as the first and the last token."""
    added = tokenizer.get("added_tokens_decoder", {})
    ends = [int(i) for i, token in added.items() if token["content"] == "<|im_end|>"]
    return {f"tokenizer.ggml.{name}_token_id": end for end in ends[:1] for name in ("bos", "eos")}


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template of Qwen3-ASR's files; that of its folder is for sound."""
_POOLING = {"pooling_type": field("pooling")}
_THINKER = (r"^thinker\.", "")
_PRE = ("qwen2", "deepseek-r1-qwen")
_MOE = {"num_experts_per_tok": 4, "num_key_value_heads": 16}

CHECKPOINTS = (
    QWEN,
    Checkpoint(
        "qwen2",
        ("Qwen2ForCausalLM", "KORMoForCausalLM", "Qwen2AudioForConditionalGeneration",
         "AudioFlamingo3ForConditionalGeneration", "DotsOCRForCausalLM"),
        _POOLING, _DEFAULTS, ("sentencepiece", "bpe"), _PRE,
    ),
    Checkpoint(
        "qwen2", ("Qwen2Model",), _POOLING, _DEFAULTS, ("sentencepiece", "bpe"), _PRE, rename=((r"^", "model."),)
    ),
    Checkpoint(
        "qwen2moe", ("Qwen2MoeForCausalLM",), _EXPERT_KEYS,
        _DEFAULTS | _MOE | {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        ("bpe",), _PRE, **_STACKED,
    ),
    Checkpoint(
        "qwen3", ("Qwen3ForCausalLM", "Qwen3Model", "StepVLForConditionalGeneration"),
        _POOLING, _DEFAULTS | {"head_dim": 128}, ("sentencepiece", "bpe"), _PRE,
    ),
    Checkpoint(
        "qwen3moe", ("Qwen3MoeForCausalLM",), _EXPERT_KEYS,
        _DEFAULTS | _MOE | {
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "num_key_value_heads": 4, "head_dim": _head_dim,
        },
        ("bpe",), _PRE, **_STACKED,
    ),
    Checkpoint(
        "mellum", ("MellumForCausalLM",),
        _EXPERT_KEYS | {"attention.sliding_window": _window, "attention.sliding_window_pattern": _is_sliding},
        {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
        ("bpe",), _PRE, names="qwen3moe", **_STACKED,
    ),
    Checkpoint(
        "qwen2vl", ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen2VLModel",
                    "Qwen2_5OmniModel"), {}, _DEFAULTS,
        ("sentencepiece", "bpe"), _PRE, rename=(_THINKER,),
    ),
    Checkpoint(
        "qwen3vl", ("Qwen3VLForConditionalGeneration",), {"n_deepstack_layers": _deepstack},
        _DEFAULTS | {"head_dim": 128}, ("sentencepiece", "bpe"), _PRE,
    ),
    Checkpoint(
        "qwen3vl", ("Qwen3ASRForConditionalGeneration",), {"n_deepstack_layers": 0},
        _DEFAULTS | {"head_dim": 128}, ("sentencepiece", "bpe"), _PRE, rename=(_THINKER,),
        tokenizer=lambda *given: _chat_ends(*given) | {"tokenizer.chat_template": _CHATML},
    ),
    Checkpoint(
        "qwen3vlmoe", ("Qwen3VLMoeForConditionalGeneration",), _EXPERT_KEYS | {"n_deepstack_layers": _deepstack},
        _DEFAULTS | {"head_dim": 128}, ("bpe",), _PRE,
        rename=((r"(\.experts\.(?:down|gate_up)_proj)$", r"\1.weight"),),
        whole={r"\.experts\.gate_up_proj\.weight$": (".experts.gate_proj.weight", ".experts.up_proj.weight")},
        convert={
            "ffn_gate_exps.weight": _experts(0), "ffn_up_exps.weight": _experts(1), "ffn_down_exps.weight": _DOWN,
        },
    ),
    Checkpoint(
        "qwen3vlmoe", ("Qwen3OmniMoeForConditionalGeneration",), _EXPERT_KEYS | {"n_deepstack_layers": 0},
        _DEFAULTS | {"head_dim": 128}, ("bpe",), _PRE, _chat_ends, split=_STACKED["split"],
        rename=(_THINKER, *_STACKED["rename"]),
    ),
    *checkpoints_hybrid.checkpoints(_EXPERT_KEYS, _STACKED, _PRE),
    *checkpoints_draft.checkpoints(_DEFAULTS | {"head_dim": 128}, _PRE),
    *checkpoints_speech.checkpoints(_DEFAULTS | {"head_dim": 128}, _PRE),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
