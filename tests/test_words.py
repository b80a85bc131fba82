"""The wording rule: docstrings and headings begin with plain, short technical terms."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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
_PRONOUNS = re.compile(r"\b(?:those|that of|such(?! as)|what)\b", re.IGNORECASE)
PRONOUNS_IN_DOCSTRINGS, PRONOUNS_ON_PAGES = 65, 37
"""Limits of pronouns that stand for a noun of another sentence, in 10,000 words; lower them as texts improve."""
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
    """Line numbers and texts of all docstrings of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def headings(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts of Markdown headings, outside of code blocks."""
    text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"))
    for found in _HEADING.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, _LINK.sub(r"\1", found[1])


def report(path: Path, lines: Iterator[tuple[int, str]]) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    return [
        f"{name}:{number}: {fault}: {line}"
        for number, text in lines
        for line in text.splitlines()[:1]
        for fault in faults(line)
    ]


def test_docstrings_begin_with_plain_terms() -> None:
    found = [fault for path in python_files() for fault in report(path, docstrings(path))]
    assert not found, "\n".join(found)


def undocumented(module: ModuleType) -> Iterator[str]:
    """Public methods without a docstring, of their own or overridden."""
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__ and not cls.__name__.startswith("_"):
            for name, member in vars(cls).items():
                function = getattr(member, "fget", getattr(member, "__func__", member))
                is_method = inspect.isfunction(function) and function.__qualname__ == f"{cls.__qualname__}.{name}"
                if is_method and not name.startswith("_") and not inspect.getdoc(getattr(cls, name)):
                    yield f"{module.__name__}.{cls.__qualname__}.{name}"


def test_methods_have_or_inherit_docstrings() -> None:
    paths = {path: path.relative_to(ROOT / "core") for path in sorted((ROOT / "core/llamacli").rglob("*.py"))}
    for folder in (ROOT / "plugins").iterdir():
        paths |= {path: path.relative_to(folder) for path in sorted(folder.glob("llamacli_*/**/*.py"))}
    found = []
    for path, relative in paths.items():
        extras = relative.parts[:3] == ("llamacli", "serve", "ray") or path.stem in ("llm", "lm_eval")
        if not extras and path.stem != "__main__":
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            found += undocumented(importlib.import_module(name))
    assert not found, "\n".join(found)


def test_undocumented_methods_are_found() -> None:
    source = "class A:\n def f(self): pass\n\nclass B(A):\n def f(self): pass\n def _g(self): pass\n"
    module = ModuleType("made")
    exec(source, vars(module))
    assert list(undocumented(module)) == ["made.A.f", "made.B.f"]


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


def pronouns(texts: list[str]) -> float:
    """Pronouns of `_PRONOUNS` in 10,000 words."""
    return 1e4 * sum(len(_PRONOUNS.findall(text)) for text in texts) / max(1, sum(len(text.split()) for text in texts))


def test_sentences_name_their_subjects() -> None:
    paths = [path for path in python_files() if path.is_relative_to(ROOT / "core")]
    found = [text for path in paths for _, text in docstrings(path)]
    assert pronouns(found) <= PRONOUNS_IN_DOCSTRINGS
    pages = [_FENCE.sub("", path.read_text("utf-8")) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    assert pronouns(pages) <= PRONOUNS_ON_PAGES
    assert pronouns(["Those of prompts, of these from the cache."]) > PRONOUNS_IN_DOCSTRINGS


def test_one_spelling() -> None:
    other = re.compile("quanti" + "s(?:e|ing|ation)", re.IGNORECASE)
    paths = [*python_files(), *markdown_files()]
    assert not [path for path in paths if other.search(path.read_text("utf-8"))]
