"""Schema of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from llamacli.serve.http.schemas.chat import MAX_MESSAGES, InputAudio
from llamacli.serve.http.schemas.common import MAX_TOOLS, Count, FlatFormat, Sampling
from llamacli.serve.http.schemas.foreign import CACHED, GENERATION, Foreign, Refused, Schema

MAX_ITEMS = 100
"""Items that are added to a conversation at once."""


class InputPart(Schema, kw_only=True):
    """Part of an item's content.

    `input_text`, `output_text`, `text`, `reasoning_text`, `refusal`, `input_image` for models that see, or
    `input_audio` for models that hear.
    """

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("annotations", "logprobs"), "part of a reply that templates do not read"),
        **dict.fromkeys(("file_data", "filename", "file_url"), "such a part is refused by its type"),
        "detail": "pictures are read as the model's encoder does",
        "prompt_cache_breakpoint": CACHED,
        "file_id": Refused("the server keeps no files: send a data URI as image_url"),
    }  # fmt: skip

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    input_audio: InputAudio | None = None


class InputItem(Schema, kw_only=True):
    """Item of a conversation.

    A message, a function call, the call's output, or reasoning.
    """

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("id", "status", "encrypted_content", "phase"), "part of a reply that templates do not read"),
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponsesTool(Schema, kw_only=True):
    """Tool; only those of type `function` are supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Schema, kw_only=True):
    """Choice of one function that must be called."""

    type: str
    name: str | None = None


class TextFormat(FlatFormat, kw_only=True):
    """Format of the text."""

    foreign: ClassVar[Foreign] = {"description": "only schemas constrain texts"}

    name: str | None = None
    strict: bool | None = None


class TextOptions(Schema, kw_only=True):
    """Options of the text."""

    foreign: ClassVar[Foreign] = {"verbosity": Refused("models have no such setting", ("medium",))}

    format: TextFormat | None = None


class ReasoningOptions(Schema, kw_only=True):
    """Options of the reasoning."""

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("summary", "generate_summary"), "reasoning is shown whole"),
    }

    effort: str | None = None


class ConversationName(Schema, kw_only=True):
    """Conversation by its id."""

    id: str


class ResponsesRequest(Sampling, kw_only=True):
    """Request of `/v1/responses`; `timings_per_token` and `return_progress` are llama.cpp's."""

    foreign: ClassVar[Foreign] = {
        **GENERATION,
        "prompt": Refused("there are no stored templates of prompts"),
        "include": "responses have all that there is",
        "stream_options": "events are not padded",
        "truncation": Refused("prompts are not truncated", ("disabled",)),
        "context_management": Refused("conversations are not summarized"),
        "max_tool_calls": Refused("the client calls tools"),
        "top_logprobs": Refused("/v1/chat/completions has it"),
        **dict.fromkeys(("grammar", "json_schema", "stop", "n"), Refused("/v1/chat/completions has it")),
    }  # fmt: skip

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
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    background: bool | None = None


class ConversationRequest(Schema, kw_only=True):
    """Request of `POST /v1/conversations`."""

    items: Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)] | None = None
    metadata: dict[str, Any] | None = None


class ConversationChange(Schema, kw_only=True):
    """Request of `POST /v1/conversations/ID`."""

    metadata: dict[str, Any]


class ItemsRequest(Schema, kw_only=True):
    """Request of `POST /v1/conversations/ID/items`."""

    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
