"""Plugin for the program llm (`pip install llm`), found by entry point.

    llm -m llamacli/demo "Tell me a story about a fox."
    llm embed -m llamacli/embeddinggemma:300m -c "Once upon a time"

Models are `llamacli/NAME` for the demo model, the user's own names, and downloaded models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import llm
from pydantic import Field

from llamacli.errors import HubError, InvalidRequestError, LlamaCliError
from llamacli.hub.names import DEMO, own_names
from llamacli.hub.repositories import cached_models
from llamacli.model import Model, load_model
from llamacli.tools.embedding import Embedder, load_embedder

_PREFIX = "llamacli/"


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register a model for each known name."""
    for name in _names():
        register(ChatModel(name))


@llm.hookimpl
def register_embedding_models(register: Any) -> None:
    """Register an embedding model for each known name."""
    for name in _names():
        register(TextEmbedder(name))


class ChatModel(llm.Model):
    """Model of a name, loaded by its first prompt."""

    can_stream = supports_schema = supports_tools = True

    class Options(llm.Options):
        """Sampling parameters of a prompt; without them the file's, else llama.cpp's."""

        temperature: float | None = Field(None, ge=0, description="Randomness; 0 takes the most probable token.")
        top_k: int | None = Field(None, description="Number of most probable tokens to draw from.")
        top_p: float | None = Field(None, ge=0, le=1, description="Share of the probability to draw from.")
        seed: int | None = Field(None, description="Seed of the draws; random without one.")
        max_tokens: int | None = Field(None, description="Most tokens of a reply.")

    def __init__(self, name: str):
        self.name, self.model_id = name, f"{_PREFIX}{name}"
        self._model: Model | None = None

    def __str__(self) -> str:
        return f"llamacli: {self.model_id}"

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any = None) -> Iterator[str]:
        """Reply to a prompt, behind the conversation's. Raises llm.ModelError."""
        earlier = [] if conversation is None else conversation.responses
        messages = [message for other in earlier for message in (*_asked(other.prompt), _replied(other))]
        system = next((text for text in (prompt.system, *(other.prompt.system for other in earlier)) if text), None)
        if system:
            messages.insert(0, {"role": "system", "content": system})
        options = {name: value for name, value in prompt.options if value is not None}
        if prompt.schema is not None:
            options["response_format"] = {"type": "json_object", "schema": prompt.schema}
        if prompt.tools:
            options["tools"] = [_described(tool) for tool in prompt.tools]
        try:
            self._model = self._model or load_model(self.name)
            chunks = self._model.create_chat_completion([*messages, *_asked(prompt)], stream=True, **options)
            yield from _read(chunks, response)
        except LlamaCliError as error:
            raise llm.ModelError(str(error)) from error


class TextEmbedder(llm.EmbeddingModel):
    """Embedding model of a name, loaded by its first text."""

    batch_size = 64

    def __init__(self, name: str):
        self.name, self.model_id = name, f"{_PREFIX}{name}"
        self._embedder: Embedder | None = None

    def __str__(self) -> str:
        return f"llamacli: {self.model_id}"

    def embed_batch(self, items: Iterable[str | bytes]) -> Iterator[list[float]]:
        """Embed texts. Raises llm.ModelError."""
        try:
            self._embedder = self._embedder or load_embedder(self.name)
            yield from self._embedder.embed([str(item) for item in items]).tolist()
        except LlamaCliError as error:
            raise llm.ModelError(str(error)) from error


def _names() -> list[str]:
    try:
        found = [str(model.reference) for model in cached_models()]
    except HubError:
        found = []
    try:
        own = list(own_names())
    except InvalidRequestError:
        own = []
    return list(dict.fromkeys([DEMO, *own, *found]))


def _asked(prompt: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": result.tool_call_id, "name": result.name, "content": result.output}
        for result in prompt.tool_results
    ]
    return [*messages, {"role": "user", "content": prompt.prompt}] if prompt.prompt else messages


def _replied(response: Any) -> dict[str, Any]:
    calls: list[dict[str, Any]] = [
        {"type": "function", "id": call.tool_call_id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in response.tool_calls()
    ]
    return {"role": "assistant", "content": response.text_or_raise()} | ({"tool_calls": calls} if calls else {})


def _described(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _read(chunks: Any, response: Any) -> Iterator[str]:
    """Yield a reply's text; add its calls and usage to the response."""
    whole: Any = None

    def kept() -> Iterator[dict[str, Any]]:
        nonlocal whole
        whole = yield from chunks

    for chunk in kept():
        if text := chunk["choices"][0]["delta"].get("content"):
            yield text
    response.set_usage(input=whole["usage"]["prompt_tokens"], output=whole["usage"]["completion_tokens"])
    for call in whole["choices"][0]["message"].get("tool_calls") or ():
        function = call["function"]
        response.add_tool_call(llm.ToolCall(function["name"], json.loads(function["arguments"]), call["id"]))
