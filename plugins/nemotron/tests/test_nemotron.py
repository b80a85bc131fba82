"""Keys, tensors and invalid files of Nemotron.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Model, ModelFormatError, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_nemotron import Nemotron
from tiny_nemotron import MATRICES, VARIANTS, write_nemotron

TOKENS = list(range(3, 43))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(**options: Any) -> Model:
        path = write_nemotron(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("nemotron", "llamacli_nemotron", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Nemotron()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", MATRICES)
def test_biases_change_the_logits(name: str, load: Any) -> None:
    def logits(**options: Any) -> np.ndarray:
        return load(**options).create_session().eval(TOKENS, all_logits=True)

    assert np.abs(logits() - logits(biases=(name,))).max() > 1e-4


def test_queries_may_be_wider_than_the_embedding(load: Any) -> None:
    """As Minitron 4B has them; the recorded llama.cpp refuses them."""
    model = load(head_dim=32, n_head=3, n_head_kv=1)
    assert (model.config.head_dim, model.config.rope.n_dims) == (32, 16)
    assert np.isfinite(model.create_session().eval(TOKENS, all_logits=True)).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_epsilon", None),
        ("attention.layer_norm_epsilon", -1.0),
        ("block_count", None),
        ("attention.head_count_kv", 3),
        ("rope.dimension_count", 18),
        ("rope.scaling.type", "other"),
    ],
)
def test_invalid_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"nemotron.{key}"):
        load(metadata={f"nemotron.{key}": value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": {"blk.0.ffn_gate.weight": np.ones((96, 64))}}, r"ffn_gate\.weight \(96, 64\) is not one that"),
        ({"tensors": {"rope_freqs.weight": np.ones(4)}}, r"rope_freqs\.weight \(4,\) is not one that"),
    ],
)
def test_invalid_tensors_are_named(options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(**options)
