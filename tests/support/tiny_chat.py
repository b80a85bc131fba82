"""Metadata of a tiny chat model."""

from typing import Any

from llamacli.testing import vocabularies

CONTROL, USER_DEFINED = 3, 4
SPECIAL = {
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<end>": CONTROL,
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
    "<tool_call>": USER_DEFINED,
    "</tool_call>": USER_DEFINED,
}


def chat_keys(template: str | None, **keys: Any) -> dict[str, Any]:
    """Keys of a tiny SentencePiece model with a template and `SPECIAL` tokens."""
    tokens, _, types = vocabularies.spm_vocabulary()
    tokens[-len(SPECIAL) :], types[-len(SPECIAL) :] = list(SPECIAL), list(SPECIAL.values())
    named = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": template,
        **named,
    }
