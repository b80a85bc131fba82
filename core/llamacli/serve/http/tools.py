"""Tools of local MCP servers, as llama-server's `/tools`."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from llamacli.serve.errors import NotFoundError
from llamacli.serve.http.call import Call
from llamacli.serve.http.schemas.foreign import Foreign, Refused, Schema


class ToolCallRequest(Schema, kw_only=True):
    """Request of `POST /tools`: a tool, and an object of its arguments."""

    foreign: ClassVar[Foreign] = {"stream": Refused("results of MCP servers come whole", (False,))}

    tool: str
    params: dict[str, Any] = msgspec.field(default_factory=dict)


async def tools(call: Call) -> None:
    """Tools of the servers of `--mcp`."""
    await call.respond([
        {
            "display_name": tool.name,
            "tool": tool.name,
            "type": "mcp",
            "permissions": {"write": True},
            "uses_cwd": False,
            "definition": tool.definition,
        }
        for tool in await call.unless_gone(call.server.mcp.tools())
    ])  # fmt: skip


async def run_tool(call: Call, request: ToolCallRequest) -> None:
    """Run a tool of the servers of `--mcp`."""
    call.access.fields["tool"] = request.tool[:64]
    if request.tool not in {tool.name for tool in await call.unless_gone(call.server.mcp.tools())}:
        raise NotFoundError(f"there is no tool {request.tool[:64]!a}; GET /tools lists them")
    await call.respond(await call.unless_gone(call.server.mcp.call(request.tool, request.params)))
