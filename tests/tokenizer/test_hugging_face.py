"""Vocabularies of Hugging Face folders: damaged and unknown ones."""

import json
from pathlib import Path

import pytest

from checkpoint_cases import LLAMA3_SPLIT, QWEN2_SPLIT, write_bpe, write_sentencepiece
from llamacli.errors import ModelFormatError
from llamacli.tokenizer.hugging_face import pre_tokenizer, vocabulary_keys
from llamacli.tokenizer.sentencepiece import read_sentencepiece
from llamacli.util.files import read_json


@pytest.mark.parametrize(
    ("split", "preferred", "name"),
    [(QWEN2_SPLIT, ("qwen2",), "qwen2"), (LLAMA3_SPLIT, (), "dbrx"), (None, ("olmo",), "olmo")],
)
def test_pre_tokenizer(split: str | None, preferred: tuple[str, ...], name: str, tmp_path: Path) -> None:
    write_bpe(tmp_path, split)
    assert pre_tokenizer(tmp_path, read_json(tmp_path / "tokenizer.json"), preferred) == name


@pytest.mark.parametrize(
    ("split", "text"), [(r"[a-c]+", "no known value of tokenizer.ggml.pre"), (r"(", "pre_tokenizer: missing \\)")]
)
def test_unknown_pre_tokenizer(split: str, text: str, tmp_path: Path) -> None:
    write_bpe(tmp_path, split)
    with pytest.raises(ModelFormatError, match=text):
        vocabulary_keys(tmp_path, {"vocab_size": 320}, ("bpe",), ())


def test_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"no tokenizer.*copy those of the base model"):
        vocabulary_keys(tmp_path, {}, ("sentencepiece", "bpe"), ())
    write_bpe(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"model": content["model"] | {"type": "WordLevel"}}))
    with pytest.raises(ModelFormatError, match=r"kind 'WordLevel' \(model\.type\), of which bpe cannot"):
        vocabulary_keys(tmp_path, {}, ("bpe",), ())
    path.write_text("{")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json: no JSON"):
        vocabulary_keys(tmp_path, {}, ("bpe",), ())


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-3], lambda raw: b"", lambda raw: b"\xff" * 12, lambda raw: b"\x0b"]
)
def test_damaged_sentencepiece(damage, tmp_path: Path) -> None:
    n_pieces = write_sentencepiece(tmp_path)
    path = tmp_path / "tokenizer.model"
    assert len(read_sentencepiece(path)) == n_pieces
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelFormatError, match=r"tokenizer\.model: no SentencePiece model"):
        read_sentencepiece(path)
