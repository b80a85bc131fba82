"""MkDocs hooks of `make docs`: pages outside of docs/, API reference.

A page has the same path on the site as in the repository, without `docs/`, and its links are rewritten to match. So one
relative link works on the site and in the repository. A source file or folder that a page links to gets a page too.
"""

import contextlib
import fnmatch
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FRONT = ROOT / "README.md"
"""Front page of the repository; the site has docs/index.md instead."""

OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
    "examples/*/README.md",
    "packs/README.md",
    "plugins/*/README.md",
    "tests/oracle/README.md",
    "tools/demo/README.md",
)
"""Pages outside of docs/."""

MODULES = (
    "llamacli",
    "llamacli.sampling",
    "llamacli.chat.session",
    "llamacli.chat.codec",
    "llamacli.chat.formats",
    "llamacli.chat.syntax",
    "llamacli.branches",
    "llamacli.prefix",
    "llamacli.kv",
    "llamacli.hub.names",
    "llamacli.hub.repositories",
    "llamacli.hookspecs",
    "llamacli.architecture",
    "llamacli.tensor_table",
    "llamacli.ops.base",
    "llamacli.ops.lowering",
    "llamacli.ops.activations",
    "llamacli.quantization",
    "llamacli.gguf",
    "llamacli.tokenizer",
    "llamacli.engine",
    "llamacli.kernels.api",
    "llamacli.testing",
)
"""Modules of the API reference; a name that several of them export is described on the first one's page."""

LANGUAGES = {".py": "python", ".toml": "toml", ".service": "ini"}

BOOSTS = {
    **dict.fromkeys(("install.md", "first-model.md", "performance.md", "models.md", "faq.md", "troubleshooting.md"), 8),
    **dict.fromkeys(("index.md", "chat.md", "api.md", "serving.md", "checkpoints.md", "plugins.md", "tutorials/8*"), 6),
    **dict.fromkeys(("quantization.md", "architecture.md", "ollama.md", "benchmarks/*"), 8),
    **dict.fromkeys(("reference/*", "design/*", "tests/*", "tools/*", "CHANGELOG.md", "measurements.md"), 0.2),
    **dict.fromkeys(("cli.md", "server.md", "hooks/*", "plugins/*", "plugin-names.md", "request-fields.md"), 0.5),
}
"""Weights of pages in the site's search, by patterns: newcomers search for tasks."""

_KINDS = {griffe.Kind.FUNCTION: 0, griffe.Kind.CLASS: 1}

_LINK = re.compile(
    r"^ *(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^ *(?P=fence)[^\n]*$"  # code is left as it is
    r"|(?P<ticks>(?<!`)`+(?!`)).+?(?<!`)(?P=ticks)(?!`)"
    r"|\]\((?P<target>[^)#\s]+)(?P<fragment>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)


def written() -> dict[str, Path]:
    """Hand-written pages by their paths on the site."""
    pages = {path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
    return pages | {path.relative_to(ROOT).as_posix(): path for name in OUTSIDE for path in ROOT.glob(name)}


def targets(path: Path) -> Iterator[Path]:
    """Files and folders of the repository that a page links to."""
    for link in _LINK.finditer(path.read_text(encoding="utf-8")):
        if link["target"] and (target := _resolved(path, link["target"])):
            yield target


def _resolved(page: Path, target: str) -> Path | None:
    """File or folder that a link refers to.

    None for other sites, and for what does not exist.
    """
    if re.match(r"[a-z]+:", target):
        return None
    path = (page.parent / target).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _readme(path: Path) -> Path:
    """The README of a folder that has one; else the path itself."""
    return path / "README.md" if (path / "README.md").exists() else path


def site_path(path: Path) -> str:
    """Path of a file on the site."""
    path = _readme(path)
    if path == FRONT:
        return "index.md"
    name = path.relative_to(ROOT).as_posix().removeprefix("docs/")
    return name if path.suffix == ".md" or path.is_relative_to(ROOT / "docs") else f"source/{name}.md"


def sources() -> set[Path]:
    """Source files and folders that pages link to."""
    linked = {_readme(target) for page in written().values() for target in targets(page)}
    found = {path for path in linked if site_path(path).startswith("source/")}
    return found.union(*(path.glob("*.py") for path in found if path.is_dir()))


def source_page(path: Path) -> str:
    """Page of a source file, or of a folder's files, in Markdown."""
    title = path.relative_to(ROOT).as_posix()
    head = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\n---\n\n# `{title}`\n\n"
    if path.is_dir():
        return head + "\n".join(f"- [{file.name}]({path.name}/{file.name}.md)" for file in sorted(path.glob("*.py")))
    return f"{head}~~~~~~{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n~~~~~~\n"


def exported(module: griffe.Module) -> Iterator[griffe.Object]:
    """Public names of a module.

    Those of `__all__`, of its stub, or those that it defines.
    """
    for name, member in module.members.items():
        if module.exports:
            is_public = name in module.exports
        elif module.exports is not None:  # `__all__` is read from the stub
            is_public = member.is_alias and member.target_path.startswith("llamacli.")
        else:
            is_public = not (member.is_alias or member.is_module or name.startswith("_"))
        if is_public:
            with contextlib.suppress(griffe.AliasResolutionError):  # a name of another package
                yield member.final_target if member.is_alias else member


class Kernels(griffe.Extension):
    """Griffe extension that reads `llamacli.kernels`, a folder without `__init__.py`."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Add the modules of the folder to the package."""
        folder = ROOT / "core" / "llamacli" / "kernels"
        kernels = griffe.Module(folder.name, filepath=[folder], modules_collection=loader.modules_collection)
        pkg.set_member(folder.name, kernels)
        for path in sorted(folder.glob("*.py")):
            code = path.read_text(encoding="utf-8")
            loader.lines_collection[path] = code.splitlines()
            module = griffe.visit(
                path.stem,
                path,
                code,
                parent=kernels,
                extensions=loader.extensions,
                lines_collection=loader.lines_collection,
                modules_collection=loader.modules_collection,
            )
            kernels.set_member(path.stem, module)


def api_pages() -> dict[str, str]:
    """Pages of the API reference by their paths on the site."""
    package = griffe.load("llamacli", search_paths=[ROOT / "core"], extensions=griffe.load_extensions(Kernels))
    described: set[str] = set()
    pages = {}
    for name in MODULES:
        module = package[name.partition(".")[2]] if "." in name else package
        parts = [f"# {name}", module.docstring.value if module.docstring else ""]
        for member in sorted(exported(module), key=lambda member: _KINDS.get(member.kind, 2)):
            if member.docstring and member.path not in described:
                described.add(member.path)
                parts.append(f"::: {member.path}")
        pages[f"reference/{name}.md"] = "\n\n".join(parts) + "\n"
    return pages


def expanded(nav: Any, names: list[str]) -> Any:
    """Navigation with the matching pages in place of each pattern."""
    if isinstance(nav, dict):
        return {title: expanded(entry, names) for title, entry in nav.items()}
    if isinstance(nav, list):
        return [page for entry in nav for page in (_matching(entry, names) or [expanded(entry, names)])]
    return nav


def _matching(entry: Any, names: list[str]) -> list[str]:
    return fnmatch.filter(names, entry) if isinstance(entry, str) and "*" in entry else []


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the navigation."""
    names = [*(f"reference/{name}.md" for name in MODULES), *sorted(written())]
    config.nav = expanded(config.nav, names)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for name, path in written().items():
        if not files.get_file_from_path(name):
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, text in api_pages().items():
        files.append(File.generated(config, name, content=text))
    for path in sources():
        files.append(File.generated(config, site_path(path), content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Weigh a page for the search, and rewrite its links."""
    for pattern, boost in BOOSTS.items():
        if fnmatch.fnmatch(page.file.src_uri, pattern):
            page.meta.setdefault("search", {"boost": boost})
    path = written().get(page.file.src_uri)
    return relinked(markdown, path) if path else markdown


def relinked(markdown: str, path: Path) -> str:
    """Text of a page with links to paths of the site.

    Links to nothing stay, for MkDocs to report.
    """
    folder = posixpath.dirname(site_path(path))

    def link(found: re.Match[str]) -> str:
        target = _resolved(path, found["target"]) if found["target"] else None
        if target is None:
            return found[0]
        return f"]({posixpath.relpath(site_path(target), folder)}{found['fragment'] or ''})"

    return _LINK.sub(link, markdown)
