"""The wording rule: docstrings and headings begin with plain, short technical terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("core/llamacli", "plugins", "tests", "benchmarks", "tools")
PAGES = ("README.md", "CHANGELOG.md", "docs", "plugins", "tests", "benchmarks", "tools")

MAX_WORDS = 12
FIRST_WORDS = frozenset({"what", "who", "how", "let", "those", "one", "whether", "say"})
PHRASES = (
    "anew",
    "regime",
    "dice",
    "swallow",
    "swallows",
    "that which",
    "which is no",
    "is no",
    "are no",
    "told by",
    "tells apart",
    "a worker's life",
)
_PHRASE = re.compile(rf"\b(?:{'|'.join(map(re.escape, PHRASES))})\b", re.IGNORECASE)
_CODE = re.compile(r"(`+).+?\1")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_FENCE = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def faults(line: str) -> Iterator[str]:
    """Violations of the rule; code in backticks counts as one word."""
    words = [word for word in _CODE.sub("code", line).split() if any(map(str.isalnum, word))]
    if len(words) > MAX_WORDS:
        yield f"{len(words)} words, {MAX_WORDS} are allowed"
    if words and words[0].strip("\"'.,:;()").lower() in FIRST_WORDS:
        yield f"begins with {words[0]!r}"
    if found := _PHRASE.search(line):
        yield f"holds {found[0]!r}"


def python_files() -> Iterator[Path]:
    for folder in SOURCES:
        yield from sorted((ROOT / folder).rglob("*.py"))


def markdown_files() -> Iterator[Path]:
    for name in PAGES:
        path = ROOT / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.md"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and first lines of all docstrings of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text.splitlines()[0]


def headings(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of Markdown headings, outside of code blocks."""
    text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"))
    for found in _HEADING.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, _LINK.sub(r"\1", found[1])


def report(path: Path, lines: Iterator[tuple[int, str]]) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    return [f"{name}:{number}: {fault}: {line}" for number, line in lines for fault in faults(line)]


def test_docstrings_begin_with_plain_terms() -> None:
    found = [fault for path in python_files() for fault in report(path, docstrings(path))]
    assert not found, "\n".join(found)


def test_headings_are_plain_terms() -> None:
    found = [fault for path in markdown_files() for fault in report(path, headings(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "What samplers work on.",
        '"Say" is not a first word.',
        "Draw the random numbers anew.",
        "A text that is no number.",
        "The shifted keys of all the cells that lie after the removed ones now.",
    ],
)
def test_rule_finds_faults(line: str) -> None:
    assert list(faults(line))


@pytest.mark.parametrize("line", ["Sampler chains.", "Softmax of `logits[i] for i in range(n)`, in float64."])
def test_rule_accepts_plain_lines(line: str) -> None:
    assert not list(faults(line))
