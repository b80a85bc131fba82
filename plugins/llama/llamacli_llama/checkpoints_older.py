"""Hugging Face checkpoints of InternLM2, PLaMo 13B and Talkie."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llamacli.plugin import INTERLEAVED, Checkpoint, Conversion, Settings, TokenKind, head_dim, hookimpl

LLAMACLI_API = 1

Shape = tuple[int, ...]


def _part_of_groups(part: slice, rotated: Conversion | None = None) -> Conversion:
    """Heads of rows sorted by groups: queries, a key, a value.

    Rotated ones are moved as `rotated` does.
    """

    def shape(shape: Shape, settings: Settings) -> Shape:
        n_group, head = settings["num_key_value_heads"], head_dim(settings)
        n_head = settings["num_attention_heads"] // n_group + 2
        if shape[0] != n_group * n_head * head:
            raise ValueError(f"shape {shape}, expected {n_group * n_head * head} rows")
        return n_group * len(range(n_head)[part]) * head, *shape[1:]

    def apply(array: Any, settings: Settings) -> Any:
        groups = array.reshape(settings["num_key_value_heads"], -1, head_dim(settings), *array.shape[1:])
        rows = groups[:, part].reshape(-1, *array.shape[1:])
        return rotated.apply(rows, settings) if rotated else rows

    return Conversion(apply, shape)


def _intern(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Tokens, one of which is a zero, and the end of messages.

    It takes the place of the end of texts.
    """
    keys = settings["vocabulary"]
    texts, types = list(keys["tokenizer.ggml.tokens"]), list(keys["tokenizer.ggml.token_type"])
    for i, text in enumerate(texts):
        if text == b"\0":
            texts[i], types[i] = "\U0001f409", int(TokenKind.UNUSED)
        elif isinstance(text, bytes) and text.startswith(b"[UNUSED"):
            types[i] = int(TokenKind.UNUSED)
    added = tokenizer.get("added_tokens_decoder", {})
    ends = [int(i) for i, token in added.items() if token["content"] == "<|im_end|>"]
    found = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}
    return found | ({"tokenizer.ggml.eos_token_id": ends[0]} if ends else {})


def _kv_heads(settings: Settings) -> int:
    """Heads of keys and values, each of which several queries share."""
    n_head, n_shared = settings["num_attention_heads"], settings["n_shared_head"]
    if n_head % n_shared:
        raise ValueError(f"n_shared_head is {n_shared}, expected a divisor of {n_head}")
    return int(n_head // n_shared)


def _by_groups(array: Any, settings: Settings) -> Any:
    """Rows of queries, those that share a key behind each other."""
    heads = array.reshape(-1, _kv_heads(settings), head_dim(settings), *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


def _negated(array: Any, settings: Settings) -> Any:
    """Rows of queries and keys, the second half of each head negated.

    RoPE of the original rotates the other way.
    """
    heads = array.reshape(-1, 2, settings["head_dim"] // 2, *array.shape[1:])
    return np.stack([heads[:, 0], -heads[:, 1]], 1).reshape(array.shape)


_NEGATED = Conversion(_negated, computes=True)

CHECKPOINTS = (
    Checkpoint(
        "internlm2", ("InternLM2ForCausalLM",), vocabulary=("prefixed",), tokenizer=_intern,
        whole={r"\.attention\.wqkv\.": (".attention.wq.", ".attention.wk.", ".attention.wv.")},
        convert={
            "attn_q.weight": _part_of_groups(slice(-2), INTERLEAVED["attn_q.weight"]),
            "attn_k.weight": _part_of_groups(slice(-2, -1), INTERLEAVED["attn_k.weight"]),
            "attn_v.weight": _part_of_groups(slice(-1, None)),
        },
    ),
    Checkpoint(
        "plamo", ("PlamoForCausalLM",),
        {
            "context_length": 4096, "attention.head_count_kv": _kv_heads, "attention.key_length": None,
            "attention.value_length": None, "rope.freq_base": None,
        },
        {"n_shared_head": 8}, ("sentencepiece",),
        convert={
            "attn_q.weight": Conversion(_by_groups),
            "attn_output.weight": Conversion(lambda array, settings: _by_groups(array.T, settings).T, columns=True),
        },
    ),
    Checkpoint(
        "talkie", ("TalkieForCausalLM",),
        {
            "attention.layer_norm_rms_epsilon": float(np.finfo(np.float32).eps),
            "logit_scale": lambda settings: float(settings["numbers"]("lm_head_gain.w_g").item()),
        },
        pre=("talkie",), drop=(r"^lm_head_gain\.w_g$",),
        rename=((r"(^lm_head|\.head_g|\.embed_skip\.a_g)$", r"\1.weight"),),
        tensors={"model.embed": "token_embd", "lm_head": "output"} | {
            f"model.blocks.{{}}.{name}": f"blk.{{}}.{target}"
            for name, target in {
                "attn.attn_query": "attn_q", "attn.attn_key": "attn_k", "attn.attn_value": "attn_v",
                "attn.attn_resid": "attn_output", "attn_gain.a_g": "attn_output.scale",
                "attn.head_gain.head_g": "attn_q_norm", "embed_skip.a_g": "layer_output_scale",
                "mlp.mlp_gate": "ffn_gate", "mlp.mlp_linear": "ffn_up", "mlp.mlp_resid": "ffn_down",
                "mlp_gain.a_g": "ffn_down.scale",
            }.items()
        },
        convert={
            "attn_q.weight": _NEGATED, "attn_k.weight": _NEGATED,
            "attn_q_norm.weight": Conversion(lambda array, settings: array[:, None],
                                             lambda shape, settings: (*shape, 1)),
        },
    ),
)  # fmt: skip


@hookimpl
def register_checkpoints(register: Callable[[Checkpoint], None]) -> None:
    """Register the layouts."""
    for checkpoint in CHECKPOINTS:
        register(checkpoint)
