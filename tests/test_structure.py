"""Rules about the code itself."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamacli

CORE = Path(__file__).resolve().parents[1] / "core" / "llamacli"
SOURCES = sorted(CORE.rglob("*.py"))

FAMILIES = r"llama|qwen|phi[-_]?\d|gemma|gpt[-_]?oss|mistral|mixtral|smollm|tinyllama|falcon|deepseek|mamba"
NAMES = re.compile(rf"(?<![a-z])(?:{FAMILIES})", re.IGNORECASE)
OURS_AND_THE_PEER = re.compile(r"llama_?cli|llama\.cpp|llama-cpp-python", re.IGNORECASE)

LAYERS = [
    {"errors"},
    {"util"},
    {"quantization"},
    {"gguf"},
    {"tokenizer"},
    {"kernels"},
    {"kv"},
    {"ops"},
    {"graph"},
    {"loaders"},
    {"conversion", "engine", "sampling"},
    {"architecture"},
    {"hookspecs"},
    {"plugins"},
    {"model"},
    {"session"},
    {"branches"},
    {"chat"},
    {"tools"},
    {"testing"},
    {"prefix"},
    {"cli"},
    {"__main__"},
]
"""From the bottom up. A module imports what lies below it, and the rest of its own package."""
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def package(path: Path) -> str:
    """The module or folder of the core that a source belongs to."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imports(statements: list[ast.stmt], *, deferred: bool) -> Iterator[str]:
    """What these statements import of the core, as names below it; with `deferred`, inside functions too."""
    for statement in statements:
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=rest):
                yield from imports(rest, deferred=deferred)
            case ast.ImportFrom(module="llamacli", names=names):
                yield from (llamacli._MODULE_OF.get(name.name, name.name).split(".")[0] for name in names)
            case ast.ImportFrom(module=str(module)) if module.startswith("llamacli."):
                yield module.split(".")[1]
            case ast.Import(names=names):
                yield from (name.name.split(".")[1] for name in names if name.name.startswith("llamacli."))
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not deferred:
                pass
            case _:
                for field in ("body", "orelse", "finalbody", "handlers"):
                    yield from imports(getattr(statement, field, []), deferred=deferred)


def imports_of(path: Path, *, deferred: bool = False) -> set[str]:
    return set(imports(ast.parse(path.read_text()).body, deferred=deferred))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CORE)))
def test_the_core_names_no_model_family(path: Path) -> None:
    if package(path) == "tokenizer" or path == CORE / "testing" / "vocabularies.py":
        return  # names of tokenizer schemes are data: values of tokenizer.ggml.* keys
    lines = enumerate(OURS_AND_THE_PEER.sub("", path.read_text()).splitlines(), start=1)
    assert [f"{path.name}:{number}: {line.strip()}" for number, line in lines if NAMES.search(line)] == []


def test_the_search_for_names_finds_them() -> None:
    for line in ("if arch == 'qwen2':", "LLAMA = 1", "class Phi3Config:", "# as gpt-oss does", "gemma4"):
        assert NAMES.search(OURS_AND_THE_PEER.sub("", line)), line
    for line in ("llamacli", "LLAMACLI_API", "as llama.cpp does", "graphics", "philosophy"):
        assert not NAMES.search(OURS_AND_THE_PEER.sub("", line)), line


def test_every_module_has_its_layer() -> None:
    assert {package(path) for path in SOURCES} - {"__init__"} == LAYER.keys()


@pytest.mark.parametrize("name", sorted(LAYER))
def test_imports_go_down(name: str) -> None:
    for path in SOURCES:
        if package(path) == name:
            used = imports_of(path) & LAYER.keys() - {name}
            assert {other for other in used if LAYER[other] >= LAYER[name]} == set(), path.name


def test_the_search_for_imports_finds_them() -> None:
    source = """
from llamacli import Model, gguf
import llamacli.kv
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from llamacli.cli import app
try:
    from llamacli.engine.base import Engine
except ImportError:
    def f():
        from llamacli.session import Session
"""
    body = ast.parse(source).body
    assert set(imports(body, deferred=False)) == {"model", "gguf", "kv", "engine"}
    assert set(imports(body, deferred=True)) == {"model", "gguf", "kv", "engine", "session"}


def test_kernels_know_arrays_only() -> None:
    used = {name for path in CORE.glob("kernels/**/*.py") for name in imports_of(path, deferred=True)}
    assert used <= {"kernels", "util", "errors", "quantization"}


def test_plugins_import_the_core_and_never_each_other() -> None:
    plugins = CORE.parents[1] / "plugins"
    for path in plugins.rglob("llamacli_*/*.py"):
        own = path.relative_to(plugins).parts[1]
        tree = ast.walk(ast.parse(path.read_text()))
        modules = {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}
        assert not {module for module in modules if module.startswith("llamacli_") and module.split(".")[0] != own}


def test_every_distribution_brings_its_licence_and_its_types() -> None:
    root = CORE.parents[1]
    for folder in (root, *(path.parent for path in root.glob("plugins/*/pyproject.toml"))):
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert project["project"]["license-files"] == ["LICENSE"]
        assert (folder / "LICENSE").read_text() == (root / "LICENSE").read_text()
        for package, files in project["tool"]["setuptools"]["package-data"].items():
            assert "py.typed" in files
            assert ((CORE.parent if folder == root else folder) / package / "py.typed").is_file()


def test_importing_the_package_is_cheap() -> None:
    heavy = {"numpy", "numba", "gguf", "tokenizers", "click", "jinja2"}
    code = f"import sys, llamacli; print(sorted({heavy} & sys.modules.keys()))"
    path = f"import sys; sys.path.insert(0, {str(CORE.parent)!r}); "
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in llamacli.__all__:
        assert getattr(llamacli, name).__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = llamacli.no_such_name
    assert set(llamacli.__all__) <= set(dir(llamacli))
