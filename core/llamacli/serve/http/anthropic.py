"""Endpoints of Anthropic's API, `/v1/messages`: translated to a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from llamacli.serve.errors import BadRequestError, required
from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import anthropic_body
from llamacli.serve.http.generation import Prepared, prepared, rendered
from llamacli.serve.http.replies import call_id
from llamacli.serve.http.schemas.chat import (
    MAX_MESSAGES,
    CallOfTool,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ForeignPart,
    Function,
    FunctionCall,
    FunctionName,
    Tool,
    ToolChoice,
)
from llamacli.serve.http.schemas.common import (
    MAX_STOPS,
    MAX_TOOLS,
    Budget,
    Count,
    FlatFormat,
    Sampling,
    Text,
)
from llamacli.serve.http.schemas.foreign import CACHED, Foreign, Refused, Schema
from llamacli.serve.http.sse import typed_event
from llamacli.serve.requests import ArgumentsDelta, Done, Event, Finished, TextDelta, ToolCallDelta, Usage

_SERVER_TOOLS = Refused("the client calls tools")
_NO_THREAD = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


# --- schemas


class Source(Schema, kw_only=True):
    """Source of a picture: `base64` or `url`."""

    type: str = ""
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(Schema, kw_only=True):
    """Content block: `text`, `image`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`."""

    foreign: ClassVar[Foreign] = {
        "cache_control": CACHED,
        "is_error": "templates do not read it; the content says so",
        **dict.fromkeys(("signature", "data"), "templates do not read it"),
        **dict.fromkeys(("citations", "caller"), "part of a reply that templates do not read"),
        **dict.fromkeys(("title", "context"), "such a block is refused by its type"),
    }

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    thinking: str | None = None
    source: Source | None = None


class Message(Schema, kw_only=True):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Schema, kw_only=True):
    """Tool with a JSON Schema of its input; others are refused."""

    foreign: ClassVar[Foreign] = {
        "cache_control": CACHED,
        **dict.fromkeys(("strict", "input_examples", "eager_input_streaming"), "calls follow their schemas"),
        **dict.fromkeys(("defer_loading", "allowed_callers"), _SERVER_TOOLS),
    }

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Choice(Schema, kw_only=True):
    """Choice of tools: `auto`, `any`, `tool` with a name, or `none`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Schema, kw_only=True):
    """Reasoning with a budget; `display` may be `omitted`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Budget | None = None
    display: str | None = None


class OutputConfig(Schema, kw_only=True):
    """Effort of the reasoning, and format of the reply."""

    effort: str | None = None
    format: FlatFormat | None = None


class MessagesRequest(Sampling, kw_only=True):
    """Request of `/v1/messages` and `/v1/messages/count_tokens`.

    A last message of the assistant is continued. Without `max_tokens` the reply may fill the context.
    """

    foreign: ClassVar[Foreign] = {
        **dict.fromkeys(("metadata", "user_profile_id", "workspace_id"), "clients are told apart by API key"),
        "cache_control": CACHED,
        **dict.fromkeys(("service_tier", "speed", "inference_geo", "fallbacks", "billing_policy"), "there is one"),
        **dict.fromkeys(("diagnostics", "fallback_credit_token"), "nothing is stored"),
        "context_management": "the conversation is read as it is sent",
        **dict.fromkeys(("container", "mcp_servers"), _SERVER_TOOLS),
        "compaction": Refused("conversations are not summarized"),
        "thread": Refused("send the whole conversation", details={"details": _NO_THREAD}),  # then the package does
    }

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    max_tokens: Count | None = None
    system: str | list[Block] | None = None
    stop_sequences: Annotated[list[Text], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: FlatFormat | None = None


# --- requests


async def messages(call: Call, request: MessagesRequest) -> None:
    """Reply to a conversation of blocks, whole or as a stream."""
    made = await prepared(call, as_chat(request))
    async with call.run(made.generation) as events:
        shapes = MessageShapes(request, made)
        if not request.stream:
            async for one in events:
                for _ in shapes.events(one):
                    pass
            await call.respond(shapes.message())
            return
        async with call.stream(error_event=lambda error: typed_event(anthropic_body(error))) as write:
            await write(typed_event({"type": "message_start", "message": shapes.message()}))
            async for one in events:
                if data := b"".join(map(typed_event, shapes.events(one))):
                    await write(data)


async def count_tokens(call: Call, request: MessagesRequest) -> None:
    """Number of tokens of a conversation."""
    chat = as_chat(request)
    info, model = await call.model(chat.model)
    prompt = await rendered(call, chat, info, model, fits=False)
    await call.respond({"input_tokens": len(prompt.ids)})


def as_chat(request: MessagesRequest) -> ChatRequest:
    """The chat request that means the same. Raises BadRequestError."""
    turns = [ChatMessage(role="system", content=_content(request.system, "system"))] if request.system else []
    for i, message in enumerate(request.messages):
        turns += _turns(message, f"messages[{i}]")
    last = turns[-1]
    choice, thinking, output = request.tool_choice, request.thinking, request.output_config or OutputConfig()
    style = output.format or request.output_format
    chat = ChatRequest(
        messages=turns,
        model=request.model,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        **{name: getattr(request, name) for name in Sampling.__struct_fields__},
        response_format=None if style is None else style.as_response_format("output_config.format"),
        tools=_tools(request.tools or ()),
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use if choice is not None else None,
        enable_thinking=None if thinking is None else thinking.type != "disabled",
        reasoning_effort=output.effort,
        continue_final_message=last.role == "assistant" and not last.tool_calls,
    )
    if thinking is not None and thinking.budget_tokens is not None:
        chat.thinking_budget_tokens = thinking.budget_tokens
    return chat


def _turns(message: Message, path: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results: list[ChatMessage] = []
    texts: list[Block] = []
    calls: list[CallOfTool] = []
    thoughts: list[str] = []
    for i, block in enumerate(message.content):
        place = f"{path}.content[{i}]"
        match block.type:
            case "tool_result" if message.role == "user":
                content = _content(block.content or "", f"{place}.content")
                results.append(ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
            case "tool_use" if message.role == "assistant":
                function = FunctionCall(name=required(block.name, f"{place}.name"), arguments=block.input or {})
                calls.append(CallOfTool(function=function, id=block.id))
            case "thinking" | "redacted_thinking" if message.role == "assistant":
                thoughts.append(block.thinking or "")
            case _:
                texts.append(block)
    own = ChatMessage(role=message.role, content=_content(texts, f"{path}.content"))
    own.tool_calls, own.reasoning_content = calls or None, "\n".join(filter(None, thoughts)) or None
    return [*results, *([own] if texts or calls or thoughts or not results else [])]


def _content(content: str | Sequence[Block], path: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [_part(block, f"{path}[{i}]") for i, block in enumerate(content)]


def _part(block: Block, place: str) -> ForeignPart:
    if block.type == "image":
        return ForeignPart(type="image_url", image_url=_address(block.source, place), place=place)
    return ForeignPart(type=block.type, text=block.text, place=place)


def _address(source: Source | None, path: str) -> str:
    kind = "" if source is None else source.type
    given = None if source is None else {"base64": source.data, "url": source.url}.get(kind)
    if given is None:
        raise BadRequestError(f"{path}.source: it must have base64 data or a url", f"{path}.source", "invalid_image")
    return given if kind == "url" else f"data:;base64,{given}"


def _tools(tools: Sequence[MessagesTool]) -> list[Tool] | None:
    for i, tool in enumerate(tools):
        if tool.type != "custom" or tool.input_schema is None:
            reason = "only tools with an input_schema are supported, none that run on a server"
            raise BadRequestError(f"tools[{i}]: {reason}", f"tools[{i}]", "unsupported_parameter")
    return [
        Tool(function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema))
        for tool in tools
    ] or None


def _choice(choice: Choice) -> str | ToolChoice:
    if choice.type == "tool":
        return ToolChoice(function=FunctionName(name=required(choice.name, "tool_choice.name")))
    return "required" if choice.type == "any" else choice.type


# --- responses


class MessageShapes:
    """Message of one request, and the events of its stream.

    One block is open at a time: text of another kind closes it.
    """

    def __init__(self, request: MessagesRequest, made: Prepared):
        self._made, self._blocks = made, list[dict[str, Any]]()
        self._shows_thinking = request.thinking is None or request.thinking.display != "omitted"
        self._is_open, self._n_sent = False, 0
        self._reason: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self._usage = Usage(sum(map(len, made.generation.prompts)))

    def message(self) -> dict[str, Any]:
        """The message as it is now."""
        head = {"id": f"msg_{self._made.generation.id}", "type": "message", "role": "assistant"}
        return {**head, "model": self._made.info.name, "content": self._blocks, **self._reason, "usage": self._counts()}

    def _counts(self) -> dict[str, int]:
        usage = self._usage
        read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached}
        return {"input_tokens": usage.prompt - usage.cached, **read, "output_tokens": usage.generated}

    def events(self, one: Event) -> Iterator[dict[str, Any]]:
        """Events of an event of the engine."""
        match one:
            case TextDelta() if one.text and (self._shows_thinking or not one.reasoning):
                kind = "thinking" if one.reasoning else "text"
                if not self._is_open or self._blocks[-1]["type"] != kind:
                    empty = {"signature": ""} if one.reasoning else {}
                    yield from self._open({"type": kind, kind: "", **empty})
                self._blocks[-1][kind] += one.text
                yield self._delta(f"{kind}_delta", kind, one.text)
            case ArgumentsDelta():
                yield from self._call(one, one.name, one.text)
            case ToolCallDelta():
                yield from self._call(one, one.call.name, one.call.text[self._n_sent :])
                self._blocks[-1]["input"] = one.call.arguments
                yield from self._close()
            case Finished():
                yield from self._close()
                ends = {"length": "max_tokens", "tool_calls": "tool_use"}
                reason = ends.get(one.reason, "stop_sequence" if one.stop_string else "end_turn")
                self._reason = {"stop_reason": reason, "stop_sequence": one.stop_string}
            case Done():
                self._usage = one.usage
                yield {"type": "message_delta", "delta": self._reason, "usage": self._counts()}
                yield {"type": "message_stop"}

    def _call(self, one: ArgumentsDelta | ToolCallDelta, name: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open or self._blocks[-1]["type"] != "tool_use":
            yield from self._open(
                {"type": "tool_use", "id": call_id(self._made.generation, one), "name": name, "input": {}}
            )
        self._n_sent += len(text)
        if text:
            yield self._delta("input_json_delta", "partial_json", text)

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open, self._n_sent = True, 0
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open, self._n_sent = False, 0
        if self._blocks[-1]["type"] == "thinking":
            yield self._delta("signature_delta", "signature", "")
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
