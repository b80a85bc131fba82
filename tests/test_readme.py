"""Commands and programs of the README and other pages, executed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_llama
import tiny_variants
from adapters import write_adapter
from llamacli.testing.chats import CHATML
from tiny_chat import chat_keys

ROOT = Path(__file__).resolve().parents[1]


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


COMMANDS = [
    line[2:]
    for page in ("README.md", "docs/lora.md")
    for block in blocks("console", page)
    for line in block.splitlines()
    if line.startswith("$ ")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name."""
    path = tmp_path_factory.mktemp("readme")
    tiny_llama.write_llama(path / "model.gguf", tokenizer="spm")
    write_adapter(path / "adapter.gguf", path / "model.gguf")
    keys = chat_keys("{{ tools }}" + CHATML)
    tiny_llama.write_llama(path / "model-with-tools.gguf", tokenizer="spm", context_length=4096, metadata=keys)
    tiny_variants.write(path / "reranker.gguf", "qwen3_rank", tokenizer="spm")
    (path / "text.txt").write_text("once upon a time there was a little girl " * 200)
    return path


def run(folder: Path, *arguments: str) -> str:
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments, cwd=folder, env=os.environ | {"PATH": scripts}, capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pages_have_code_blocks():
    assert len(COMMANDS) >= 5
    assert len(blocks("python")) >= 2


@pytest.mark.medium
@pytest.mark.parametrize("command", COMMANDS)
def test_command(folder, command):
    assert run(folder, "bash", "-o", "pipefail", "-c", command).strip()


PROGRAMS = [
    (page, n)
    for page in ("README.md", "docs/api.md", "docs/chat.md", "docs/lora.md", "docs/sampling.md")
    for n in range(len(blocks("python", page)))
]


@pytest.mark.medium
@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_program(folder, page, number, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    exec(compile(blocks("python", page)[number], page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
