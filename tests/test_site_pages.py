"""Pages of the documentation site that come from outside of docs/."""

import fnmatch
import re

import pytest

pytest.importorskip("mkdocs")

from site_pages import MODULES, ROOT, api_pages, expanded, relinked, site_path, source_page, sources, targets, written


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("CHANGELOG.md", "[a](docs/cli.md#llamacli-run)", "[a](cli.md#llamacli-run)"),
        ("docs/plugins.md", "[a](../examples/)", "[a](examples/README.md)"),
        ("docs/hooks/verb.md", "[a](../../core/llamacli/ops/add.py)", "[a](../source/core/llamacli/ops/add.py.md)"),
        ("plugins/qwen/README.md", "[a](../../README.md)", "[a](../../index.md)"),
        ("docs/cli.md", "[a](nothing.md), [b](https://example.org/x.md), [c](#run)", None),
        ("docs/cli.md", "`[a](../README.md)`, ``[`](../README.md)``", None),
        ("docs/cli.md", "```python\n[a](../README.md)\n```\n", None),
    ],
)
def test_links_are_rewritten(page: str, text: str, expected: str | None) -> None:
    assert relinked(text, ROOT / page) == (expected or text)


def test_pages_keep_their_paths() -> None:
    pages = written()
    assert pages["CHANGELOG.md"] == ROOT / "CHANGELOG.md"
    assert pages["cli.md"] == ROOT / "docs" / "cli.md"
    assert pages["plugins/llama/README.md"] == ROOT / "plugins" / "llama" / "README.md"
    assert all(site_path(path) == name for name, path in pages.items())


def test_linked_sources_are_pages() -> None:
    found = sources()
    assert ROOT / "core" / "llamacli" / "ops" / "add.py" in found
    assert all(path.exists() and path.suffix != ".md" for path in found)
    assert ROOT / "core" / "llamacli" / "ops" in set(targets(ROOT / "docs" / "plugins.md"))


def test_source_page_shows_the_file() -> None:
    page = source_page(ROOT / "core" / "llamacli" / "ops" / "add.py")
    assert "# `core/llamacli/ops/add.py`" in page
    assert (ROOT / "core" / "llamacli" / "ops" / "add.py").read_text() in page
    assert "- [add.py](ops/add.py.md)" in source_page(ROOT / "core" / "llamacli" / "ops")


def test_navigation_is_expanded() -> None:
    names = ["tutorials/1-hello.md", "tutorials/README.md"]
    assert expanded([{"Tutorials": ["tutorials/README.md", "tutorials/[0-9]*.md"]}], names) == [
        {"Tutorials": ["tutorials/README.md", "tutorials/1-hello.md"]}
    ]


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    patterns = re.findall(r"- (?:\w+: )?(\S+\.md)$", nav, re.MULTILINE)
    assert [name for name in written() if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


@pytest.mark.slow
def test_every_public_name_is_described_once() -> None:
    pages = api_pages()
    assert len(pages) == len(MODULES)
    described = [path for page in pages.values() for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    assert len(described) == len(set(described))
    for path in (
        "model.load_model",
        "model.Model",
        "session.Session",
        "sampling.truncation.TopK",
        "kernels.jit.Kernel",
        "kernels.simd",
    ):
        assert f"llamacli.{path}" in described
