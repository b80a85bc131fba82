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
_MODEL = {
    "name": "model",
    "in": "query",
    "description": "Name or alias of a model; the first one if it is absent.",
    "schema": {"type": "string"},
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
            "schemas": {**components, "Error": _ERROR, "OllamaError": _OLLAMA_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, path: str, schema: Any) -> dict[str, Any]:
    is_ollama = path.startswith("/api/")
    error = {"$ref": f"#/components/schemas/{'OllamaError' if is_ollama else 'Error'}"}
    content: dict[str, Any] = {_content_type(route): {}}
    if route.streams:
        content["application/x-ndjson" if is_ollama else "text/event-stream"] = {}
    lines = (inspect.getdoc(loaded(route.handler)[0]) or "").splitlines()
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_"),
        "summary": lines[0] if lines else "",
        "responses": {
            "200": {"description": "Success.", "content": content},
            "default": {"description": "Error.", "content": {"application/json": {"schema": error}}},
        },
    }
    parameters = [*_parameters(path), *([_MODEL] if route.for_model else [])]
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


def _content_type(route: ApiRoute) -> str:
    return "text/plain" if route.name == "/metrics" else "application/json"
