"""Behaviour common to all commands: errors, exit codes, logging, plugin commands."""

import re
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest

import llamacli.model
from llamacli import hookimpl
from llamacli.cli.app import ELSEWHERE, app
from llamacli.plugins import GENERAL, Plugins


@pytest.fixture
def bad_model(tmp_path: Path, tiny_gguf):
    """Make a file with a given fault."""

    def make(fault: str) -> Path:
        path = tmp_path / "bad.gguf"
        whole = tiny_gguf("gqa", tokenizer="spm").read_bytes()
        match fault:
            case "empty":
                path.touch()
            case "directory":
                path.mkdir()
            case "text":
                path.write_text("Once upon a time")
            case "truncated":
                path.write_bytes(whole[:-100])
            case "version":
                path.write_bytes(whole[:4] + b"\x63" + whole[5:])
            case "architecture":
                path.write_bytes(whole.replace(b"llama", b"camel"))
            case "missing tensor":
                return tiny_gguf("gqa", tokenizer="spm", without=["blk.1.ffn_up.weight"])
        return path

    return make


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("absent", "no such file"),
        ("empty", "bad.gguf"),
        ("directory", "not a regular file"),
        ("text", "bad.gguf: not a model file of a known format"),
        ("truncated", "truncated"),
        ("version", "version 99"),
        ("architecture", "runs architecture 'camel' (installed: "),
        ("missing tensor", "blk.1.ffn_up.weight is missing"),
    ],
)
def test_bad_model_is_one_line_and_exit_code_1(fault: str, said: str, bad_model, invoke) -> None:
    result = invoke("run", bad_model(fault))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("llamacli: error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_controls_in_errors_are_escaped(invoke) -> None:
    result = invoke("inspect", "no\nsuch\x1b[2Jfile")
    assert result.stderr.count("\n") == 1
    assert r"no\nsuch\x1b[2Jfile" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "env"),
    [(["--debug", "inspect", "x"], {}), (["inspect", "x", "--debug"], {}), (["inspect", "x"], {"LLAMACLI_DEBUG": "1"})],
)
def test_debug_shows_the_traceback(arguments: list[str], env: dict[str, str], invoke) -> None:
    result = invoke(*arguments, env=env)
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback")
    assert "llamacli: error: x: " in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory"),
        (MemoryError("Unable to allocate 9 GiB"), "not enough memory: Unable to allocate 9 GiB"),
        (PermissionError(13, "Permission denied", "x.gguf"), "x.gguf: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(), "OSError"),
    ],
)
def test_os_errors_are_one_line(error: Exception, said: str, invoke, model, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(llamacli.model, "tokenizer_from_metadata", fail)
    result = invoke("run", model)
    assert (result.exit_code, result.stderr) == (1, f"llamacli: error: {said}\n")


def test_interrupt_is_exit_code_130(invoke, model, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llamacli.model, "tokenizer_from_metadata", interrupt)
    result = invoke("run", model)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\n")


def test_bugs_are_not_hidden(invoke, model, monkeypatch) -> None:
    monkeypatch.setattr(llamacli.model, "tokenizer_from_metadata", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        invoke("run", model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["model.gguf"], "To run a model: llamacli run model.gguf"),
        (["show", "model.gguf"], "No such command 'show'. Here: llamacli inspect MODEL"),
        (["help"], "Here: llamacli --help"),
        (["--nonsense"], "--nonsense"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["run", "a", "b", "c"], "unexpected extra argument"),
    ],
)
def test_usage_error_is_exit_code_2(arguments: list[str], said: str, invoke) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "llamacli --help" in result.stderr or "--help' for help" in result.stderr


def test_log_records_are_lines_on_stderr(invoke, model) -> None:
    loaded = "llamacli: info: <Model llama"
    assert loaded not in invoke("run", model, "-n", "1").stderr
    for arguments in (["-v", "run", model, "-n", "1"], ["run", model, "-n", "1", "-v"]):
        result = invoke(*arguments)
        assert [line for line in result.stderr.splitlines() if line.startswith(loaded)] != []
        assert "llamacli:" not in result.stdout
    assert loaded not in invoke("run", model, "-n", "1").stderr  # and what one run asked for does not stay


def test_log_handler_is_installed_once(invoke, model) -> None:
    for _ in range(2):
        assert invoke("run", model, "-n", "1", "-c", "65").stderr == (
            "llamacli: warning: -c 65: the model was trained for 64 tokens only\n"
        )


def plugin(name: str, hook) -> types.ModuleType:
    """A plugin module with one hook."""
    module = types.ModuleType(name)
    module.LLAMACLI_API = 1
    module.register_commands = hookimpl(hook)
    return module


@pytest.fixture
def with_commands(use_plugins, invoke, monkeypatch):
    """Install plugins whose `register_commands` are these functions."""

    def use(**hooks) -> None:
        for name, hook in hooks.items():
            monkeypatch.setitem(sys.modules, name, plugin(name, hook))
        use_plugins(Plugins([EntryPoint(name, name, GENERAL) for name in hooks]))

    return use


def add_hello(cli: click.Group) -> None:
    cli.add_command(click.Command("hello", callback=lambda: click.echo("hello from a plugin")))


def fail_to_add(cli: click.Group) -> None:
    cli.add_command(click.Command("half"))
    raise RuntimeError("out of order")


def add_to_run(cli: click.Group) -> None:
    cli.add_command(click.Command("plugins", callback=lambda: click.echo("taken over")))


def test_command_of_a_plugin(with_commands, invoke) -> None:
    with_commands(one=add_hello)
    assert invoke("hello").stdout == "hello from a plugin\n"
    assert "hello" not in invoke("--help").stdout


def test_broken_plugin_does_not_affect_others(with_commands, invoke) -> None:
    with_commands(one=fail_to_add, two=add_hello)
    result = invoke("hello")
    assert result.stdout == "hello from a plugin\n"
    message = (
        r"llamacli: warning: plugin one cannot add its commands: RuntimeError: out of order, at \S*test_app.py:\d+\n"
    )
    assert re.fullmatch(message, result.stderr)
    assert invoke("half").exit_code == 2


def test_plugin_cannot_replace_builtin_command(with_commands, invoke) -> None:
    with_commands(one=add_to_run)
    assert "taken over" not in invoke("plugins").stdout


def test_commands_of_other_programs_are_none_of_ours() -> None:
    assert not ELSEWHERE.keys() & app.commands.keys()
    assert {text.split()[0] for text in ELSEWHERE.values()} <= {*app.commands, "--help", "--version"}
