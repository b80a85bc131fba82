"""Tools of MCP servers in a chat, with the user's consent.

Each call is shown in full before the question.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamacli.cli.chat import at_terminal
from llamacli.cli.output import note
from llamacli.cli.progress import working

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from llamacli.chat.functions import Functions
    from llamacli.tools.mcp import McpServers, McpTool

DECLINED = {"error": "the user has not allowed this call"}


@contextlib.contextmanager
def mcp_functions(path: str | None) -> Iterator[Callable[[], Functions]]:
    """Call that returns functions for the tools of a file's servers.

    Its first call starts the servers, which end with the context; without a file there are none. Raises what
    `read_servers` raises, and UsageError where nobody can be asked.
    """
    if path is None:
        yield dict
        return
    from llamacli.tools.mcp import McpServers, read_servers

    servers = read_servers(Path(path))
    if not at_terminal():
        raise click.UsageError("--mcp needs a terminal at stdin and stdout: you are asked before each call.")
    with contextlib.ExitStack() as running:

        @functools.cache
        def start() -> Functions:
            from anyio.from_thread import start_blocking_portal

            portal = running.enter_context(start_blocking_portal("asyncio"))
            all_servers = McpServers(servers)
            running.callback(portal.call, all_servers.close)
            with working("starting the MCP servers"):
                tools = portal.call(all_servers.tools)
            return {tool.name: _function(tool, all_servers, portal) for tool in tools}

        yield start


def _function(tool: McpTool, servers: McpServers, portal: BlockingPortal) -> Callable[..., Any]:
    def run(**arguments: Any) -> Any:
        if not _allowed(tool, arguments):
            return DECLINED
        result = portal.start_task_soon(servers.call, tool.name, arguments)
        try:
            found = result.result()
        finally:
            result.cancel()
        return found.get("plain_text_response", found)

    run.__name__ = tool.name
    vars(run)["tool"] = tool.definition
    return run


def _allowed(tool: McpTool, arguments: Mapping[str, Any]) -> bool:
    """Show a call in full, and ask for it."""
    note(f"The model wants to call {tool.own_name} of the MCP server {tool.server.name}:")
    for line in json.dumps(arguments, ensure_ascii=False, indent=2).split("\n"):
        click.echo(f"  {visible(line)}", err=True)
    return click.confirm("Run it?", default=False, err=True)


def visible(text: str) -> str:
    """Text with hidden characters spelled.

    Among them are those that turn the direction of writing.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
