"""Endpoints of stored responses and conversations."""

from __future__ import annotations

import time

from llamacli.serve.errors import ConflictError, NotSupportedError, UnknownObjectError
from llamacli.serve.http.call import Call
from llamacli.serve.http.openai.history import shown_items
from llamacli.serve.http.openai.responses import start_background
from llamacli.serve.http.schemas.responses import ConversationChange, ConversationRequest, ItemsRequest
from llamacli.serve.http.state import Server
from llamacli.serve.store import Found, Object, object_id, shown_page


async def response(call: Call) -> None:
    """Stored response, or the present state of one in the background."""
    if call.query.get("stream") == "true":
        raise NotSupportedError("stream: stored responses are not streamed again")
    found = await _stored(call)
    job = call.server.jobs.get(found.id)
    await call.respond(job.shown() if job is not None and job.shown is not None else found.data)


async def delete_response(call: Call) -> None:
    """Delete a stored response; one in the background ends."""
    found = await _stored(call)
    await call.server.jobs.cancel(found.id)
    await call.server.run(call.server.store.remove, "response", found.id, call.owner)
    await call.respond({"id": found.id, "object": "response", "deleted": True})


async def cancel_response(call: Call) -> None:
    """End a response in the background."""
    found = await _stored(call)
    if not found.data["background"]:
        raise ConflictError(f"the response {found.id} is not one in the background")
    job = call.server.jobs.get(found.id)
    if job is not None:
        shown = found.data if job.shown is None else job.shown()
        await call.server.jobs.cancel(found.id)
        now = await _stored(call)  # it may have ended meanwhile
        if now.data["status"] == found.data["status"]:
            ended = {**shown, "created_at": found.data["created_at"], "status": "cancelled"}
            await call.server.run(call.server.store.update, found.id, ended, is_open=False)
    await call.respond((await _stored(call)).data)


async def input_items(call: Call) -> None:
    """Items of a stored response's input."""
    found = await _stored(call)
    await _respond_items(call, found.id)


async def add_conversation(call: Call, request: ConversationRequest) -> None:
    """Make a conversation."""
    data = {
        "id": object_id("conversation"),
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": request.metadata or {},
    }
    items = shown_items(request.items or ())
    await call.server.run(call.server.store.add, "conversation", call.owner, data, items=items)
    await call.respond(data)


async def conversation(call: Call) -> None:
    """Conversation, without its items."""
    await call.respond((await _conversation(call)).data)


async def change_conversation(call: Call, request: ConversationChange) -> None:
    """Replace the metadata of a conversation."""
    found = await _conversation(call)
    data = {**found.data, "metadata": request.metadata}
    await call.server.run(call.server.store.update, found.id, data, is_open=False)
    await call.respond(data)


async def delete_conversation(call: Call) -> None:
    """Delete a conversation and its items."""
    found = await _conversation(call)
    await call.server.run(call.server.store.remove, "conversation", found.id, call.owner)
    await call.respond({"id": found.id, "object": "conversation.deleted", "deleted": True})


async def conversation_items(call: Call) -> None:
    """Items of a conversation, the newest first."""
    await _respond_items(call, (await _conversation(call)).id)


async def add_items(call: Call, request: ItemsRequest) -> None:
    """Append items to a conversation."""
    found, items = await _conversation(call), shown_items(request.items)
    await call.server.run(call.server.store.add_items, found.id, items)
    await call.respond(shown_page(items, more=False))


async def item(call: Call) -> None:
    """Item of a conversation."""
    await call.respond(await _item(call))


async def delete_item(call: Call) -> None:
    """Delete one item of a conversation."""
    found, one = await _conversation(call), await _item(call)
    await call.server.run(call.server.store.remove_item, found.id, one["id"])
    await call.respond(found.data)


def resume(server: Server) -> None:
    """Begin the responses in the background that the last server has left."""
    for found in server.store.unfinished("response"):
        start_background(server, found.owner, found.owner, found.data)


async def _stored(call: Call) -> Found:
    return await call.server.run(call.server.store.get, "response", call.path_params["id"], call.owner)


async def _conversation(call: Call) -> Found:
    return await call.server.run(call.server.store.get, "conversation", call.path_params["id"], call.owner)


async def _item(call: Call) -> Object:
    found, name = await _conversation(call), call.path_params["item"]
    for one in await call.server.run(call.server.store.items, found.id):
        if one["id"] == name:
            return one
    raise UnknownObjectError(f"the conversation {found.id} has no item {name!a}")


async def _respond_items(call: Call, parent: str) -> None:
    data, more = await call.server.run(lambda: call.server.store.page_of_items(parent, **call.page()))
    await call.respond(shown_page(data, more))
