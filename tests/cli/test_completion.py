"""Shell completion: the protocol of each shell, and the shells themselves."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHELLS = ("bash", "zsh", "fish")


def completions(invoke, shell: str, line: str) -> list[str]:
    """Completions of the last word of a command line.

    "file" where the shell completes file names.
    """
    words = line.split(" ")
    count = {} if shell == "fish" else {"COMP_CWORD": str(len(words) - 1)}
    fish = {"COMP_CWORD": words[-1]} if shell == "fish" else {}
    env = {"_LLAMACLI_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, **count, **fish}
    result = invoke(env=env)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    match shell:
        case "bash":
            return [value or kind for kind, value in (line.split(",", 1) for line in lines)]
        case "zsh":
            return [value or kind for kind, value in zip(lines[0::3], lines[1::3], strict=True)]
        case _:
            return [value.split("\t")[0] or kind for kind, value in (line.split(",", 1) for line in lines)]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("llamacli to", ["tokenize"]),
        ("llamacli p", ["perplexity", "plugins", "pull"]),
        ("llamacli run --temp", ["--temperature", "--temp"]),
        ("llamacli run --mode q", ["q8", "q4"]),
        ("llamacli completion z", ["zsh"]),
        ("llamacli quantize in.gguf out.gguf q4_k", ["Q4_K_S", "Q4_K_M"]),
    ],
)
def test_completion_of_words(shell: str, line: str, expected: list[str], invoke) -> None:
    assert completions(invoke, shell, line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "llamacli run ",
        "llamacli run -m ",
        "llamacli run --grammar-file ",
        "llamacli inspect ",
        "llamacli inspect --plot ",
        "llamacli quantize in.gguf ",
        "llamacli perplexity ",
    ],
)
def test_completion_of_file_names(line: str, invoke) -> None:
    assert completions(invoke, "bash", line) == ["file"]


@pytest.mark.parametrize("shell", SHELLS)
def test_script_of_each_shell(shell: str, invoke) -> None:
    result = invoke("completion", shell)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"_LLAMACLI_COMPLETE={shell}_complete" in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.stdout, text=True, check=True)


def test_unknown_shell_is_a_usage_error(invoke) -> None:
    result = invoke("completion", "tcsh")
    assert result.exit_code == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in result.stderr


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}")


@pytest.fixture
def shell_environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Environment of a shell with the program in its path."""
    command = tmp_path / "bin" / "llamacli"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llamacli "$@"\n')
    command.chmod(0o755)
    return environment | {"PATH": f"{command.parent}:{environment['PATH']}", "HOME": str(tmp_path), "TERM": "xterm"}


@pytest.mark.medium
@needs("bash")
def test_completion_in_bash(shell_environment: dict[str, str]) -> None:
    press_tab = """
eval "$(llamacli completion bash)"
COMP_WORDS=(llamacli run --seed 1 --no-d) COMP_CWORD=4
_llamacli_completion llamacli
echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", press_tab], env=shell_environment, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("--no-display-prompt\n", "")


@needs("fish")
def test_completion_in_fish(shell_environment: dict[str, str]) -> None:
    press_tab = 'llamacli completion fish | source; complete -C "llamacli run --seed 1 --no-d"'
    done = subprocess.run(
        ["fish", "--no-config", "-c", press_tab], env=shell_environment, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert done.stdout.split("\t")[0] == "--no-display-prompt"


@needs("zsh")
def test_completion_in_zsh(shell_environment: dict[str, str]) -> None:
    user, tty = pty.openpty()
    with subprocess.Popen(["zsh", "-f", "-i"], stdin=tty, stdout=tty, stderr=tty, env=shell_environment) as zsh:
        os.close(tty)
        try:
            os.write(user, b'autoload -Uz compinit; compinit -u; eval "$(llamacli completion zsh)"; echo rea""dy\n')
            shown_until(user, b"ready")
            os.write(user, b"llamacli run --seed 1 --no-d\t")
            shown_until(user, b"isplay-prompt")
        finally:
            zsh.kill()
            os.close(user)


def shown_until(terminal: int, wanted: bytes) -> None:
    """Read the output of a terminal until a text has come."""
    shown, deadline = b"", time.monotonic() + 60
    while wanted not in shown:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], shown
        shown += os.read(terminal, 65536)
