"""Schema of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from llamacli.serve.http.schemas.chat import MAX_MESSAGES
from llamacli.serve.http.schemas.common import MAX_TOOLS, Count, sampling_struct


class InputPart(msgspec.Struct, kw_only=True):
    """Part of an item's content: `input_text`, `output_text`, `text`, `reasoning_text` or `refusal`."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """Item of a conversation.

    A message, a function call, the call's output, or reasoning.
    """

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """Tool; only those of type `function` are supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, kw_only=True):
    """Choice of one function that must be called."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """Format of the text: `text`, `json_object` or `json_schema`."""

    type: str
    name: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """Options of the text."""

    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Options of the reasoning."""

    effort: str | None = None


_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


class ResponsesRequest(sampling_struct(*_SAMPLING), msgspec.Struct, kw_only=True):  # type: ignore[misc]
    """Request of `/v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    seed: Annotated[int, Meta(ge=-1)] | None = None


UNSUPPORTED = ("previous_response_id", "conversation", "background", "prompt")
"""Fields of OpenAI's API that need what this server does not keep."""
