"""Behaviour common to all commands: errors, exit codes, logging, plugin commands."""

import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

import llamacli.model
from llamacli.cli.app import ELSEWHERE, WITHOUT, app
from llamacli.cli.commands import Commands, is_ours


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
        ("directory", "the folder is empty: no model"),
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
        (OSError(12, "Cannot allocate memory"), "not enough memory: [Errno 12] Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "not enough memory: can't start new thread"),
        (ImportError("a.so: failed to map segment"), "not enough memory: a.so: failed to map segment"),
        (PermissionError(13, "Permission denied", "x.gguf"), "x.gguf: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(), "OSError"),
    ],
)
def test_errors_of_the_system_are_one_line(error: Exception, said: str, invoke, model, monkeypatch) -> None:
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
        (["ps"], "No such command 'ps': each command loads its own model"),
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
    loaded = "llamacli: info: <Model "
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


HELLO = """
import click

@click.command("hello")
@click.option("--to")
def hello(to):
    \"\"\"Say hello
    to somebody.

    At length.
    \"\"\"
    click.echo("hello of " + __name__)
"""


@pytest.fixture
def with_commands(tmp_path: Path, install, monkeypatch: pytest.MonkeyPatch):
    """Install distributions with these commands, each a module of its name."""
    made = []

    def use(source: str, *names: str, commands: str = "hello = {name}:hello") -> None:
        for name in names:
            entries = f"[llamacli.commands]\n{commands.format(name=name)}\n"
            install(tmp_path, f"dist-{name}", entries, **{name: source})
            made.append(name)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(app, "commands", Commands())

    yield use
    for name in made:
        sys.modules.pop(name, None)


def test_command_of_a_plugin(with_commands, invoke) -> None:
    with_commands(HELLO, "dummy_one")
    assert "\n  hello       Say hello to somebody.\n" in invoke("--help").stdout
    assert "dummy_one" not in sys.modules
    assert invoke("hello").stdout == "hello of dummy_one\n"
    assert "\n  hello       Say hello to somebody.\n" in invoke("--help").stdout
    assert "--to TEXT" in invoke("hello", "--help").stdout


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import click\n1 / 0\n", r"ZeroDivisionError: division by zero, at \S*dummy_one.py:2"),
        ("hello = 3\n", "dummy_one:hello is 3, expected a click.Command"),
        ("", "AttributeError: module 'dummy_one' has no attribute 'hello'"),
    ],
)
def test_broken_commands_do_not_affect_others(source: str, said: str, with_commands, invoke) -> None:
    with_commands(source, "dummy_one")
    result = invoke("hello")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.match(rf"llamacli: error: command 'hello' of plugin dist-dummy_one.* {said}", result.stderr)
    assert re.search(r"^  hello *$", invoke("--help").stdout, re.MULTILINE)
    assert invoke("plugins").exit_code == 0


def test_names_of_several_commands(with_commands, invoke) -> None:
    with_commands(HELLO, "dummy_one", "dummy_two", commands="hello = {name}:hello\nrun = {name}:hello\nbad = {name}")
    assert invoke("hello").stdout == "hello of dummy_one\n"
    assert "--temperature" in invoke("run", "--help").stdout
    rows = {row["distribution"]: row for row in json.loads(invoke("plugins", "--json").stdout)}
    one, two = rows["dist-dummy_one"], rows["dist-dummy_two"]
    assert (one["module"], one["version"], one["commands"], two["commands"]) == ("dummy_one", "1.0", ["hello"], [])
    assert sorted(one["error"].split("; ")) == [
        "command 'bad' is ignored: entry point 'dummy_one' names no command, as in module:function",
        "command 'run' is ignored: llamacli-core has a command of this name",
    ]
    assert "command 'hello' is ignored: dist-dummy_one has a command of this name" in two["error"]


def test_completion_of_commands_imports_none(with_commands, invoke) -> None:
    with_commands("1 / 0", "dummy_one")
    env = {"_LLAMACLI_COMPLETE": "bash_complete", "COMP_WORDS": "llamacli h", "COMP_CWORD": "1"}
    assert invoke(env=env).stdout == "plain,hello\n"


def test_an_installation_without_commands_says_so(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(app, "commands", Commands())
    assert "llamacli-core names no commands; install it again" in invoke("run").stderr
    assert invoke("--version").exit_code == 0


def test_entry_points_are_the_commands_of_the_core() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "core/pyproject.toml").read_text())
    table = project["project"]["entry-points"]["llamacli.commands"]
    ours = {name: entry.value for name, entry in app.commands.entries.items() if is_ours(entry)}
    assert ours == table, "install the distribution again: pip install -e core"
    for name in table:
        assert app.commands[name].name == name
        assert app.commands[name].help
        assert Commands().help_line(name) == " ".join(str(app.commands[name].help).partition("\n\n")[0].split())


def test_commands_of_other_programs_are_none_of_ours() -> None:
    assert not {*ELSEWHERE, *WITHOUT} & app.commands.keys()
    assert {text.split()[0] for text in ELSEWHERE.values()} <= {*app.commands, "--help", "--version"}
