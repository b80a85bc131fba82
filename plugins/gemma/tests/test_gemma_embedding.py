"""Hyperparameters and invalid files of EmbeddingGemma.

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
from llamacli_gemma.embedding import GemmaEmbedding
from tiny_gemma_embedding import ENCODERS, write_gemma_embedding


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Embedder:
        path = write_gemma_embedding(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("gemma-embedding", "llamacli_gemma", ARCHITECTURES)])
        return load_embedder(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@pytest.mark.parametrize("n_dense", [0, 96])
def test_every_key_is_read(n_dense: int, load: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(n_dense=n_dense).embed([5, 9, 1]).shape == (64,)
    assert caplog.messages == []


@parametrize_with_checks([GemmaEmbedding()], ENCODERS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("n_dense", "key", "value"),
    [
        (0, "attention.layer_norm_rms_epsilon", None),
        (0, "attention.sliding_window", None),
        (0, "attention.sliding_window", 0),
        (0, "attention.sliding_window_pattern", "x"),
        (0, "dense_2_feat_in", 64),
        (96, "dense_2_feat_in", 63),
        (96, "dense_3_feat_in", None),
        (96, "dense_3_feat_out", 96),
    ],
)
def test_keys_are_named(n_dense: int, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"gemma-embedding\.{key}"):
        load(n_dense=n_dense, metadata={f"gemma-embedding.{key}": value})


def test_dense_tensors_without_their_keys_are_refused(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tensor dense_2\.weight \(8, 8\) is not one that"):
        load(tensors={"dense_2.weight": np.ones((8, 8))})
