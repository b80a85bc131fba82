"""Endpoint `/v1/responses`: translated to a chat, at once or in the background."""

from __future__ import annotations

import asyncio
from typing import Any

from llamacli.serve.errors import (
    BadRequestError,
    LoadingError,
    QueueFullError,
    QueueTimeoutError,
    ShuttingDownError,
    required,
)
from llamacli.serve.http.call import Call
from llamacli.serve.http.errors import as_serve_error
from llamacli.serve.http.generation import prepared
from llamacli.serve.http.inner import Exchange
from llamacli.serve.http.openai.history import Turn, begin, keep, keep_in_conversation, resumed
from llamacli.serve.http.openai.response_shapes import ResponseShapes
from llamacli.serve.http.schemas.chat import (
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
from llamacli.serve.http.schemas.common import Sampling
from llamacli.serve.http.schemas.responses import InputItem, InputPart, NamedTool, ResponsesRequest
from llamacli.serve.http.sse import typed_event
from llamacli.serve.http.state import Server
from llamacli.serve.requests import Done


async def responses(call: Call, request: ResponsesRequest) -> None:
    """Reply to a conversation of items, whole or as a stream."""
    turn = await begin(call, request)
    if request.background:
        await call.respond(await begin_background(call, turn))
        return
    made = await prepared(call, as_chat(turn.whole))
    async with call.run(made.generation) as events:
        shapes = ResponseShapes(request, made.generation, made.info)
        if not request.stream:
            async for one in events:
                for _ in shapes.events(one):
                    pass
            await keep(call, turn, shapes.response())
            await call.respond(shapes.response())
            return

        async with call.stream(error_event=lambda error: typed_event(shapes.error(error))) as write:
            for first in shapes.first_events():
                await write(typed_event(first))
            async for one in events:
                data = b"".join(map(typed_event, shapes.events(one)))
                if isinstance(one, Done):
                    await keep(call, turn, shapes.response())
                if data:
                    await write(data)


async def begin_background(call: Call, turn: Turn) -> dict[str, Any]:
    """Begin a response without a client; the object, which is queued."""
    request = turn.request
    if request.stream:
        raise BadRequestError("stream: a background response is polled", "stream", "unsupported_parameter")
    if request.store is False:
        raise BadRequestError("store: a background response is stored", "store")
    as_chat(turn.whole)
    info = call.server.find_model(request.model)
    call.server.jobs.expect_room()
    queued = ResponseShapes(request, None, info).end("queued")
    await keep(call, turn, queued, is_open=True)
    start_background(call.server, call.key, call.owner, queued)
    return queued


def start_background(server: Server, key: str, owner: str, queued: dict[str, Any]) -> None:
    """Run a stored response that is queued."""
    exchange = Exchange("/v1/responses", b"", queued["id"], key, owner)
    server.jobs.start(queued["id"], _run_background(server, exchange, queued))


async def _run_background(server: Server, exchange: Exchange, queued: dict[str, Any]) -> None:
    """Run a background response, and store its end.

    A server that shuts down leaves it for the next.
    """
    name, store = exchange.request_id, server.store
    call = Call(server, exchange.scope, exchange.receive, exchange.send)
    call.check_key()
    await exchange.receive()  # there is no body
    ended = {**queued, "status": "failed"}
    try:
        turn = await resumed(call, name)
        while True:
            try:
                ended = await _generated(call, turn, queued)
                break
            except (LoadingError, QueueFullError, QueueTimeoutError) as error:
                await asyncio.sleep(error.retry_after or 1)
    except ShuttingDownError:
        return
    except asyncio.CancelledError:
        raise
    except Exception as error:
        failure = as_serve_error(error, name)
        ended["error"] = {"code": failure.code or failure.type, "message": str(failure)}
    finally:
        call.close()
        call.access.write()
    await server.run(store.update, name, ended, is_open=False)


async def _generated(call: Call, turn: Turn, queued: dict[str, Any]) -> dict[str, Any]:
    """Response object of a whole background response."""
    made = await prepared(call, as_chat(turn.whole))
    async with call.run(made.generation) as events:
        shapes = ResponseShapes(turn.request, made.generation, made.info, queued["id"])
        job = call.server.jobs.get(queued["id"])
        if job is not None:
            job.shown = shapes.response
        async for one in events:
            for _ in shapes.events(one):
                pass
    ended = {**shapes.response(), "created_at": queued["created_at"]}
    await keep_in_conversation(call, turn, ended)
    return ended


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat request that means the same. Raises BadRequestError."""
    items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    messages = _messages(items)
    if request.instructions:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    style = None if request.text is None else request.text.format
    return ChatRequest(
        messages=messages,
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        **{name: getattr(request, name) for name in Sampling.__struct_fields__},
        response_format=None if style is None else style.as_response_format("text.format"),
        tools=_tools(request),
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        stream=request.stream,
        timings_per_token=request.timings_per_token,
        return_progress=request.return_progress,
    )


def _choice(choice: str | NamedTool | None) -> str | ToolChoice | None:
    if not isinstance(choice, NamedTool):
        return choice
    return ToolChoice(function=FunctionName(name=required(choice.name, "tool_choice.name")))


def _tools(request: ResponsesRequest) -> list[Tool] | None:
    tools = []
    for i, tool in enumerate(request.tools or ()):
        if tool.type != "function" or not tool.name:
            raise BadRequestError(f"tools[{i}]: only functions with a name are supported", f"tools[{i}]",
                                  "unsupported_parameter")  # fmt: skip
        tools.append(Tool(function=Function(name=tool.name, description=tool.description, parameters=tool.parameters)))
    return tools or None


def _messages(items: list[InputItem]) -> list[ChatMessage]:
    """Messages of a chat.

    Reasoning and calls belong to the assistant's message beside them.
    """
    messages: list[ChatMessage] = []
    for i, item in enumerate(items):
        path = f"input[{i}]"
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        match item.type:
            case "message":
                role = required(item.role, f"{path}.role")
                content = _content(item.content, f"{path}.content")
                if role == "assistant" and last is not None and last.content is None and not last.tool_calls:
                    last.content = content
                else:
                    messages.append(ChatMessage(role=role, content=content))
            case "function_call":
                function = FunctionCall(name=required(item.name, f"{path}.name"), arguments=item.arguments)
                if last is None:
                    last = ChatMessage(role="assistant")
                    messages.append(last)
                last.tool_calls = [*(last.tool_calls or ()), CallOfTool(function=function, id=item.call_id)]
            case "function_call_output":
                content = _content(item.output, f"{path}.output")
                messages.append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
            case "reasoning":
                if text := _reasoning(item.content or item.summary or ""):
                    messages.append(ChatMessage(role="assistant", reasoning_content=text))
    if not messages:
        raise BadRequestError("input: it has no message", "input")
    return messages


def _reasoning(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)


def _content(content: str | list[InputPart] | None, path: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts: list[InputPart] = required(content, path)
    return [_part(part, f"{path}[{i}]") for i, part in enumerate(parts)]


def _part(part: InputPart, place: str) -> ForeignPart:
    if part.type == "input_image":
        place = f"{place}.image_url"
        return ForeignPart(type="image_url", image_url=required(part.image_url, place), place=place)
    if part.type == "input_audio":
        place = f"{place}.input_audio"
        return ForeignPart(type="input_audio", input_audio=required(part.input_audio, place), place=place)
    text = part.refusal if part.type == "refusal" else part.text
    return ForeignPart(type=part.type if text is None else "text", text=text, place=place)
