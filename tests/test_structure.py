"""Import layers, circles of imports, names and packaging of the code itself."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

import llamacli

CORE = Path(__file__).resolve().parents[1] / "core" / "llamacli"
SOURCES = sorted(CORE.rglob("*.py"))

FAMILIES = r"llama|qwen|phi[-_]?\d|gemma|gpt[-_]?oss|mistral|mixtral|smollm|tinyllama|falcon|deepseek|mamba"
NAMES = re.compile(rf"(?<![a-z])(?:{FAMILIES})", re.IGNORECASE)
OURS_AND_THE_PEER = re.compile(r"llama_?cli|llama[.-]?cpp(?:-python)?|llama-server|llama-eval-callback", re.IGNORECASE)

LAYERS = [
    {"errors"},
    {"util"},
    {"inputs"},
    {"hub"},
    {"quantization"},
    {"gguf"},
    {"kernels"},
    {"tokenizer"},
    {"kv"},
    {"ops"},
    {"graph"},
    {"loaders"},
    {"checkpoints"},
    {"tensor_table"},
    {"architecture"},
    {"parts"},
    {"blocks"},
    {"sampling"},
    {"conversion", "engine"},
    {"media"},
    {"generation"},
    {"session"},
    {"chat"},
    {"hookspecs"},
    {"plugin"},
    {"plugins"},
    {"model"},
    {"stages"},
    {"branches"},
    {"tools"},
    {"serve"},
    {"testing"},
    {"prefix"},
    {"compat"},
    {"cli"},
    {"__main__"},
]
"""From the bottom up. A module imports what lies below it, and the rest of its own package."""
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def module_of(path: Path) -> str:
    """The dotted name of a source's module, from `llamacli` on."""
    return ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


def package(module: str) -> str:
    """The module or folder of the core that a module belongs to.

    `kv` of `llamacli.kv.pool`.
    """
    return module.split(".")[1]


@functools.cache
def imports(source: str) -> set[str]:
    """Modules of the core that a source imports.

    In functions, and for type checkers only, too.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module="llamacli", names=names):
                found |= {llamacli._MODULE_OF.get(name.name, f"llamacli.{name.name}") for name in names}
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("llamacli."):
                found |= {full if (full := f"{module}.{name.name}") in MODULES else module for name in names}
            case ast.Import(names=names):
                found |= {name.name for name in names if name.name.startswith("llamacli.")}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of several nodes."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = edges.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    reach = {name: reached(name) for name in edges}
    found = [{other for other in reach[name] if name in reach.get(other, ())} for name in edges if name in reach[name]]
    return [circle for i, circle in enumerate(found) if len(circle) > 1 and circle not in found[:i]]


def test_the_core_names_no_model_family() -> None:
    data = {CORE / "testing" / "vocabularies.py", *(CORE / "tokenizer").glob("*.py")}  # values of tokenizer.ggml.* keys
    peer = {CORE / "testing" / f"{name}.py" for name in ("peer", "peer_media", "dump")}  # its names
    peer.add(CORE / "compat" / "llama_cpp.py")
    assert [
        f"{path.relative_to(CORE)}:{number}: {line.strip()}"
        for path in sorted({*SOURCES} - data - peer)
        for number, line in enumerate(OURS_AND_THE_PEER.sub("", path.read_text()).splitlines(), start=1)
        if NAMES.search(line)
    ] == []


def test_the_search_for_names_finds_them() -> None:
    for line in ("if arch == 'qwen2':", "LLAMA = 1", "class Phi3Config:", "# as gpt-oss does", "gemma4"):
        assert NAMES.search(OURS_AND_THE_PEER.sub("", line)), line
    for line in ("llamacli", "LLAMACLI_API", "as llama.cpp does", "graphics", "philosophy"):
        assert not NAMES.search(OURS_AND_THE_PEER.sub("", line)), line


def test_every_module_has_its_layer() -> None:
    assert {package(module) for module in MODULES if module != "llamacli"} == LAYER.keys()


def test_imports_go_down() -> None:
    assert [
        f"{module} imports {other}"
        for module in sorted(MODULES.keys() - {"llamacli"})
        for other in sorted(imports(MODULES[module].read_text()))
        if package(other) != package(module) and LAYER[package(other)] >= LAYER[package(module)]
    ] == []


def test_no_module_imports_itself_through_others() -> None:
    edges = {module: imports(path.read_text()) - {module} for module, path in MODULES.items()}
    assert circles(edges) == []


def test_imports_of_every_kind_are_found() -> None:
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
    modules = {"model", "gguf", "kv", "cli.app", "engine.base", "session"}
    assert imports(source) == {f"llamacli.{module}" for module in modules}


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f", "a"}}
    assert circles(edges) == [{"a", "b", "c"}, {"f", "g"}]


def test_kernels_know_arrays_only() -> None:
    used = {package(other) for path in CORE.glob("kernels/**/*.py") for other in imports(path.read_text())}
    assert used <= {"kernels", "util", "errors", "quantization"}


ROOT = CORE.parents[1]
OF_PLUGINS = sorted([*ROOT.glob("plugins/*/llamacli_*/**/*.py"), *ROOT.glob("examples/*/llamacli_*/**/*.py")])
CONTRACT = {"llamacli.plugin", "llamacli.testing"}
"""Modules of the core that plugins may import, the second one in tests and `tiny.py`."""


def foreign_imports(path: Path, allowed: set[str]) -> set[str]:
    """Modules of llamacli that a file imports, without allowed ones."""
    tree = list(ast.walk(ast.parse(path.read_text())))
    modules = {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {name.name for node in tree if isinstance(node, ast.Import) for name in node.names}
    found = {module for module in modules if re.match(r"llamacli(_|\.|$)", module)}
    own = {package.name for package in (*path.parents, *path.parent.parent.glob("llamacli_*"))}
    return {module for module in found - allowed if module.split(".")[0] not in own}


def allowed(path: Path) -> set[str]:
    return CONTRACT if path.name == "tiny.py" else {"llamacli.plugin"}


def test_plugins_import_the_contract_alone() -> None:
    assert len(OF_PLUGINS) > 60
    found = {str(path.relative_to(ROOT)): foreign_imports(path, allowed(path)) for path in OF_PLUGINS}
    assert {path: modules for path, modules in found.items() if modules} == {}


def test_tests_of_examples_and_skeletons_import_the_contract_alone() -> None:
    for path in ROOT.glob("examples/*/tests/*.py"):
        assert foreign_imports(path, CONTRACT) == set(), path
    for path in (CORE / "data" / "plugin").glob("*.py.tmpl"):
        assert set(re.findall(r"^from (llamacli\b[.\w]*) import", path.read_text(), re.M)) <= CONTRACT, path


@pytest.mark.medium
def test_importing_a_plugin_imports_no_compiler() -> None:
    code = "import sys, llamacli_llama, llamacli_gemma.altup; print(sorted({modules} & sys.modules.keys()))"
    modules = {"numba", "llvmlite", "llamacli.kernels.jit", "llamacli.sampling", "llamacli.tokenizer", "jinja2"}
    done = subprocess.run(
        [sys.executable, "-c", code.replace("{modules}", repr(modules))], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT / "core", *ROOT.glob("plugins/*")]))},
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_every_distribution_brings_its_licence_and_its_types() -> None:
    root = CORE.parents[1]
    for folder in (CORE.parent, *(path.parent for path in root.glob("plugins/*/pyproject.toml"))):
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert project["project"]["license-files"] == ["LICENSE"]
        assert (folder / "LICENSE").read_text() == (root / "LICENSE").read_text()
        for package, files in project["tool"]["setuptools"]["package-data"].items():
            assert "py.typed" in files
            assert (folder / package / "py.typed").is_file()


@pytest.mark.medium
def test_importing_the_package_is_cheap() -> None:
    heavy = {"numpy", "numba", "gguf", "regex", "click", "jinja2"}
    code = f"import sys, llamacli; print(sorted({heavy} & sys.modules.keys()))"
    path = f"import sys; sys.path.insert(0, {str(CORE.parent)!r}); "
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in llamacli.__all__:
        assert getattr(llamacli, name).__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = llamacli.no_such_name
    assert {name for name in dir(llamacli) if not name.startswith("__")} == set(llamacli.__all__)
