"""Errors as responses: their JSON in each API, and their headers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from llamacli.chat.openai import FieldError
from llamacli.errors import ChatTemplateError, ContextOverflowError, LlamaCliError
from llamacli.serve.errors import (
    ApiKeyError,
    BadRequestError,
    BodyTimeoutError,
    BodyTooLargeError,
    InternalError,
    PromptTooLongError,
    ServeError,
    ShuttingDownError,
)
from llamacli.serve.http.schemas.common import SAMPLING_FIELDS

_log = logging.getLogger(__name__)


def as_serve_error(error: Exception, request_id: str) -> ServeError:
    """Error that the client sees for an exception.

    Unexpected ones are logged with their traceback under the request's id, and the client gets a message without it.
    """
    match error:
        case ServeError():
            return error
        case ContextOverflowError():
            return PromptTooLongError(error.n_past + error.n_tokens, error.n_ctx)
        case ChatTemplateError():
            return BadRequestError(str(error), "messages", "chat_template_error")
        case FieldError():
            return BadRequestError(str(error), error.param, error.code)
        case LlamaCliError() if isinstance(error, ValueError):  # InvalidRequestError and its kind
            return bad_request(error)
        case _:
            _log.error("request %s failed", request_id, exc_info=error)
            return InternalError("the server failed to answer the request; its log has the reason")


def bad_request(error: Exception) -> BadRequestError:
    """The error for a client, with the sampling parameter it names."""
    name = str(error).partition(":")[0]
    return BadRequestError(str(error), name if name in SAMPLING_FIELDS.values() else None)


def openai_body(error: ServeError) -> dict[str, Any]:
    """Body of an error in the shape of OpenAI's API."""
    fields = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**fields, **error.details}}


def ollama_body(error: ServeError) -> dict[str, Any]:
    """Body of an error in the shape of ollama's API."""
    return {"error": str(error)}


def anthropic_body(error: ServeError) -> dict[str, Any]:
    """Body of an error in the shape of Anthropic's API."""
    kind = _ANTHROPIC.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error), **error.details}}


_ANTHROPIC = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
              413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
_FORMS = {"/api/": ollama_body, "/v1/messages": anthropic_body}


def error_body(path: str) -> Callable[[ServeError], dict[str, Any]]:
    """Function for the body of an error, by the request's path."""
    return next((form for prefix, form in _FORMS.items() if path.startswith(prefix)), openai_body)


def headers_of(error: ServeError) -> dict[str, str]:
    """Headers of a response with this error."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if isinstance(error, BodyTooLargeError | BodyTimeoutError | ShuttingDownError):
        headers["connection"] = "close"
    if isinstance(error, ApiKeyError):
        headers["www-authenticate"] = "Bearer"
    return headers
