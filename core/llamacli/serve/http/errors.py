"""Errors of HTTP requests, and their JSON in each API."""

from __future__ import annotations

import logging
from typing import Any

from llamacli.errors import ChatTemplateError, ContextOverflowError, LlamaCliError
from llamacli.serve.errors import InternalError, PromptTooLongError, ServeError, ShuttingDownError

_log = logging.getLogger(__name__)


class BadRequestError(ServeError):
    """The request is malformed or has an invalid value."""

    status, type, code = 400, "invalid_request_error", "invalid_value"

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class BodyTooLargeError(ServeError):
    """The body exceeds the server's limit."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class BodyTimeoutError(ServeError):
    """The body did not arrive in time."""

    status, type, code = 408, "invalid_request_error", "body_timeout"


class MediaTypeError(ServeError):
    """The body is not declared as JSON."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class ApiKeyError(ServeError):
    """The API key is missing or wrong."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class HostError(ServeError):
    """The header Host does not name this server."""

    status, type, code = 403, "invalid_request_error", "invalid_host"


class NotFoundError(ServeError):
    """The server has no such path."""

    status, type, code = 404, "not_found_error", "not_found"


class MethodError(ServeError):
    """The path does not take this method."""

    status, type, code = 405, "not_found_error", "method_not_allowed"


class DisabledError(ServeError):
    """The endpoint is switched off, or not implemented."""

    status, type, code = 501, "not_supported_error", "not_supported"


def as_serve_error(error: Exception, request_id: str) -> ServeError:
    """Error that the client sees for an exception.

    Unexpected ones are logged with their traceback under the request's id, and the client gets a message without it.
    """
    match error:
        case ServeError():
            return error
        case ContextOverflowError():
            return PromptTooLongError(error.n_past + error.n_tokens, error.seq_len)
        case ChatTemplateError():
            return BadRequestError(str(error), "messages", "chat_template_error")
        case LlamaCliError() if isinstance(error, ValueError):  # InvalidRequestError and its kind
            return BadRequestError(str(error))
        case _:
            _log.error("request %s failed", request_id, exc_info=error)
            return InternalError("the server failed to answer the request; its log has the reason")


def openai_body(error: ServeError) -> dict[str, Any]:
    """Body of an error in the shape of OpenAI's API."""
    fields = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**fields, **error.details}}


def ollama_body(error: ServeError) -> dict[str, Any]:
    """Body of an error in the shape of ollama's API."""
    return {"error": str(error)}


def headers_of(error: ServeError) -> dict[str, str]:
    """Headers of a response with this error."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if isinstance(error, BodyTooLargeError | BodyTimeoutError | ShuttingDownError):
        headers["connection"] = "close"
    if isinstance(error, ApiKeyError):
        headers["www-authenticate"] = "Bearer"
    return headers
