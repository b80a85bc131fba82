"""Errors of the server, with OpenAI's status, type and code."""

from __future__ import annotations

from typing import Any, TypeVar

from llamacli.errors import LlamaCliError

T = TypeVar("T")


class ServeError(LlamaCliError):
    """Base class of the errors that a client of the server sees.

    - `status`: HTTP status, `type` and `code`: those of the error object of the OpenAI API.
    - `param`: the field of the request at fault, such as `messages[0].role`, None for none.
    - `retry_after`: seconds for the header Retry-After, None for none.
    - `details`: further fields of the error object.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None
    param: str | None = None

    def __init__(self, message: str, *, retry_after: int | None = None):
        self.retry_after = retry_after
        self.details: dict[str, Any] = {}
        super().__init__(message)

    def __reduce__(self) -> Any:  # pickling by the arguments of __init__ would need them kept
        return _restored, (type(self), str(self), self.__dict__)


def _restored(kind: type[ServeError], message: str, state: dict[str, Any]) -> ServeError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


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


class HeadTimeoutError(ServeError):
    """The head of the request did not arrive in time."""

    status, type, code = 408, "invalid_request_error", "head_timeout"


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


def required(value: T | None, path: str) -> T:
    """Value of a field that must be there. Raises BadRequestError."""
    if value is None:
        raise BadRequestError(f"{path}: it is required", path, "missing_required_parameter")
    return value


class UnknownModelError(ServeError):
    """The server has no model of this name."""

    status, type, code = 404, "not_found_error", "model_not_found"


class UnknownObjectError(ServeError):
    """The server has stored no such response, conversation, file or batch."""

    status, type, code = 404, "invalid_request_error", "not_found"


class ConflictError(ServeError):
    """The stored object is not in a state for this."""

    status, type, code = 409, "invalid_request_error", "conflict"


class StoreError(ServeError):
    """The store cannot be read or written."""

    status, type, code = 500, "server_error", "store_failed"


class StorageFullError(StoreError):
    """The store has reached its limit, or its disk is full."""

    status, type, code = 507, "server_error", "storage_full"


class PromptTooLongError(ServeError):
    """The prompt does not fit into the context.

    `at_least`: the prompt was not tokenized whole. The message has the words by which agents of OpenAI's and of
    llama.cpp's servers recognise it, the type is llama.cpp's and the code OpenAI's.
    """

    status, type, code = 400, "exceed_context_size_error", "context_length_exceeded"

    def __init__(self, n_prompt: int, n_ctx: int, *, at_least: bool = False):
        about = "at least " if at_least else ""
        super().__init__(
            f"this model's maximum context length is {n_ctx} tokens: the prompt of {about}{n_prompt} tokens, with room "
            "for one more, is too large: it exceeds the available context size"
        )
        self.details = {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}


class QueueFullError(ServeError):
    """The queue, or the share of a key in it, is full."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class RateLimitError(ServeError):
    """The API key has reached a limit of its own."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class QueueTimeoutError(ServeError):
    """The request has waited too long and was not begun."""

    status, type, code = 503, "unavailable_error", "queue_timeout"


class LoadingError(ServeError):
    """The model is being loaded."""

    status, type, code = 503, "unavailable_error", "loading"


class ModelTooLargeError(ServeError):
    """The model does not fit into the memory for models."""

    status, type, code = 507, "server_error", "model_too_large"


class StageLostError(ServeError):
    """A worker that computes layers of the model is lost or wrong."""

    status, type, code = 503, "unavailable_error", "stage_lost"


class ShuttingDownError(ServeError):
    """The server is shutting down."""

    status, type, code = 503, "unavailable_error", "shutting_down"


class NotSupportedError(ServeError):
    """The model lacks this endpoint, or the server has switched it off."""

    status, type, code = 501, "not_supported_error", "not_supported"


class InternalError(ServeError):
    """Defect of the server, which the log describes."""
