"""Modules of the page in Node: syntax and tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llamacli.serve.http.page import PAGE

NODE = shutil.which("node")
TESTS = sorted(Path(__file__).parent.glob("*.test.js"))

pytestmark = pytest.mark.skipif(NODE is None, reason="the page's modules are tested with node, which is not installed")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of modules and tests, which Node takes for ES modules."""
    folder = tmp_path_factory.mktemp("page")
    for path in (*PAGE.glob("*.js"), *TESTS):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def node(folder: Path, *arguments: str) -> None:
    result = subprocess.run([str(NODE), *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_syntax(modules: Path) -> None:
    for path in sorted(PAGE.glob("*.js")):
        node(modules, "--check", path.name)


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [pytest.param(path.name, marks=[pytest.mark.slow] * (".slow." in path.name)) for path in TESTS]
)
def test_module(modules: Path, name: str) -> None:
    node(modules, name)
