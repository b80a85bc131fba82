"""End of the reasoning of a running reply, as llama-server's."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from http_server import Served, served
from llamacli import load_model
from llamacli.plugins import Plugins
from llamacli.serve.engine import LocalEngine
from llamacli.serve.models import ModelSource
from llamacli.serve.settings import EngineSettings
from llamacli.testing.chats import CHATML
from tiny_chat import chat_keys

pytestmark = pytest.mark.medium

HI: list[Any] = [{"role": "user", "content": "hi"}]
N_MOST = 3000


@pytest.fixture
def server(tiny_gguf, plugins: Plugins) -> Iterator[Served]:
    keys = chat_keys(CHATML.replace("assistant\n", "assistant\n<think>") + "{# Thoughts end with </think>. #}")
    path: Path = tiny_gguf("gqa", tokenizer="spm", context_length=4096, metadata=keys)
    load = functools.partial(load_model, plugins=plugins)
    engine = LocalEngine((ModelSource("tiny", path),), EngineSettings(threads=1, mode="fp32"), load)
    try:
        with served(engine, template=None) as server:
            engine.load("tiny").result(120)
            yield server
    finally:
        engine.close()


def command(server: Served, name: str) -> Any:
    return server.send("/v1/chat/completions/control", {"id": name, "action": "reasoning_end"}).json


@pytest.mark.parametrize("control", [True, False])
def test_reasoning_ends_on_command(server: Served, control: bool) -> None:
    fields = {"reasoning_control": control, "ignore_eos": True}
    biased = {"logit_bias": {"</think>": -100}} if control else {}  # only the command ends it
    stream = server.openai().chat.completions.create(
        model="tiny", messages=HI, stream=True, temperature=0, max_tokens=N_MOST, extra_body=fields | biased
    )
    content, n_reasoning, answers = "", 0, []
    with stream:
        for chunk in stream:
            delta = chunk.choices[0].delta
            n_reasoning += bool(getattr(delta, "reasoning_content", None))
            if n_reasoning and not answers:
                answers.append(command(server, chunk.id))
                if not control:
                    break
            content += delta.content or ""
            if len(content) > 20:
                break
    assert answers[0]["success"] is control
    assert bool(content) is control
    assert command(server, chunk.id)["success"] is False, "after its end"


def test_unknown_commands(server: Served) -> None:
    assert server.send("/v1/chat/completions/control", {"id": "x", "action": "stop"}).status == 400
    assert command(server, "chatcmpl-none") == {
        "success": False, "message": "no reply with reasoning_control runs under this id",
    }  # fmt: skip
    refused = server.send("/v1/completions", {"prompt": "x", "reasoning_control": True})
    assert refused.json["error"]["param"] == "reasoning_control"
