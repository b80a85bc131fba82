"""Search of the documentation site: first pages of queries."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")
lunr = pytest.importorskip("lunr")
pytest.importorskip("lunr.builder")
pytest.importorskip("lunr.stop_word_filter")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]

QUERIES = {
    "install": "install",
    "pip install": "install",
    "uninstall": "install",
    "docker": "install",
    "windows": "install",
    "macos": "install",
    "first model": "first-model",
    "get started": "",
    "choose a model": "first-model",
    "download a model": "models",
    "remove model": "models",
    "gpu": "faq",
    "internet": "faq",
    "system prompt": "faq",
    "troubleshooting": "troubleshooting",
    "where are files": "troubleshooting",
    "address already in use": "troubleshooting",
    "convert safetensors": "checkpoints",
    "hugging face": "checkpoints",
    "quantize": "quantization",
    "imatrix": "quantization",
    "lora": "lora",
    "ollama": "ollama",
    "chat": "chat",
    "images": "images",
    "python": "api",
    "embeddings": "api",
    "openai server": "serving",
    "json schema": "tutorials/8-answers-as-data",
    "tools functions": "tutorials/8-answers-as-data",
    "benchmark": "benchmarks/",
    "speed": "performance",
    "determinism": "reliability",
    "write a plugin": "plugins",
    "architecture": "architecture",
    "temperature": "samplers",
}
"""Pages by the queries that must find them first."""


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Search index of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=600)
    found: list[dict[str, Any]] = json.loads((folder / "search" / "search_index.json").read_text("utf-8"))["docs"]
    return found


def indexed(documents: list[dict[str, Any]]) -> Any:
    """Index with the fields, boosts and pipeline of Material for MkDocs."""
    builder = lunr.builder.Builder()
    builder.ref("location")
    builder.field("title", 1e3)
    builder.field("text", 1)
    builder.pipeline.add(lunr.stop_word_filter.stop_word_filter)
    for document in documents:
        texts = {field: re.sub(r"<[^>]*>", " ", html.unescape(document[field])) for field in ("title", "text")}
        builder.add(document | texts, {"boost": document.get("boost", 1)})
    return builder.build()


def ranked(index: Any, query: str) -> list[str]:
    """Pages, best first, as by Material for MkDocs.

    The best section of a page counts. A term matches what it begins. Scores count twice for a page or with all terms,
    and five times for both.
    """
    terms = query.split()
    best: dict[str, float] = {}
    for found in index.search(" ".join(f"{term}*" for term in terms)):
        page, _, anchor = found["ref"].partition("#")
        words = found["match_data"].metadata
        has_all = all(any(word.startswith(term) for word in words) for term in terms)
        score = found["score"] * (1 + ((not anchor) + has_all) ** 2)
        best[page] = max(best.get(page, 0), score)
    return sorted(best, key=lambda page: -best[page])


@pytest.fixture(scope="session")
def index(documents: list[dict[str, Any]]) -> Any:
    return indexed(documents)


@pytest.mark.parametrize("query", QUERIES)
def test_first_page(query: str, index: Any) -> None:
    pages = [page.removesuffix(".html").removesuffix("index") for page in ranked(index, query)]
    assert pages[:1] == [QUERIES[query]], pages[:5]


def test_page_with_all_terms_is_first() -> None:
    documents = [
        {"location": "a.html", "title": "Cache", "text": "layers"},
        {"location": "b.html", "title": "Cache types", "text": "keys"},
        {"location": "b.html#x", "title": "Types", "text": "keys"},
    ]
    assert ranked(indexed(documents), "cache type") == ["b.html", "a.html"]
