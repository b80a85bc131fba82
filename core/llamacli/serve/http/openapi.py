"""OpenAPI description, made from the routes and their schemas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from llamacli.serve.http.local import version
from llamacli.serve.http.routes import ApiRoute, loaded

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_QUERY: dict[str, tuple[str, dict[str, Any]]] = {
    "action": ("What to do with the slot.", {"type": "string", "enum": ["save", "restore", "erase"]}),
    "after": ("Id behind which a page begins.", {"type": "string"}),
    "conv_id": ("Name of a stream, as in the header X-Conversation-Id of its request.", {"type": "string"}),
    "from": ("Offset of the first byte.", {"type": "integer", "minimum": 0, "default": 0}),
    "limit": ("Objects of a page.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    "model": ("Name or alias of a model; the first one if it is absent.", {"type": "string"}),
    "order": ("Order by age.", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    "purpose": ("Purpose of the files.", {"type": "string"}),
    "reload": ("1 reads the sources of models again.", {"type": "string"}),
}
"""Query parameters: description and schema."""
_REQUIRED = ("action", "conv_id")
_CONTENT_TYPES = {"/metrics": "text/plain", "/v1/files/{id}/content": "application/octet-stream"}
"""Content types that are not JSON, by the name of a route."""
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
_OLLAMA_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}


def description(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """OpenAPI 3.1 document."""
    routes = list(routes)
    kinds = list(dict.fromkeys(kind for route in routes if (kind := loaded(route.handler)[1]) is not None))
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas: dict[Any, Any] = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for path in route.paths:
            operation = _operation(route, path, schemas.get(loaded(route.handler)[1]))
            paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "llamacli", "version": version()},
        "paths": paths,
        "components": {
            "schemas": {
                **components,
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                "OllamaError": _OLLAMA_ERROR,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, path: str, schema: Any) -> dict[str, Any]:
    is_ollama, is_anthropic = path.startswith("/api/"), path.startswith("/v1/messages")
    kind = "OllamaError" if is_ollama else "AnthropicError" if is_anthropic else "Error"
    error = {"$ref": f"#/components/schemas/{kind}"}
    content: dict[str, Any] = {_content_type(route): {}} if route.status != 204 else {}
    if route.streams:
        content["application/x-ndjson" if is_ollama else "text/event-stream"] = {}
    lines = (inspect.getdoc(loaded(route.handler)[0]) or "").splitlines()
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_"),
        "summary": lines[0] if lines else "",
        "responses": {
            str(route.status): {"description": "Success.", **({"content": content} if content else {})},
            "default": {"description": "Error.", "content": {"application/json": {"schema": error}}},
        },
    }
    parameters = [*_parameters(path), *map(_query, route.query)]
    if parameters:
        operation["parameters"] = parameters
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if not route.public:
        operation["security"] = [{}, {"key": []}]
    return operation


def _parameters(path: str) -> Iterator[dict[str, Any]]:
    for found in _PARAMETER.finditer(path):
        yield {"name": found[1], "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(name: str) -> dict[str, Any]:
    text, schema = _QUERY.get(name, ("", {"type": "string"}))
    return {"name": name, "in": "query", "description": text, "required": name in _REQUIRED, "schema": schema}


def _content_type(route: ApiRoute) -> str:
    return _CONTENT_TYPES.get(route.name, "application/json")
