"""Shell completion: the protocol of each shell, and a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHELLS = ("bash", "zsh", "fish")


def completions(program, shell: str, line: str) -> list[str]:
    """Completions of the last word of a command line.

    "file" where the shell completes file names.
    """
    words = line.split(" ")
    count = {} if shell == "fish" else {"COMP_CWORD": str(len(words) - 1)}
    fish = {"COMP_CWORD": words[-1]} if shell == "fish" else {}
    env = {"_LLAMACLI_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, **count, **fish}
    result = program(env=env)
    assert (result.returncode, result.stderr) == (0, "")
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
def test_completion_of_words(shell: str, line: str, expected: list[str], program) -> None:
    assert completions(program, shell, line) == expected


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
def test_completion_of_file_names(line: str, program) -> None:
    assert completions(program, "bash", line) == ["file"]


@pytest.mark.parametrize("shell", SHELLS)
def test_script_of_each_shell(shell: str, program) -> None:
    result = program("completion", shell)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"_LLAMACLI_COMPLETE={shell}_complete" in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.stdout, text=True, check=True)


def test_unknown_shell_is_a_usage_error(invoke) -> None:
    result = invoke("completion", "tcsh")
    assert result.exit_code == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in result.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_bash(program, environment, tmp_path: Path) -> None:
    command = tmp_path / "llamacli"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llamacli "$@"\n')
    command.chmod(0o755)
    press_tab = """
eval "$(llamacli completion bash)"
COMP_WORDS=(llamacli run --seed 1 --no-d) COMP_CWORD=4
_llamacli_completion llamacli
echo "${COMPREPLY[@]}"
"""
    env = environment | {"PATH": f"{tmp_path}:{environment['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", press_tab], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("--no-display-prompt\n", "")
