"""Hugging Face checkpoints of Pocket TTS, which have no config.json."""

import re
from typing import Any

import numpy as np

from llamacli.plugin import Checkpoint, Conversion, Settings, TokenKind

_TABLE, _LAYERS = "flow_lm.conditioner.embed.weight", "flow_lm.transformer.layers."
_VOICE, _BEGIN = "flow_lm.bos_before_voice", "flow_lm.bos_emb"
_SCORE = -1000.0
_TENSORS = {
    "norm1": "attn_norm", "norm2": "ffn_norm", "self_attn.q": "attn_q", "self_attn.k": "attn_k",
    "self_attn.v": "attn_v", "self_attn.out_proj": "attn_output", "linear1": "ffn_up", "linear2": "ffn_down",
}  # fmt: skip


def _has_voice(settings: Settings) -> bool:
    return _VOICE in settings["shapes"]


def _n_layer(settings: Settings) -> int:
    return sum(bool(re.fullmatch(rf"{re.escape(_LAYERS)}\d+\.norm1\.weight", name)) for name in settings["shapes"])


def _embeddings(array: Any, settings: Settings) -> Any:
    """Embeddings of texts, then the vectors that begin a voice and sound."""
    numbers = settings["numbers"]
    rows = [array, numbers(_VOICE).reshape(1, -1)] if _has_voice(settings) else [array]
    begin, weight = (numbers(name).astype(np.float32) for name in (_BEGIN, "flow_lm.input_linear.weight"))
    return np.concatenate([*rows, (weight @ begin.reshape(-1))[None]]).astype(np.float32)


def _vectors(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Last tokens: vectors without a text."""
    voice = ["<|bos_before_voice|>"] if _has_voice(settings) else []
    names = ["<|pad|>", *voice, "<|audio_bos|>"]
    last: dict[str, list[Any]] = {
        "tokens": names,
        "token_type": [int(TokenKind.CONTROL)] * len(names),
        "scores": [_SCORE] * len(names),
    }
    keys = {f"tokenizer.ggml.{name}": values for name, values in last.items()}
    found = {key: [*settings["vocabulary"][key][: -len(names)], *values] for key, values in keys.items()}
    return found | {f"tokenizer.ggml.add_{name}_token": False for name in ("bos", "eos")}


POCKET_TTS = Checkpoint(
    "pockettts", ("PocketTTSModel", _BEGIN), {},
    {
        "num_hidden_layers": _n_layer, "hidden_size": lambda settings: settings["shapes"][_TABLE][1],
        "intermediate_size": lambda settings: settings["shapes"][f"{_LAYERS}0.linear1.weight"][0],
        "num_attention_heads": lambda settings: settings["hidden_size"] // 64, "max_position_embeddings": 4096,
        "vocab_size": lambda settings: settings["shapes"][_TABLE][0] + 1 + _has_voice(settings),
        "rope_theta": 10000.0, "layer_norm_eps": 1e-5,
    },
    ("unigram",), tokenizer=_vectors, names="gpt2",
    drop=(r"^(?!flow_lm\.(conditioner\.embed|out_norm|transformer\.layers)\.)",),
    split={r"self_attn\.in_proj\.weight$": tuple(f"self_attn.{name}.weight" for name in "qkv")},
    tensors={f"{_LAYERS}{{}}.{name}": f"blk.{{}}.{target}" for name, target in _TENSORS.items()}
    | {_TABLE.removesuffix(".weight"): "token_embd", "flow_lm.out_norm": "output_norm"},
    convert={
        "token_embd.weight": Conversion(
            _embeddings, lambda shape, settings: (settings["vocab_size"], shape[1]), computes=True
        )
    },
)  # fmt: skip
