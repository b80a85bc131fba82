"""Schema of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from llamacli.serve.http.schemas.common import MAX_TOOLS, MAX_TOP_LOGPROBS, Count, Generation

MAX_MESSAGES = 10_000


class ContentPart(msgspec.Struct, kw_only=True):
    """Part of a message's content; only those of type `text` are supported."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """Function that was called; its arguments are JSON text or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallOfTool(msgspec.Struct, kw_only=True):
    """Tool call of an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """Message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallOfTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct, kw_only=True):
    """Description of a function.

    Its name, and the JSON Schema of its arguments.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Tool that the model may call."""

    function: Function
    type: str = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    """Name of a function."""

    name: str


class ToolChoice(msgspec.Struct, kw_only=True):
    """Choice of one function that must be called."""

    function: FunctionName
    type: str = "function"


class ChatRequest(Generation, kw_only=True):
    """Request of `/v1/chat/completions` and `/apply-template`.

    With `continue_final_message` the reply continues the last message, its reasoning if it has no content or if that is
    named; with `echo` it begins with that message's text.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    echo: bool | None = None


UNSUPPORTED = ("functions", "function_call", "audio", "web_search_options")
"""Fields of OpenAI's API that are refused rather than ignored: their absence would change the reply."""
