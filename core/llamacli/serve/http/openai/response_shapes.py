"""Response object of `/v1/responses`, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from llamacli.serve.errors import ServeError
from llamacli.serve.http.openai.history import conversation_id
from llamacli.serve.http.replies import call_id, llamacpp_progress, llamacpp_timings, progress_timings
from llamacli.serve.http.schemas.responses import ResponsesRequest
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
from llamacli.serve.store import new_id


def _shown(value: Any) -> Any:
    return msgspec.to_builtins(value)


class ResponseShapes:
    """Response object of one request, and the events of its stream.

    Items of the output are the reasoning, the message and the function calls, in the order in which they come. One is
    open at a time: text for another one closes it.
    """

    def __init__(
        self, request: ResponsesRequest, generation: GenerationRequest | None, info: ModelInfo, name: str | None = None
    ):
        self._request, self._generation, self._info = request, generation, info
        self.id = name or new_id("resp")
        self._hex = self.id.removeprefix("resp_")
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._text: list[str] = []
        self._is_open = False
        self._number = 0
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._usage: Usage | None = None
        self._times: dict[str, Any] = {}

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        request, usage, conversation = self._request, self._usage, conversation_id(self._request)
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "background": bool(request.background),
            "conversation": None if conversation is None else {"id": conversation},
            "error": self._error,
            "incomplete_details": incomplete,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._info.name,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": _shown(request.text) or {"format": {"type": "text"}},
            "tool_choice": _shown(request.tool_choice) or "auto",
            "tools": _shown(request.tools) or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
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

    def end(self, status: str, error: ServeError | None = None) -> dict[str, Any]:
        """The response object with a status such as queued, cancelled or failed."""
        self._status = status
        if error is not None:
            self._error = {"code": error.code or error.type, "message": str(error)}
        return self.response()

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
            "id": f"{prefix}_{self._hex}_{len(self._output)}",
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
            assert self._generation is not None
            identifier = call_id(self._generation, one)
            item = {
                "type": "function_call",
                "id": f"fc_{self._hex}_{len(self._output)}",
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
