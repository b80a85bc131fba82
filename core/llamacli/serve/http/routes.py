"""Routes of the API, as data.

The app and its OpenAPI description are made of them. Modules of handlers are imported when a request needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, get_type_hints

import attrs

Handler = Callable[..., Awaitable[None]]

APIS = "llamacli.apis"
"""Group of entry points: sequences of further routes."""

_HERE = __name__.rpartition(".")[0]


@attrs.frozen
class ApiRoute:
    """Route of the API.

    `paths` are equal to each other. `handler` is a function of a `Call` or, as text, `module:function`; its second
    parameter, where it has one, is annotated with the schema of the body, which may be `list[schema]`. `streams` is
    true if the response may be a stream of events. `public` ones need no key. `query` names the query parameters,
    `status` is that of success. `queued` ones are refused before their body is read while the queue is full.
    `error_body` makes the body of an error; None is the form of the path's API.
    """

    method: str
    paths: tuple[str, ...]
    handler: Handler | str
    streams: bool = False
    public: bool = False
    query: tuple[str, ...] = ()
    status: int = 200
    queued: bool = False
    error_body: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        """Name for metrics."""
        return self.paths[0]


@functools.cache
def loaded(handler: Handler | str) -> tuple[Handler, Any]:
    """Import a handler; returns it and its body's schema, or None."""
    found: Any = handler
    if isinstance(handler, str):
        module, _, name = handler.partition(":")
        found = getattr(import_module(module), name)
    hints = [hint for name, hint in get_type_hints(found).items() if name != "return"]
    return found, hints[1] if len(hints) > 1 else None


def _route(method: str, paths: str, handler: str, **flags: Any) -> ApiRoute:
    """Route of a handler in this package.

    Paths have blanks between; `*` stands for both `/v1` and nothing.
    """
    split = [path for each in paths.split() for path in ([f"/v1{each[1:]}", each[1:]] if each[0] == "*" else [each])]
    return ApiRoute(method, tuple(split), f"{_HERE}.{handler}", **flags)


def _generates(paths: str, handler: str) -> ApiRoute:
    return _route("POST", paths, handler, streams=True, queued=True)


_MODEL = ("model",)
_PAGE = ("limit", "after", "order")

ROUTES = (
    _generates("*/chat/completions", "openai.chat:chat_completions"),
    _generates("/v1/completions", "openai.completions:completions"),
    _generates("/completion /completions", "llamacpp:completion"),
    _generates("/infill", "llamacpp:infill"),
    _route("POST", "*/chat/completions/control", "llamacpp:control"),
    _route("POST", "*/chat/completions/input_tokens", "llamacpp:chat_tokens"),
    _route("POST", "*/responses/input_tokens", "llamacpp:response_tokens"),
    _route("GET", "/v1/stream", "replays:replay", streams=True, query=("conv_id", "from")),
    _route("DELETE", "/v1/stream", "replays:stop", query=("conv_id",), status=204),
    _route("POST", "/v1/streams/lookup", "replays:lookup"),
    _generates("*/responses", "openai.responses:responses"),
    _route("GET", "*/responses/{id}", "openai.stored:response"),
    _route("DELETE", "*/responses/{id}", "openai.stored:delete_response"),
    _route("POST", "*/responses/{id}/cancel", "openai.stored:cancel_response"),
    _route("GET", "*/responses/{id}/input_items", "openai.stored:input_items", query=_PAGE),
    _route("POST", "/v1/conversations", "openai.stored:add_conversation"),
    _route("GET", "/v1/conversations/{id}", "openai.stored:conversation"),
    _route("POST", "/v1/conversations/{id}", "openai.stored:change_conversation"),
    _route("DELETE", "/v1/conversations/{id}", "openai.stored:delete_conversation"),
    _route("GET", "/v1/conversations/{id}/items", "openai.stored:conversation_items", query=_PAGE),
    _route("POST", "/v1/conversations/{id}/items", "openai.stored:add_items"),
    _route("GET", "/v1/conversations/{id}/items/{item}", "openai.stored:item"),
    _route("DELETE", "/v1/conversations/{id}/items/{item}", "openai.stored:delete_item"),
    _route("POST", "/v1/files", "openai.files:upload"),
    _route("GET", "/v1/files", "openai.files:files", query=(*_PAGE, "purpose")),
    _route("GET", "/v1/files/{id}", "openai.files:file"),
    _route("DELETE", "/v1/files/{id}", "openai.files:delete_file"),
    _route("GET", "/v1/files/{id}/content", "openai.files:content"),
    _route("POST", "/v1/batches", "openai.files:add_batch"),
    _route("GET", "/v1/batches", "openai.files:batches", query=_PAGE),
    _route("GET", "/v1/batches/{id}", "openai.files:batch"),
    _route("POST", "/v1/batches/{id}/cancel", "openai.files:cancel_batch"),
    _generates("*/audio/transcriptions", "openai.transcriptions:transcriptions"),
    _generates("*/audio/translations", "openai.transcriptions:translations"),
    _route("POST", "/v1/embeddings", "openai.embeddings:embeddings", queued=True),
    _route("POST", "/embedding /embeddings", "llamacpp:embedding", queued=True),
    _generates("/v1/messages", "anthropic:messages"),
    _route("POST", "/v1/messages/count_tokens", "anthropic:count_tokens"),
    _route("GET", "*/models", "openai.models:models", query=("reload",)),
    _route("GET", "/models/sse", "openai.models:events", streams=True),
    _route("POST", "/models", "downloads:download"),
    _route("DELETE", "/models", "downloads:remove", query=_MODEL),
    _route("POST", "/models/load", "openai.models:load"),
    _route("POST", "/models/unload", "openai.models:unload"),
    _route("GET", "*/models/{name:path}", "openai.models:model"),
    _route("POST", "/rerank /reranking /v1/rerank /v1/reranking /v2/rerank", "ranking:rerank", queued=True),
    _route("POST", "/score /v1/score", "ranking:score", queued=True),
    _route("POST", "/classify /v1/classify", "ranking:classify", queued=True),
    _route("POST", "/pooling /v1/pooling", "ranking:pooling", queued=True),
    _route("POST", "/tokenize", "local:tokenize"),
    _route("POST", "/detokenize", "local:detokenize"),
    _route("GET", "/tokenizer_info", "local:tokenizer_info", query=_MODEL),
    _route("POST", "/apply-template", "local:apply_template"),
    _route("GET", "/props", "local:props", query=_MODEL),
    _route("POST", "/props", "llamacpp:set_props"),
    _route("GET", "/slots", "local:slots", query=_MODEL),
    _route("POST", "/slots/{id}", "llamacpp:slot_action", query=("action", *_MODEL)),
    _route("GET", "/lora-adapters", "local:adapters", query=_MODEL),
    _route("POST", "/lora-adapters", "local:set_adapters", query=_MODEL),
    _route("GET", "/metrics", "local:metrics"),
    _route("GET", "/health /v1/health", "local:health", public=True),
    _route("POST", "/predict", "vertex:predict", queued=True),
    _route("GET", "/tools", "tools:tools"),
    _route("POST", "/tools", "tools:run_tool"),
    _generates("/api/chat", "ollama:chat"),
    _generates("/api/generate", "ollama:generate"),
    _route("POST", "/api/embed", "ollama:embed", queued=True),
    _route("POST", "/api/embeddings", "ollama:embeddings", queued=True),
    _route("GET", "/api/tags", "ollama:tags"),
    _route("POST", "/api/show", "ollama:show"),
    _route("GET", "/api/ps", "ollama:running"),
    _route("GET", "/api/version", "ollama:version"),
    _route("POST", "/api/create", "ollama_models:create", streams=True),
    _route("POST", "/api/copy", "ollama_models:copy"),
    _route("POST", "/api/pull", "ollama_models:pull", streams=True),
    _route("POST", "/api/push", "ollama_models:push"),
    _route("DELETE", "/api/delete", "ollama_models:delete"),
    _route("HEAD", "/api/blobs/{digest}", "ollama_models:has_blob"),
    _route("POST", "/api/blobs/{digest}", "ollama_models:add_blob"),
)
