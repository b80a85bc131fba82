"""Conversations over HTTP: prefixes of earlier turns change no reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from conftest import TinyGguf
from http_server import Served, served
from llamacli.gguf import Metadata
from llamacli.serve.engine import LocalEngine
from llamacli.serve.models import ModelSource
from llamacli.serve.settings import EngineSettings
from llamacli.testing.chats import CHATML
from llamacli.testing.vocabularies import vocabulary
from llamacli.tokenizer import tokenizer_from_metadata
from suite import examples
from tiny_chat import SPECIAL, chat_keys

KEYS = chat_keys(CHATML)
TOKENIZER = tokenizer_from_metadata(Metadata({**vocabulary("spm"), **KEYS}))
LIKELY = [*(3 + byte for byte in "é🦊 ab\n".encode()), *(TOKENIZER.token_id(text) for text in SPECIAL), 306, 304, 312]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.sampled_from(["", "once", "the dog", "é", "<|im_end|>"]),
            "seed": st.integers(0, 9),
            "max_tokens": st.integers(1, 20),
            "n": st.integers(1, 2),
            "stop": st.sampled_from([[], ["a"], ["\ufffd"]]),
            "edited": st.sampled_from([False, False, False, True]),
        }
    ),
    min_size=2,
    max_size=5,
)


@pytest.fixture(scope="module", params=["gqa", "qwen35"])
def engines(request: pytest.FixtureRequest, tiny_gguf: TinyGguf) -> Iterator[list[tuple[LocalEngine, Served]]]:
    """Two servers of a model."""
    architecture = {"gqa": "llama"}.get(request.param, request.param)
    file = tiny_gguf(request.param, tokenizer="spm", metadata={**KEYS, f"{architecture}.context_length": 512})
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            engine = LocalEngine([ModelSource("m", file)], EngineSettings(threads=1, n_ctx=512, mode="fp32"))
            stack.callback(engine.close)
            made.append((engine, stack.enter_context(served(engine, template=None))))
        yield made


def replies(server: Served, messages: list[dict[str, Any]], turn: dict[str, Any]) -> tuple[list[Any], int]:
    """Choices of the reply to messages, and the number of cached tokens."""
    fields = {name: turn[name] for name in ("seed", "max_tokens", "n", "stop")}
    biases = {str(token): 12 for token in LIKELY}
    reply = server.send(
        "/v1/chat/completions",
        {"messages": messages, "temperature": 1.5, "top_k": 0, "logit_bias": biases, "logprobs": True, **fields},
    )
    assert reply.status == 200, reply.body
    return reply.json["choices"], reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def forget(engine: LocalEngine) -> None:
    """Forget the prefixes of a model that does nothing now."""
    loaded = engine._entries["m"].loaded
    if loaded is not None:
        loaded.scheduler.memory.prefixes.clear()


@pytest.mark.medium
@given(turns=TURNS)
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_replies_are_those_of_a_fresh_server(
    turns: list[dict[str, Any]], engines: list[tuple[LocalEngine, Served]]
) -> None:
    (_, server), (other, fresh) = engines
    messages: list[dict[str, Any]] = []
    n_cached = 0
    for turn in turns:
        if turn["edited"] and messages:
            messages[0] = {"role": "user", "content": turn["text"]}
        messages.append({"role": "user", "content": turn["text"]})
        forget(other)
        found, n_cached = replies(server, messages, turn)
        assert (found, 0) == replies(fresh, messages, turn)
        messages.append(json.loads(json.dumps(found[-1]["message"])))
    if not any(turn["edited"] for turn in turns):
        assert n_cached > 0
