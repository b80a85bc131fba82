"""Hyperparameters and invalid files of EXAONE.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import re
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
from llamacli_exaone import Exaone4
from tiny_exaone import VARIANTS, write_exaone

DEEP = {"n_layer": 64, "n_embd": 16, "n_head": 1, "n_head_kv": 1, "n_ff": 16}


@pytest.fixture
def load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    plugins = Plugins([EntryPoint("exaone4", "llamacli_exaone", ARCHITECTURES)])

    def write_and_load(**options: Any) -> Model:
        path = write_exaone(tmp_path / "model.gguf", **options)
        model = load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())
        assert not caplog.records, "keys of the file are not read"
        return model

    return write_and_load


@parametrize_with_checks([Exaone4()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_small_models_do_not_slide(load: Any) -> None:
    config = load(metadata={"exaone4.attention.sliding_window": 8}).config
    assert (config.windows, config.rotates) == ((None, None), (True, True))


@pytest.mark.parametrize("n_nextn", [0, 1])
def test_full_layers_of_the_32b_model_have_no_rope(n_nextn: int, load: Any) -> None:
    config = load(n_nextn=n_nextn, **DEEP).config
    assert config.windows == (4096, 4096, 4096, None) * 16
    assert config.rotates == (True, True, True, False) * 16


def test_blocks_of_multi_token_prediction_change_nothing(load: Any) -> None:
    logits = [load(n_nextn=n, biases=True).create_session().eval([1, 2, 3]) for n in (0, 1)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("attention.layer_norm_rms_epsilon", None, "'{key}' is missing"),
        ("attention.head_count_kv", 1, "blk.0.attn_k.weight has shape (32, 64), expected (16, 64)"),
        ("attention.sliding_window", 0, "'{key}' is 0; at least 1 is needed"),
        ("rope.dimension_count", 8, "'{key}' is 8; at least 16 is needed"),
        ("nextn_predict_layers", 2, "'{key}' is 2; at most 1 is supported"),
    ],
)
def test_invalid_keys_are_named(key: str, value: Any, problem: str, load: Any) -> None:
    key = f"exaone4.{key}"
    with pytest.raises(ModelFormatError, match=re.escape(problem.format(key=key))):
        load(metadata={key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("rope.freq_base_swa", 100.0), ("attention.sliding_window_pattern", [True] * 4)]
)
def test_invalid_keys_of_sliding_layers_are_named(key: str, value: Any, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"exaone4.{key}")):
        load(metadata={f"exaone4.{key}": value}, **DEEP)


@pytest.mark.parametrize("tensor", ["blk.0.attn_norm.weight", "blk.1.nextn.enorm.weight"])
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {re.escape(tensor)} \(64,\) is not one"):
        load(tensors={tensor: np.zeros(64)})
