"""Consent for calls of MCP servers, and wrong uses of `--mcp`."""

import sys
from pathlib import Path

import click
import pytest

from llamacli.chat.functions import call, described
from llamacli.chat.messages import ToolCall
from llamacli.cli import mcp
from llamacli.cli.mcp import DECLINED, mcp_functions, visible
from llamacli.hub.demo import demo_path
from mcp_files import write_mcp_file

pytestmark = pytest.mark.medium


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answers of the user, the first one last."""
    answers: list[bool] = []
    monkeypatch.setattr(mcp, "at_terminal", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda *args, **kwargs: answers.pop())
    return answers


def test_each_call_is_asked_for(asked: list[bool], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked += [False, True]
    wanted = ToolCall("a_echo", {"message": "hi\x1b[2J", "self": 1})
    with mcp_functions(str(write_mcp_file(tmp_path, a=["echo"]))) as start:
        functions = start()
        (tool,), _ = described(functions.values())
        assert tool["function"]["name"] == "a_echo"
        assert call(functions, wanted) == "echo: hi\x1b[2J"
        assert call(functions, wanted) == DECLINED
    assert asked == []
    shown = capfd.readouterr().err
    assert shown.count("The model wants to call echo of the MCP server a:") == 2
    assert shown.count(r'"message": "hi\u001b[2J"') == 2


def test_there_are_none_without_a_file() -> None:
    with mcp_functions(None) as start:
        assert start() == {}


def test_a_model_that_is_missing_starts_no_server(asked: list[bool], invoke, tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = {"command": sys.executable, "args": ["-c", f"open({str(started)!r}, 'w')"]}
    result = invoke("run", str(tmp_path / "none.gguf"), "hi", "--mcp", str(write_mcp_file(tmp_path, a=program)))
    assert result.exit_code == 1
    assert "none.gguf: no such file" in result.stderr
    assert not started.exists()
    invoke("run", "demo", "hi", "-n", "1", "--mcp", str(tmp_path / "mcp.json"))
    assert started.exists()


def test_hidden_characters_are_spelled() -> None:
    assert visible("é 漢 a\u202eb\u200bc\ue000") == r"é 漢 a\u202eb\u200bc\ue000"


def test_nobody_to_ask_is_an_error(invoke, tmp_path: Path) -> None:
    result = invoke("run", str(demo_path()), "hi", "--mcp", str(write_mcp_file(tmp_path, a=["echo"])))
    assert result.exit_code == 2
    assert "--mcp needs a terminal" in result.stderr


def test_a_malformed_file_is_an_error(invoke, tmp_path: Path) -> None:
    (tmp_path / "mcp.json").write_text("{}")
    for command in ("run", "serve"):
        result = invoke(command, str(demo_path()), "--mcp", str(tmp_path / "mcp.json"))
        assert result.exit_code == 1
        assert "mcp.json: it needs" in result.stderr
