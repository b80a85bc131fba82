"""Hyperparameters and invalid files of BERT and Nomic BERT.

`tests/tools/test_embedding.py` of the core compares vectors with llama.cpp's.
"""

import logging
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import ModelFormatError
from llamacli.engine import ReferenceEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli.tools.embedding import Embedder, load_embedder
from llamacli_bert import Bert, NomicBert
from tiny_bert import CLASSIFIERS, ENCODERS, INERT, write_bert

NAMES = ("bert", "nomic-bert")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(architecture: str = "bert", **options: Any) -> Embedder:
        path = write_bert(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_bert", ARCHITECTURES) for name in NAMES])
        return load_embedder(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_read(name: str, load: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(name).embed([5, 9, 1]).shape == (64,)
    assert caplog.messages == []


@parametrize_with_checks([Bert(), NomicBert()], ENCODERS | CLASSIFIERS, inert=INERT, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_epsilon", None),
        ("attention.layer_norm_epsilon", -1.0),
        ("attention.causal", True),
        ("attention.key_length", 8),
        ("attention.head_count_kv", 3),
        ("pooling_type", 5),
    ],
)
def test_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"{name}\.{key}"):
        load(name, metadata={f"{name}.{key}": value})


@pytest.mark.parametrize("value", [None, 0, "x"])
def test_number_of_token_types_is_required(value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.token_type_count"):
        load(metadata={"tokenizer.ggml.token_type_count": value})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("bert", "blk.0.ffn_gate.weight"), ("nomic-bert", "position_embd.weight"), ("nomic-bert", "blk.0.ffn_up.bias")],
)
def test_unknown_tensors_are_named(name: str, tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {tensor} \(8,\) is not one that"):
        load(name, tensors={tensor: np.ones(8)})


def test_all_tokens_are_of_type_0(load: Any) -> None:
    types = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)
    first, second = (load(tensors={"token_types.weight": rows}).embed([5, 9]) for rows in (types, types * [[1], [7]]))
    np.testing.assert_array_equal(first, second)
