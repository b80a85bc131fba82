"""`llamacli rank`."""

import json
from pathlib import Path

import pytest

from llamacli.cli.app import app
from llamacli.cli.rank import rank
from llamacli.tools.embedding import load_embedder


@pytest.fixture
def reranker(tiny_gguf, monkeypatch) -> Path:
    monkeypatch.setitem(app.commands, "rank", rank)
    return tiny_gguf("qwen3_rank", tokenizer="spm")


def test_the_most_relevant_text_comes_first(invoke, reranker: Path, plugins) -> None:
    texts = ["a dog", "the ball", "once upon a time"]
    lines = [json.loads(line) for line in invoke("rank", reranker, "a girl", *texts).stdout.splitlines()]
    expected = load_embedder(reranker, plugins=plugins).rank("a girl", texts)
    assert [line["score"] for line in lines] == sorted((line["score"] for line in lines), reverse=True)
    assert sorted(line["index"] for line in lines) == [0, 1, 2]
    for line in lines:
        assert line["text"] == texts[line["index"]]
        assert line["score"] == pytest.approx(expected[line["index"]], rel=1e-7)


def test_texts_from_stdin(invoke, reranker: Path) -> None:
    given = invoke("rank", reranker, "a girl", input="a dog\nthe ball\n").stdout
    assert given == invoke("rank", reranker, "a girl", "a dog", "the ball").stdout


def test_errors(invoke, reranker: Path, model: Path) -> None:
    for args, code, message in (
        ((reranker, "x"), 2, "Give TEXT, or pipe lines in."),
        ((reranker, "x", "a", "dog " * 300), 1, "text 2: context overflow"),
        ((model, "x", "a"), 1, "text 1: the model has no classifier head"),
    ):
        result = invoke("rank", *args)
        assert result.exit_code == code
        assert message in result.stderr
    result = invoke("embed", reranker, "a dog")
    assert (result.exit_code, "use `llamacli rank`" in result.stderr) == (2, True)
    assert json.loads(invoke("embed", reranker, "a dog", "--pooling", "last").stdout)["text"] == "a dog"
