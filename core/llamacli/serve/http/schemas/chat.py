"""Schema of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from llamacli.serve.http.schemas.common import MAX_TOOLS, MAX_TOP_LOGPROBS, Generation, Limit
from llamacli.serve.http.schemas.foreign import CACHED, GENERATION, Foreign, Refused, Schema

MAX_MESSAGES = 10_000


class ImageUrl(Schema, kw_only=True):
    """Address of a picture: a data URI, or http with `--media-url`."""

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("detail", "format"), "pictures are read as the model's encoder does"),
    }

    url: str


class InputAudio(Schema, kw_only=True):
    """Sound: a file in base64."""

    foreign: ClassVar[Foreign] = {"format": "the data tells it"}

    data: str


class ContentPart(Schema, kw_only=True):
    """Part of a message's content: `text`, `image_url` or `input_audio`."""

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), CACHED),
        "detail": "pictures are read as the model's encoder does",
        "uuid": "equal pictures are told by their content",
        **dict.fromkeys(("video_url", "file"), "such a part is refused by its type"),
    }

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    input_audio: InputAudio | None = None


class ForeignPart(ContentPart, kw_only=True):
    """Part of a request of another API; `place` is its field there."""

    place: str


class FunctionCall(Schema, kw_only=True):
    """Function that was called; its arguments are JSON text or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallOfTool(Schema, kw_only=True):
    """Tool call of an assistant's message."""

    foreign: ClassVar[Foreign] = {"index": "calls are in their order"}

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(Schema, kw_only=True):
    """Message of a conversation."""

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("refusal", "annotations", "reasoning_details", "provider_specific_fields"),
                        "part of a reply that templates do not read"),
        "audio": Refused("sound of the assistant is not read"),
        "function_call": Refused("use tool_calls"),
    }  # fmt: skip

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallOfTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Schema, kw_only=True):
    """Description of a function.

    Its name, and the JSON Schema of its arguments.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema, kw_only=True):
    """Tool that the model may call."""

    function: Function
    type: str = "function"


class FunctionName(Schema, kw_only=True):
    """Name of a function."""

    name: str


class ToolChoice(Schema, kw_only=True):
    """Choice of one function that must be called."""

    function: FunctionName
    type: str = "function"


class Prediction(Schema, kw_only=True):
    """Text that is expected as the reply, and drafted."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ChatRequest(Generation, kw_only=True):
    """Request of `/v1/chat/completions` and `/apply-template`.

    With `continue_final_message` the reply continues the last message, its reasoning if it has no content or if that is
    named; with `echo` it begins with that message's text.
    `documents` is a variable of the template. `include_reasoning` false leaves reasoning out of the response; with
    `reasoning_control` a request to `/v1/chat/completions/control` may end it. `reasoning_format` may be any of
    llama.cpp's that has it apart.
    """

    foreign: ClassVar[Foreign] = {
        **{name: why for name, why in GENERATION.items() if name != "prediction"},
        **dict.fromkeys(("functions", "function_call"), Refused("use tools and tool_choice")),
        **dict.fromkeys(("audio", "web_search_options"), Refused("models read and write text only")),
        "modalities": Refused("models read and write text only", (["text"],)),
        "verbosity": Refused("models have no such setting", ("medium",)),
        "add_special_tokens": Refused("the template writes special tokens"),
    }

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning_format: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
    reasoning_control: bool | None = None
    prediction: Prediction | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    echo: bool | None = None
