"""Items of responses: those given, those before them, and those stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import msgspec

from llamacli.serve.errors import BadRequestError, ConflictError, UnknownObjectError
from llamacli.serve.http.bodies import convert
from llamacli.serve.http.call import Call
from llamacli.serve.http.schemas.chat import MAX_MESSAGES
from llamacli.serve.http.schemas.responses import InputItem, ResponsesRequest
from llamacli.serve.store import Object, Store, new_id

MAX_CHAIN = 10_000
"""Responses that follow each other."""

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_TEXT_KINDS = {"assistant": "output_text", "reasoning": "reasoning_text"}
"""Kinds of text parts by role of a message, and by type of another item."""


@attrs.frozen
class Turn:
    """Request of a response, with the items before it, and its own."""

    request: ResponsesRequest
    whole: ResponsesRequest
    items: list[Object]


async def begin(call: Call, request: ResponsesRequest) -> Turn:
    """Find the items of a previous response, or of a conversation.

    Raises BadRequestError, UnknownObjectError.
    """
    given = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    items = shown_items(given)
    if request.previous_response_id is None and request.conversation is None:
        return Turn(request, request, items)
    return await call.compute(_with_history, call.server.store, call.owner, request, items)


async def resumed(call: Call, name: str) -> Turn:
    """Turn of a stored response that is to be run. Raises UnknownObjectError."""
    return await call.server.run(_resumed, call.server.store, call.owner, name)


async def keep(call: Call, turn: Turn, response: Object, *, is_open: bool = False) -> None:
    """Store a response as its request asks for."""
    request = turn.request
    if request.store is not False:
        private: Object = {"previous": request.previous_response_id}
        if is_open:
            private["body"] = _compact(request)
        add = call.server.store.add
        await call.server.run(add, "response", call.owner, response, private=private, items=turn.items, is_open=is_open)
    if not is_open:
        await keep_in_conversation(call, turn, response)


async def keep_in_conversation(call: Call, turn: Turn, response: Object) -> None:
    """Append a turn to its conversation."""
    name = conversation_id(turn.request)
    if name is not None:
        await call.server.run(call.server.store.add_items, name, [*turn.items, *response["output"]])


def conversation_id(request: ResponsesRequest) -> str | None:
    """Id of a request's conversation."""
    given = request.conversation
    return given if given is None or isinstance(given, str) else given.id


def shown_items(items: Sequence[InputItem]) -> list[Object]:
    """Items with ids, and contents as parts, for lists of the API."""
    found = []
    for item in items:
        data = _compact(item)
        data = {"id": new_id(_PREFIXES.get(item.type, "item")), "type": item.type, "status": "completed"} | data
        if isinstance(item.content, str):
            kind = _TEXT_KINDS.get((item.role if item.type == "message" else item.type) or "", "input_text")
            data["content"] = [{"type": kind, "text": item.content}]
        for part in data.get("content") or ():
            if part["type"] == "output_text":
                part.update(annotations=[], logprobs=[])
        found.append(data)
    return found


def _with_history(store: Store, owner: str, request: ResponsesRequest, items: list[Object]) -> Turn:
    name = conversation_id(request)
    if request.previous_response_id is not None and name is not None:
        raise BadRequestError("conversation: previous_response_id is given too", "conversation")
    if name is not None:
        store.get("conversation", name, owner)
        before = store.items(name)
    else:
        before = _chain(store, owner, request.previous_response_id)
    found = [*before, *items]
    if len(found) > MAX_MESSAGES:
        raise BadRequestError(
            f"input: with those before it has {len(found)} items; {MAX_MESSAGES} are allowed", "input"
        )
    return Turn(request, msgspec.structs.replace(request, input=convert(found, list[InputItem])), items)


def _chain(store: Store, owner: str, name: str | None) -> list[Object]:
    """Items of a response and of those before it, in order."""
    turns: list[list[Object]] = []
    while name is not None and len(turns) < MAX_CHAIN:
        try:
            found = store.get("response", name, owner)
        except UnknownObjectError as error:
            raise BadRequestError(
                f"previous_response_id: {error}", "previous_response_id", "previous_response_not_found"
            ) from None
        if found.data["status"] not in ("completed", "incomplete"):
            raise ConflictError(f"the response {name} is {found.data['status']}")
        turns.append([*store.items(name), *found.data["output"]])
        name = found.private["previous"]
    return [item for turn in reversed(turns) for item in turn]


def _resumed(store: Store, owner: str, name: str) -> Turn:
    found = store.get("response", name, owner)
    request = convert(found.private["body"], ResponsesRequest)
    items = store.items(name)
    if request.previous_response_id is None and request.conversation is None:
        return Turn(request, request, items)
    return _with_history(store, owner, request, items)


def _compact(value: Any) -> Any:
    """Struct as JSON data, without what was not given."""
    return _without_none(msgspec.to_builtins(value))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value
