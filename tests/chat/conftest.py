"""Tiny chat model with scripted replies."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamacli import Model, Session, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import Plugins
from llamacli.testing.chats import CHATML
from tiny_chat import chat_keys

Talker = Callable[..., Model]
Script = Callable[..., None]


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
    """Script the tokens that the model draws.

    They are given as ids or as text with special tokens spelled; the end of the turn follows.
    """

    def write(model: Model, *replies: str | list[int], end: str = "<|im_end|>") -> None:
        ids = iter(
            token
            for reply in replies
            for token in (
                *(model.encode(reply, False, parse_special=True) if isinstance(reply, str) else reply),
                model.tokenizer.token_id(end),
            )
        )
        monkeypatch.setattr(Session, "draw", lambda _self, _params: next(ids))

    return write
