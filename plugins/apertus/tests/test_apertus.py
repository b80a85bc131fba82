"""Keys, tensors and invalid files of Apertus.

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
from llamacli_apertus import Apertus
from tiny_apertus import VARIANTS, write_apertus

TOKENS = list(range(3, 43))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(**options: Any) -> Model:
        path = write_apertus(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("apertus", "llamacli_apertus", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Apertus()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_one_number_is_that_of_all_layers(load: Any) -> None:
    config = load(metadata={"xielu.beta": 0.25}).config
    assert [layer.beta for layer in config.xielu] == [0.25, 0.25]
    assert config.xielu[0].alpha_n != config.xielu[1].alpha_n


@pytest.mark.parametrize("key", ["alpha_n", "alpha_p", "beta", "eps"])
@pytest.mark.parametrize("value", [None, "x", [0.5], [0.5, float("nan")], [0.1, 0.2, 0.3]])
def test_invalid_numbers_of_xielu_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"xielu.{key}"):
        load(metadata={f"xielu.{key}": value})


@pytest.mark.parametrize("key", ["alpha_n", "alpha_p", "beta"])
def test_numbers_of_xielu_change_the_logits(key: str, load: Any) -> None:
    def logits(metadata: dict[str, Any]) -> np.ndarray:
        return load(metadata=metadata).create_session().eval(TOKENS, all_logits=True)

    assert np.abs(logits({}) - logits({f"xielu.{key}": [0.8, 2.5]})).max() > 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.head_count_kv", 3),
        ("rope.dimension_count", 15),
        ("rope.scaling.type", "other"),
    ],
)
def test_invalid_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"apertus.{key}"):
        load(metadata={f"apertus.{key}": value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": {"blk.0.attn_q_norm.bias": np.ones(16)}}, r"attn_q_norm\.bias \(16,\) is not one that"),
        ({"tensors": {"blk.0.ffn_gate.weight": np.ones((96, 64))}}, r"ffn_gate\.weight \(96, 64\) is not one that"),
        ({"tensors": {"rope_factors_long.weight": np.ones(8)}}, r"rope_factors_long\.weight \(8,\) is not one that"),
    ],
)
def test_invalid_tensors_are_named(options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(**options)
