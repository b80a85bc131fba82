"""Tools of MCP servers over HTTP."""

import threading
import time
from pathlib import Path

import pytest

from http_server import Served, wait_for
from llamacli.tools.mcp import read_servers
from mcp_files import write_mcp_file, write_sdk_file

pytestmark = pytest.mark.medium


@pytest.fixture
def server(serve, tmp_path: Path) -> Served:
    return serve(mcp=read_servers(write_mcp_file(tmp_path, a=["echo", "fail", "hang"])))


def test_listed_and_run(server: Served) -> None:
    found = server.send("/tools").json
    assert [tool["tool"] for tool in found] == ["a_echo", "a_fail", "a_hang"]
    assert found[0]["definition"]["function"]["name"] == "a_echo"
    assert found[0]["type"] == "mcp"
    assert found[0]["permissions"] == {"write": True}
    result = server.send("/tools", {"tool": "a_echo", "params": {"message": "hi"}})
    assert (result.status, result.json) == (200, {"plain_text_response": "echo: hi"})
    assert server.send("/tools", {"tool": "a_fail"}).json == {"error": "it is not there"}


def test_wrong_requests(server: Served) -> None:
    assert server.send("/tools", {"tool": "exec_shell_command", "params": {}}).status == 404
    assert server.send("/tools", {"params": {}}).status == 400
    assert server.send("/tools", {"tool": "a_echo", "params": []}).status == 400
    refused = server.send("/tools", {"tool": "a_echo", "stream": True})
    assert (refused.status, refused.json["error"]["param"]) == (400, "stream")


def test_none_without_servers(http: Served) -> None:
    assert http.send("/tools").json == []
    assert http.send("/tools", {"tool": "a_echo"}).status == 404


def test_keys_are_needed(serve, tmp_path: Path) -> None:
    server = serve(mcp=read_servers(write_mcp_file(tmp_path, a=["echo"])), api_keys=("k",))
    assert server.send("/tools").status == 401
    assert server.send("/tools", {"tool": "a_echo"}).status == 401


def test_a_tool_that_runs_does_not_keep_the_server(server: Served) -> None:
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(server.send("/tools", {"tool": "a_hang"})))
    server.send("/tools")
    waiting.start()
    time.sleep(0.2)
    server.server.stop()
    waiting.join(10)
    wait_for(lambda: bool(replies))
    assert "error" in replies[0].json


@pytest.mark.slow
def test_examples_of_the_mcp_package(serve, tmp_path: Path) -> None:
    server = serve(mcp=read_servers(write_sdk_file(tmp_path)))
    tools = {tool["tool"]: tool["definition"]["function"] for tool in server.send("/tools").json}
    assert sorted(tools) == ["demo_add", "web_fetch"]
    assert tools["demo_add"]["description"] == "Add two numbers."
    assert tools["demo_add"]["parameters"]["required"] == ["a", "b"]
    added = server.send("/tools", {"tool": "demo_add", "params": {"a": 20, "b": 22}})
    assert added.json == {"plain_text_response": "42"}
    assert "valid integer" in server.send("/tools", {"tool": "demo_add", "params": {"a": "x", "b": 1}}).json["error"]
    fetched = server.send("/tools", {"tool": "web_fetch", "params": {"url": f"http://127.0.0.1:{server.port}/health"}})
    assert "ok" in fetched.json["plain_text_response"]
    lost = server.send("/tools", {"tool": "web_fetch", "params": {"url": f"http://127.0.0.1:{server.port}/nowhere"}})
    assert "404" in lost.json["error"]
