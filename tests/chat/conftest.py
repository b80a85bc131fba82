"""A model to talk to, whose replies are told beforehand."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from chat_cases import CHATML
from llamacli import Model, Session, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import Plugins

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

Talker = Callable[..., Model]
Script = Callable[..., None]


def chat_keys(template: str | None, **keys: Any) -> dict[str, Any]:
    """Keys of a tiny SentencePiece model that turn its last tokens into `SPECIAL`, and give it a template."""
    tokens, _, types = tiny_models.spm_vocabulary()
    tokens[-len(SPECIAL) :], types[-len(SPECIAL) :] = list(SPECIAL), list(SPECIAL.values())
    named = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": template,
        **named,
    }


@pytest.fixture
def talker(tiny_gguf: Callable[..., Path], plugins: Plugins) -> Iterator[Talker]:
    """Load a model with this template: `talker(template, context_length=..., **tokenizer keys)`."""
    loaded: list[Model] = []

    def load(template: str | None = CHATML, context_length: int = 512, **keys: Any) -> Model:
        path = tiny_gguf("gqa", tokenizer="spm", context_length=context_length, metadata=chat_keys(template, **keys))
        loaded.append(load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine()))
        return loaded[-1]

    yield load
    for model in loaded:
        model.close()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Tell what the model draws: token ids, or text in which special tokens are spelled; then it ends the turn."""

    def tell(model: Model, *replies: str | list[int], end: str = "<|im_end|>") -> None:
        ids = iter(
            token
            for reply in replies
            for token in (
                *(model.encode(reply, False, parse_special=True) if isinstance(reply, str) else reply),
                model.tokenizer.token_id(end),
            )
        )
        monkeypatch.setattr(Session, "_draw", lambda _self, _params: next(ids))

    return tell
