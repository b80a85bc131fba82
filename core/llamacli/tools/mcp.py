"""Client of local MCP servers: their tools, called by stdio.

Source: the Model Context Protocol's specification; the package `mcp` has its sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from llamacli.errors import InvalidRequestError

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream
    from mcp import ClientSession
    from mcp.shared.message import SessionMessage

DEFAULT_TIMEOUT_S = 30.0
MAX_BYTES = 16 << 20
"""Bytes that a server may send for one request of ours, before it is ended."""
MAX_RESULT = 256 << 10
"""Characters of a tool's result."""
MAX_TOOLS = 256
"""Tools of one server."""
MAX_TOOL = 64 << 10
"""Characters of a tool's description, as JSON."""

_BEGIN_S = 30.0
"""Seconds that a server has to begin, and to list its tools."""
_END_S = 0.4
"""Seconds that a server has to end by itself, and again after SIGTERM."""
_LOOK_S = 0.01
_MAX_STDERR = 2000
_STDIO = ("stdio", "local", None)
_KEYS = {"command", "args", "env", "cwd", "timeout_ms", "type", "disabled"}
_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]")

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class McpServer:
    """Local server of a configuration file.

    `timeout` is the limit of a call in seconds. `env` is added to the few variables that the package `mcp` hands on,
    such as PATH and HOME.
    """

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    cwd: str | None = None
    timeout: float = DEFAULT_TIMEOUT_S


@attrs.frozen
class McpTool:
    """Tool of a server; `name` is for models, `own_name` is the server's."""

    name: str
    own_name: str
    server: McpServer
    definition: Mapping[str, Any]


def read_servers(path: Path) -> tuple[McpServer, ...]:
    """Servers of a configuration file, `{"mcpServers": {NAME: {"command": ...}}}`.

    Those that are disabled or not local are left out, with a warning. Raises InvalidRequestError that names file and
    key, also if the package `mcp` is missing; OSError.
    """
    try:
        servers = json.loads(path.read_text("utf-8"))["mcpServers"]
        given = dict(servers.items())
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path}: not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise InvalidRequestError(f'{path}: it needs {{"mcpServers": {{NAME: {{"command": ...}}}}}}') from None
    found = [_server(f"{path}: mcpServers.{name}", name, entry) for name, entry in given.items()]
    if find_spec("mcp") is None:
        raise InvalidRequestError("--mcp needs the package mcp: pip install 'llamacli[mcp]'")
    return tuple(server for server in found if server is not None)


def _server(where: str, name: str, entry: Any) -> McpServer | None:
    def expect(key: str, kind: str, test: Callable[[Any], bool]) -> Any:
        value = entry.get(key)
        if value is not None and not test(value):
            raise InvalidRequestError(f"{where}.{key}: expected {kind}, not {json.dumps(value)[:80]}")
        return value

    def is_text(value: Any) -> bool:
        return isinstance(value, str) and bool(value) and "\0" not in value

    if not isinstance(entry, dict):
        raise InvalidRequestError(f"{where}: expected an object, not {json.dumps(entry)[:80]}")
    if entry.get("disabled"):
        return None
    if "url" in entry or entry.get("type") not in _STDIO:
        _log.warning("%s: left out: servers are programs of this machine, not addresses", where)
        return None
    if not is_text(entry.get("command")):
        raise InvalidRequestError(f"{where}.command: it is required, the name or path of a program")
    args = expect("args", "a list of texts", lambda value: isinstance(value, list) and all(map(_is_argument, value)))
    env = expect("env", "an object of texts", lambda value: isinstance(value, dict) and all(
        map(_is_argument, value.values())))  # fmt: skip
    cwd = expect("cwd", "a folder", is_text)
    milliseconds = expect("timeout_ms", "a number from 1 to 86400000", lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= 86_400_000))  # fmt: skip
    if unknown := sorted(entry.keys() - _KEYS):
        _log.warning("%s: without effect: %s", where, ", ".join(map(ascii, unknown)))
    timeout = DEFAULT_TIMEOUT_S if milliseconds is None else milliseconds / 1000
    return McpServer(
        name=name, command=entry["command"], args=tuple(args or ()), env=env or {}, cwd=cwd, timeout=timeout
    )


def _is_argument(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


class McpServers:
    """Local servers and their tools, in one event loop.

    A server that hangs, dies or sends too much is ended, and begun again by the next call. What servers return is data:
    their instructions are read by nobody.
    """

    def __init__(self, servers: Sequence[McpServer]):
        self._connections = [_Connection(server) for server in servers]
        self._closed = False
        self._tools: asyncio.Task[dict[str, tuple[McpTool, _Connection]]] | None = None

    async def tools(self) -> list[McpTool]:
        """Tools of all servers that can be begun; they are asked once."""
        return [tool for tool, _ in (await self._listed()).values()]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Result of a tool, `{"plain_text_response": text}` or `{"error": text}`.

        Raises KeyError for a name that no tool has.
        """
        tool, connection = (await self._listed())[name]
        if self._closed:
            return {"error": "the servers are closed"}
        return await connection.call(tool.own_name, arguments)

    async def close(self) -> None:
        """End all servers, for good."""
        self._closed = True
        if self._tools is not None:
            self._tools.cancel()
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _listed(self) -> dict[str, tuple[McpTool, _Connection]]:
        if self._tools is None:
            self._tools = asyncio.create_task(self._list())
        return await asyncio.shield(self._tools)

    async def _list(self) -> dict[str, tuple[McpTool, _Connection]]:
        found: dict[str, tuple[McpTool, _Connection]] = {}
        listed = await asyncio.gather(*(connection.tools() for connection in self._connections))
        for connection, tools in zip(self._connections, listed, strict=True):
            for tool in tools:
                if tool.name in found:
                    other = found[tool.name][0].server.name
                    _log.warning("MCP: %s: its tool %a is left out: %s has one of this name",
                                 tool.server.name, tool.name, other)  # fmt: skip
                else:
                    found[tool.name] = tool, connection
        return found


class _EndedError(Exception):
    """The server has ended, or was ended."""


class _Connection:
    """Process and session of a server, begun when they are needed."""

    def __init__(self, server: McpServer):
        self._server = server
        self._session: asyncio.Future[ClientSession] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._failure = ""

    async def tools(self) -> list[McpTool]:
        """Tools of the server; none, and a warning, if it fails."""
        found = list[McpTool]()
        try:
            async with asyncio.timeout(_BEGIN_S):
                session = await self._begun()
                cursor, n_listed = None, 0
                while n_listed == 0 or cursor is not None:
                    page = await session.list_tools(params=_page(cursor))
                    cursor, n_listed = page.next_cursor, n_listed + max(1, len(page.tools))
                    if n_listed > MAX_TOOLS:
                        raise _EndedError(f"it has more than {MAX_TOOLS} tools")
                    found += [tool for one in page.tools if (tool := self._tool(one)) is not None]
        except Exception as error:
            _log.warning("MCP: %s is left out: %s", self._server.name, self._reason(error, _BEGIN_S))
            await self.close()
            return []
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Result of a tool, or `{"error": ...}`."""
        limit = _BEGIN_S
        try:
            async with asyncio.timeout(limit):
                session = await self._begun()
            limit = self._server.timeout
            async with asyncio.timeout(limit):
                result = await session.call_tool(name, dict(arguments))
            return _response(result.model_dump(mode="json", by_alias=True))
        except Exception as error:
            reason = self._reason(error, limit)
            if isinstance(error, TimeoutError):
                await self.close()
            return {"error": reason}

    async def close(self) -> None:
        """End the process."""
        self._stopped.set()
        if self._runner is not None:
            await asyncio.wait({self._runner})

    def _tool(self, one: Any) -> McpTool | None:
        server = self._server
        name = _OTHER_CHARACTERS.sub("_", f"{server.name}_{one.name}")[:64]
        function = {
            "name": name,
            "description": one.description or "",
            "parameters": {"properties": {}, **one.input_schema, "type": "object"},
        }
        if len(json.dumps(function)) > MAX_TOOL:
            _log.warning("MCP: %s: its tool %a is left out: its description is too long", server.name, one.name[:64])
            return None
        return McpTool(name, one.name, server, {"type": "function", "function": function})

    def _reason(self, error: Exception, limit: float) -> str:
        if isinstance(error, TimeoutError):
            return f"the server took longer than {limit:g} seconds"
        return self._failure or str(error) or type(error).__name__

    async def _begun(self) -> ClientSession:
        """Session of a process that runs."""
        if self._session is None or self._stopped.is_set():
            await self.close()
            self._stopped, self._failure = asyncio.Event(), ""
            self._session = asyncio.get_running_loop().create_future()
            self._runner = asyncio.create_task(self._run(self._session, self._stopped))
        return await asyncio.shield(self._session)

    async def _run(self, began: asyncio.Future[ClientSession], stopped: asyncio.Event) -> None:
        """Run one process, in the task that its session needs."""
        for name in ("client", "mcp"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # a traceback for each odd message
        try:
            async with _process(self._server, stopped) as process, process.session() as session:
                work = asyncio.create_task(session.initialize()), asyncio.create_task(stopped.wait())
                await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                self._failure = process.failure
                if not stopped.is_set():
                    await work[0]
                    began.set_result(session)
                    await stopped.wait()
                self._failure = process.failure
                for task in work:
                    task.cancel()
        except Exception as error:
            self._failure = self._failure or str(error)
        finally:
            stopped.set()
            if not began.done():
                began.set_exception(_EndedError(self._failure or "the server was ended"))
                began.exception()  # nobody may wait for it any more
            elif self._failure:
                _log.warning("MCP: %s: %s", self._server.name, self._failure)


class _Process(asyncio.SubprocessProtocol):
    """Messages of a process, a line each.

    It may send `MAX_BYTES` for each message that it gets.
    """

    def __init__(self, stopped: asyncio.Event):
        from mcp_types import jsonrpc_message_adapter

        self._parse = jsonrpc_message_adapter.validate_json
        self._stopped, self._line, self._n_bytes = stopped, bytearray(), 0
        self._stderr, self.failure = b"", ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        import anyio

        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self._send, self._received = anyio.create_memory_object_stream["SessionMessage | Exception"](float("inf"))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        import anyio
        from mcp.shared.message import SessionMessage

        if fd == 2:
            self._stderr = (self._stderr + data)[-_MAX_STDERR:]
            return
        self._n_bytes += len(data)
        if self._n_bytes > MAX_BYTES:
            self._end(f"the server has sent more than {MAX_BYTES >> 20} MiB")
            return
        first, *lines = data.split(b"\n")
        self._line += first
        for line in lines:
            if self._line.strip():
                # What is no message is passed over, as by llama-server.
                with contextlib.suppress(ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    self._send.send_nowait(SessionMessage(self._parse(bytes(self._line))))
            self._line = bytearray(line)

    def process_exited(self) -> None:
        said = self._stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        status = f"the server has ended with status {self._transport.get_returncode()}"
        self._end(f"{status}: {said}" if said else status)

    def _end(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._send.close()
        self._stopped.set()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[ClientSession]:
        """Session over the pipes of the process."""
        import anyio
        from mcp import ClientSession

        write, outgoing = anyio.create_memory_object_stream["SessionMessage"](0)
        async with self._received, write, outgoing, ClientSession(self._received, write) as session:
            sending = asyncio.create_task(self._send_all(outgoing))
            try:
                yield session
            finally:
                sending.cancel()

    async def _send_all(self, messages: MemoryObjectReceiveStream[SessionMessage]) -> None:
        """Write messages to the process, one a line."""
        async for one in messages:
            pipe: Any = self._transport.get_pipe_transport(0)
            self._n_bytes = 0
            pipe.write(one.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

    async def end(self) -> None:
        """End the process and its children: stdin's end, SIGTERM, SIGKILL."""
        pipe: Any = self._transport.get_pipe_transport(0)
        pipe.close()
        for number in (None, getattr(signal, "SIGTERM", None), getattr(signal, "SIGKILL", None)):
            if number is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if hasattr(os, "killpg"):
                        os.killpg(self._transport.get_pid(), number)
                    else:
                        self._transport.terminate()
            for _ in range(int(_END_S / _LOOK_S)):
                if self._transport.get_returncode() is not None:
                    break
                await asyncio.sleep(_LOOK_S)
        self._send.close()
        self._transport.close()


@contextlib.asynccontextmanager
async def _process(server: McpServer, stopped: asyncio.Event) -> AsyncIterator[_Process]:
    from mcp.client.stdio import get_default_environment

    process = _Process(stopped)
    await asyncio.get_running_loop().subprocess_exec(
        lambda: process, server.command, *server.args, env=get_default_environment() | server.env, cwd=server.cwd,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        await process.end()


def _page(cursor: str | None) -> Any:
    from mcp_types import PaginatedRequestParams

    return None if cursor is None else PaginatedRequestParams(cursor=cursor)


def _response(result: Mapping[str, Any]) -> dict[str, Any]:
    """Text of a tool's result, in which other parts are named."""
    texts = []
    for part in result.get("content") or ():
        if part["type"] == "text":
            texts.append(part["text"])
        elif part["type"] == "resource" and "text" in part["resource"]:
            texts.append(part["resource"]["text"])
        else:
            texts.append(f"[{part['type']} of type {part.get('mimeType')}, which is not read]")
    if not texts and result.get("structuredContent") is not None:
        texts.append(json.dumps(result["structuredContent"], ensure_ascii=False))
    text = "\n".join(texts)
    if len(text) > MAX_RESULT:
        return {"error": f"the result has {len(text)} characters; {MAX_RESULT} are allowed"}
    if result.get("isError"):
        return {"error": text or "the tool has failed"}
    return {"plain_text_response": text}
