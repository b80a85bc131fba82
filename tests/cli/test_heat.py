"""`run --logprobs --html`: coloured tokens with alternatives."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest


class Page(HTMLParser):
    """Parser of a page: nesting, texts of tokens and alternatives, colours."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.tokens: list[str] = []
        self.others: list[str] = []
        self.lightness: list[int] = []
        self.feed(page)
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "meta":
            return
        kind = dict(attributes).get("class") or ""
        self.open.append((tag, kind))
        if kind == "token":
            self.tokens.append("")
            self.others.append("")
            self.lightness.append(int(re.search(r"(\d+)%\)$", dict(attributes)["style"])[1]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        kinds = [kind for _, kind in self.open]
        if "others" in kinds:
            self.others[-1] += data
        elif "token" in kinds:
            self.tokens[-1] += data


def test_page_shows_every_token(invoke, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    options = ("--raw", "-p", "once upon <b> a", "-n", "12", "--seed", "3", "--ignore-eos", "--logprobs", "3")
    answer = json.loads(invoke("run", model, *options, "--json", "--html", str(out)).stdout)
    page = Page(out.read_text())
    assert "".join(page.tokens) == answer["text"]
    assert "once upon &lt;b&gt; a" in out.read_text()
    for others, lightness, token in zip(page.others, page.lightness, answer["logprobs"], strict=True):
        assert len(others.splitlines()) in (3, 4)
        assert repr(token["token"]) in others or "\\ufffd" in repr(token["token"]) or "\ufffd" in others
        assert 60 <= lightness <= 100


def test_html_needs_logprobs(invoke, model: Path, tmp_path: Path) -> None:
    done = invoke("run", model, "-n", "1", "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 2
    assert "add --logprobs N" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["missing/page.html", "."])
def test_error_for_unwritable_file(name: str, invoke, model: Path, tmp_path: Path) -> None:
    done = invoke("run", model, "-n", "1", "--logprobs", "1", "--html", str(tmp_path / name))
    assert done.exit_code != 0
    assert str(tmp_path) in done.stderr
