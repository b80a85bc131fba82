"""Routes of the API, as data.

The app and its OpenAPI description are made of them.
"""

from __future__ import annotations

import attrs
import msgspec

from llamacli.serve.http import local, ollama
from llamacli.serve.http.call import Handler
from llamacli.serve.http.openai import chat, completions, embeddings, models, responses
from llamacli.serve.http.schemas.chat import ChatRequest
from llamacli.serve.http.schemas.common import LoraScale
from llamacli.serve.http.schemas.completions import CompletionRequest, EmbeddingsRequest
from llamacli.serve.http.schemas.local import DetokenizeRequest, TokenizeRequest
from llamacli.serve.http.schemas.ollama import OllamaChat, OllamaEmbed, OllamaGenerate, OllamaName
from llamacli.serve.http.schemas.responses import ResponsesRequest


@attrs.frozen
class ApiRoute:
    """Route of the API.

    `paths` are equal to each other. `schema` is that of the body. `streams` is true if the response may be a stream of
    events. `public` ones need no key. `for_model` ones take the query parameter `model`. `queued` ones
    are refused before their body is read while the queue is full.
    """

    method: str
    paths: tuple[str, ...]
    handler: Handler
    schema: type[msgspec.Struct] | type[list[LoraScale]] | None = None
    streams: bool = False
    public: bool = False
    for_model: bool = False
    queued: bool = False

    @property
    def name(self) -> str:
        """Name for metrics."""
        return self.paths[0]


def _versioned(path: str) -> tuple[str, ...]:
    return f"/v1{path}", path


ROUTES = (
    ApiRoute("POST", _versioned("/chat/completions"), chat.chat_completions, ChatRequest, streams=True, queued=True),
    ApiRoute("POST", _versioned("/completions"), completions.completions, CompletionRequest, streams=True, queued=True),
    ApiRoute("POST", _versioned("/responses"), responses.responses, ResponsesRequest, streams=True, queued=True),
    ApiRoute("POST", _versioned("/embeddings"), embeddings.embeddings, EmbeddingsRequest, queued=True),
    ApiRoute("GET", _versioned("/models"), models.models),
    ApiRoute("GET", _versioned("/models/{name:path}"), models.model),
    ApiRoute("POST", ("/tokenize",), local.tokenize, TokenizeRequest),
    ApiRoute("POST", ("/detokenize",), local.detokenize, DetokenizeRequest),
    ApiRoute("GET", ("/tokenizer_info",), local.tokenizer_info, for_model=True),
    ApiRoute("POST", ("/apply-template",), local.apply_template, ChatRequest),
    ApiRoute("GET", ("/props",), local.props, for_model=True),
    ApiRoute("GET", ("/slots",), local.slots, for_model=True),
    ApiRoute("GET", ("/lora-adapters",), local.adapters, for_model=True),
    ApiRoute("POST", ("/lora-adapters",), local.set_adapters, list[LoraScale], for_model=True),
    ApiRoute("GET", ("/metrics",), local.metrics),
    ApiRoute("GET", ("/health", "/v1/health"), local.health, public=True),
    ApiRoute("POST", ("/api/chat",), ollama.chat, OllamaChat, streams=True, queued=True),
    ApiRoute("POST", ("/api/generate",), ollama.generate, OllamaGenerate, streams=True, queued=True),
    ApiRoute("POST", ("/api/embed",), ollama.embed, OllamaEmbed, queued=True),
    ApiRoute("GET", ("/api/tags",), ollama.tags),
    ApiRoute("POST", ("/api/show",), ollama.show, OllamaName),
    ApiRoute("GET", ("/api/ps",), ollama.running),
    ApiRoute("GET", ("/api/version",), ollama.version),
    ApiRoute("POST", ("/api/create",), ollama.not_supported),
    ApiRoute("POST", ("/api/copy",), ollama.not_supported),
    ApiRoute("POST", ("/api/pull",), ollama.not_supported),
    ApiRoute("POST", ("/api/push",), ollama.not_supported),
    ApiRoute("DELETE", ("/api/delete",), ollama.not_supported),
)
