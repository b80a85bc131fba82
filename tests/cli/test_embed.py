"""`llamacli embed`."""

import json
from pathlib import Path

import numpy as np
import pytest

from adapters import write_adapter
from llamacli.tools.embedding import load_embedder


def embedded(stdout: str) -> list[dict]:
    return [json.loads(line) for line in stdout.splitlines()]


def test_line_per_text(invoke, model: Path, plugins) -> None:
    lines = embedded(invoke("embed", model, "a dog", "once é").stdout)
    assert [line["text"] for line in lines] == ["a dog", "once é"]
    embedder = load_embedder(model, plugins=plugins)
    for line in lines:
        tokens = embedder.tokenizer.encode(line["text"])
        assert line["n_tokens"] == len(tokens)
        np.testing.assert_array_equal(np.float32(line["embedding"]), embedder.embed(tokens))


def test_texts_from_stdin(invoke, model: Path) -> None:
    lines = embedded(invoke("embed", model, input="a dog\n\nonce").stdout)
    assert [line["text"] for line in lines] == ["a dog", "", "once"]
    assert lines[0] == embedded(invoke("embed", model, "a dog").stdout)[0]


def test_adapters_change_vectors(invoke, model: Path, plugins, tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a.gguf", model, chosen=lambda name: name != "output.weight")
    texts = {scale: invoke("embed", model, "a dog", "--lora", f"{file}:{scale}").stdout for scale in (0, 0.5, 1)}
    assert texts[0] == invoke("embed", model, "a dog").stdout
    assert len(set(texts.values())) == 3
    with load_embedder(model, plugins=plugins, lora_path=file, lora_scale=0.5) as embedder:
        np.testing.assert_array_equal(np.float32(embedded(texts[0.5])[0]["embedding"]), embedder.embed("a dog"))


def test_pooling_and_normalization(invoke, model: Path) -> None:
    (last,) = embedded(invoke("embed", model, "a dog", "--pooling", "last", "--no-normalize").stdout)
    (rows,) = embedded(invoke("embed", model, "a dog", "--pooling", "none", "--no-normalize").stdout)
    assert len(rows["embedding"]) == rows["n_tokens"]
    np.testing.assert_allclose(rows["embedding"][-1], last["embedding"], rtol=1e-5, atol=1e-6)
    assert np.linalg.norm(last["embedding"]) != pytest.approx(1)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--pooling", "max", "x"), 2, "'max' is not one of"),
        ((), 2, "Give TEXT, or pipe lines in."),
        (("dog", "dog " * 100), 1, "text 2: context overflow"),
    ],
)
def test_errors(args: tuple[str, ...], code: int, message: str, invoke, model: Path) -> None:
    result = invoke("embed", model, *args)
    assert result.exit_code == code
    assert message in result.stderr


def test_missing_file(invoke, tmp_path: Path) -> None:
    result = invoke("embed", tmp_path / "none.gguf", "x")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
