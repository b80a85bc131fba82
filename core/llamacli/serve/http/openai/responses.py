"""Endpoint `/v1/responses`: translated to a chat."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from llamacli.chat.openai import text_of_parts
from llamacli.serve.errors import BadRequestError, ServeError
from llamacli.serve.http.call import Call
from llamacli.serve.http.generation import prepared
from llamacli.serve.http.replies import call_id, llamacpp_progress, llamacpp_timings, progress_timings
from llamacli.serve.http.schemas.chat import (
    CallOfTool,
    ChatMessage,
    ChatRequest,
    Function,
    FunctionCall,
    FunctionName,
    Tool,
    ToolChoice,
)
from llamacli.serve.http.schemas.common import ResponseFormat, Sampling, SchemaFormat
from llamacli.serve.http.schemas.responses import InputItem, InputPart, ResponsesRequest
from llamacli.serve.http.sse import event
from llamacli.serve.requests import (
    ArgumentsDelta,
    Done,
    Event,
    Finished,
    GenerationRequest,
    ModelInfo,
    PromptProgress,
    TextDelta,
    TokenTimings,
    ToolCallDelta,
    Usage,
)


async def responses(call: Call, request: ResponsesRequest) -> None:
    """Reply to a conversation of items, whole or as a stream."""
    made = await prepared(call, as_chat(request))
    async with call.run(made.generation) as events:
        shapes = ResponseShapes(request, made.generation, made.info)
        if not request.stream:
            async for one in events:
                for _ in shapes.events(one):
                    pass
            await call.respond(shapes.response())
            return

        async with call.stream(error_event=lambda error: _formatted(shapes.error(error))) as write:
            for first in shapes.first_events():
                await write(_formatted(first))
            async for one in events:
                data = b"".join(map(_formatted, shapes.events(one)))
                if data:
                    await write(data)


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat request that means the same. Raises BadRequestError."""
    items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    messages = _messages(items)
    if request.instructions:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    choice = request.tool_choice
    return ChatRequest(
        messages=messages,
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        **{name: getattr(request, name) for name in Sampling.__struct_fields__},
        response_format=_format(request),
        tools=_tools(request),
        tool_choice=choice if choice is None or isinstance(choice, str) else ToolChoice(function=_name(choice.name)),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        stream=request.stream,
        timings_per_token=request.timings_per_token,
        return_progress=request.return_progress,
    )


def _name(name: str | None) -> FunctionName:
    if name is None:
        raise BadRequestError("tool_choice.name: it is required", "tool_choice.name", "missing_required_parameter")
    return FunctionName(name=name)


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    if request.text is None or request.text.format is None:
        return None
    given = request.text.format
    named = SchemaFormat(schema=given.schema, name=given.name) if given.type == "json_schema" else None
    return ResponseFormat(type=given.type, json_schema=named)


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
    reasoning: str | None = None
    for i, item in enumerate(items):
        path = f"input[{i}]"
        match item.type:
            case "message":
                if item.role is None:
                    raise BadRequestError(f"{path}.role: it is required", f"{path}.role", "missing_required_parameter")
                message = ChatMessage(role=item.role, content=_text(item.content, f"{path}.content"))
                if item.role == "assistant":
                    message.reasoning_content, reasoning = reasoning, None
                messages.append(message)
            case "function_call":
                if item.name is None:
                    raise BadRequestError(f"{path}.name: it is required", f"{path}.name", "missing_required_parameter")
                call = CallOfTool(function=FunctionCall(name=item.name, arguments=item.arguments), id=item.call_id)
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant", reasoning_content=reasoning))
                    reasoning = None
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
            case "function_call_output":
                text = _text(item.output, f"{path}.output")
                messages.append(ChatMessage(role="tool", content=text, tool_call_id=item.call_id))
            case "reasoning":
                reasoning = _text(item.content or item.summary, path) or None
            case _:
                raise BadRequestError(
                    f"{path}.type is {item.type!r}; allowed: message, function_call, function_call_output, reasoning",
                    f"{path}.type",
                    "unsupported_content",
                )
    if not messages:
        raise BadRequestError("input: it has no message", "input")
    return messages


def _text(content: str | list[InputPart] | None, path: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    parts = ((part.type, part.refusal if part.type == "refusal" else part.text) for part in content)
    return text_of_parts(parts, path)


def _shown(value: Any) -> Any:
    """Part of a request as JSON data, for the response."""
    return msgspec.to_builtins(value)


def _formatted(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


class ResponseShapes:
    """Response object of one request, and the events of its stream.

    Items of the output are the reasoning, the message and the function calls, in the order in which they come. One is
    open at a time: text for another one closes it.
    """

    def __init__(self, request: ResponsesRequest, generation: GenerationRequest, info: ModelInfo):
        self._request, self._generation, self._info = request, generation, info
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._text: list[str] = []
        self._is_open = False
        self._number = 0
        self._status = "in_progress"
        self._usage: Usage | None = None
        self._times: dict[str, Any] = {}

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        request, usage = self._request, self._usage
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": f"resp_{self._generation.id}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._info.name,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": _shown(request.text) or {"format": {"type": "text"}},
            "tool_choice": _shown(request.tool_choice) or "auto",
            "tools": _shown(request.tools) or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.generated,
            },
        }  # fmt: skip

    def first_events(self) -> Iterator[dict[str, Any]]:
        """Events that begin the response."""
        yield self._event("response.created", response=self.response())
        yield self._event("response.in_progress", response=self.response())

    def events(self, one: Event) -> Iterator[dict[str, Any]]:
        """Events of an event of the engine."""
        match one:
            case PromptProgress():
                if self._request.timings_per_token:
                    self._times = {"timings": progress_timings(one)}
                progress = llamacpp_progress(one)
                yield self._event("response.in_progress", response=self.response(), prompt_progress=progress)
            case TokenTimings():
                self._times = {"timings": llamacpp_timings(one.usage, one.timings)}
            case TextDelta() if one.text:
                kind = "reasoning" if one.reasoning else "message"
                if not self._is_open or self._output[-1]["type"] != kind:
                    yield from self._close()
                    yield from self._open(kind)
                self._text.append(one.text)
                yield self._part_event(f"{self._part_name}.delta", delta=one.text)
            case ArgumentsDelta():
                yield from self._function_call(one, one.name, one.text)
            case ToolCallDelta():
                n_sent = len(self._output[-1]["arguments"]) if self._in_call else 0
                yield from self._function_call(one, one.call.name, one.call.text[n_sent:])
                yield from self._end_function_call("incomplete" if one.call.partial is not None else "completed")
            case Finished():
                if one.reason == "length":
                    self._status = "incomplete"
                yield from self._close()
            case Done():
                self._usage = one.usage
                if self._times:
                    self._times = {"timings": llamacpp_timings(one.usage, one.timings)}
                if self._status == "in_progress":
                    self._status = "completed"
                yield self._event(f"response.{self._status}", response=self.response())

    def error(self, error: ServeError) -> dict[str, Any]:
        """Event of an error."""
        return self._event("error", code=error.code, message=str(error), param=error.param)

    @property
    def _part_name(self) -> str:
        return "response.reasoning_text" if self._output[-1]["type"] == "reasoning" else "response.output_text"

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        prefix = "rs" if kind == "reasoning" else "msg"
        item: dict[str, Any] = {
            "type": kind,
            "id": f"{prefix}_{self._generation.id}_{len(self._output)}",
            "status": "in_progress",
            "content": [],
        }
        if kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        self._output.append(item)
        self._text, self._is_open = [], True
        yield self._item_event("response.output_item.added", item={**item})
        yield self._part_event("response.content_part.added", part=self._part(""))

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        item, text = self._output[-1], "".join(self._text)
        item["content"], item["status"] = [self._part(text)], "completed"
        self._is_open = False
        yield self._part_event(f"{self._part_name}.done", text=text)
        yield self._part_event("response.content_part.done", part=self._part(text))
        yield self._item_event("response.output_item.done", item=item)

    def _part(self, text: str) -> dict[str, Any]:
        if self._output[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    @property
    def _in_call(self) -> bool:
        """True if the last item is a function call that goes on."""
        last = self._output[-1] if self._output else {}
        return last.get("type") == "function_call" and last["status"] == "in_progress"

    def _function_call(self, one: ArgumentsDelta | ToolCallDelta, name: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._in_call:
            yield from self._close()
            identifier = call_id(self._generation, one)
            item = {
                "type": "function_call",
                "id": f"fc_{identifier}",
                "call_id": identifier,
                "name": name,
                "arguments": "",
                "status": "in_progress",
            }
            self._output.append(item)
            yield self._item_event("response.output_item.added", item={**item})
        item = self._output[-1]
        item["arguments"] += text
        if text:
            yield self._item_event("response.function_call_arguments.delta", item_id=item["id"], delta=text)

    def _end_function_call(self, status: str) -> Iterator[dict[str, Any]]:
        item = self._output[-1]
        item["status"] = status
        given = {key: item[key] for key in ("name", "arguments")}
        yield self._item_event("response.function_call_arguments.done", item_id=item["id"], **given)
        yield self._item_event("response.output_item.done", item=item)

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._output) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        if kind.startswith("response.output_text"):
            fields["logprobs"] = []
        return self._item_event(kind, item_id=self._output[-1]["id"], content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **self._times, **fields}
