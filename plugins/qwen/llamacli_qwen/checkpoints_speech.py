"""Hugging Face checkpoints of Qwen3-TTS: the talker, whose tokens are codes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from llamacli.plugin import Checkpoint, Conversion, Settings, TokenKind

_PROJECTION = "talker.text_projection.linear_"
_ROWS = 1 << 12
"""Rows of embeddings that are computed at a time."""
_LAST = 1024
"""Codes that are no speech, at the end of the vocabulary."""


def _embeddings(array: Any, settings: Settings) -> Any:
    """Embeddings of texts behind their network, then those of codes."""

    def linear(name: str, x: Any) -> Any:
        weight, bias = (settings["numbers"](f"{_PROJECTION}{name}.{kind}") for kind in ("weight", "bias"))
        return x @ weight.T.astype(np.float32) + bias

    if settings["hidden_act"] not in ("silu", "relu"):
        raise ValueError(f"hidden_act is {settings['hidden_act']!r}, expected silu or relu")
    codes = settings["numbers"]("talker.model.codec_embedding.weight")
    found = np.empty((len(array) + len(codes), codes.shape[1]), np.float32)
    found[len(array) :] = codes
    for i in range(0, len(array), _ROWS):
        hidden = linear("fc1", array[i : i + _ROWS].astype(np.float32))
        gate = 1 / (1 + np.exp(-hidden)) if settings["hidden_act"] == "silu" else hidden > 0
        found[i : min(i + _ROWS, len(array))] = linear("fc2", hidden * gate)
    return found


def _codes(kind: str, tokenizer: Settings, settings: Settings) -> dict[str, Any]:
    """Tokens of codes behind those of texts, named by their ids."""
    talker, keys, n_texts = settings["talker_config"], settings["vocabulary"], settings["text_vocab_size"]
    names = [f"<|codec_{i}|>" for i in range(talker["vocab_size"])]
    for field, value in talker.items():
        name = field.removesuffix("_id")
        ids = value if isinstance(value, Mapping) else {None: value}
        for part, i in ids.items() if field.endswith("_id") and value is not None else ():
            names[i] = f"<|{name}|>" if part is None else f"<|{name}_{part}|>"
    end, n = n_texts + talker["codec_eos_token_id"], n_texts + len(names)
    return {
        "tokenizer.ggml.tokens": [*keys["tokenizer.ggml.tokens"], *names],
        "tokenizer.ggml.token_type": [*keys["tokenizer.ggml.token_type"], *[int(TokenKind.CONTROL)] * len(names)],
        "tokenizer.ggml.suppress_tokens": [i for i in range(n - _LAST, n) if i != end],
        "tokenizer.chat_template": None,
        "tokenizer.ggml.eos_token_id": keys.get("tokenizer.ggml.eos_token_id", end),
        "tokenizer.ggml.add_eos_token": keys.get("tokenizer.ggml.add_eos_token", False),
    }  # fmt: skip


def checkpoints(defaults: dict[str, Any], pre: tuple[str, ...]) -> tuple[Checkpoint, ...]:
    """Layout of the talker, with the defaults of others."""
    return (
        Checkpoint(
            "qwen3tts", ("Qwen3TTSForConditionalGeneration",), {}, defaults, ("bpe",), pre, _codes, names="qwen3vl",
            keep=r"^talker\.", rename=((r"^talker\.", ""),),
            drop=(r"^(?!talker\.)", r"\.(code_predictor|text_projection|codec_embedding)\."),
            tensors={"model.text_embedding": "token_embd", "codec_head": "output"},
            convert={
                "token_embd.weight": Conversion(
                    _embeddings, lambda shape, settings: (shape[0] + settings["vocab_size"], settings["hidden_size"]),
                    computes=True,
                )
            },
        ),
    )  # fmt: skip
