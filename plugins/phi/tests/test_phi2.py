"""Hyperparameters and invalid files of Phi-2.

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
from tiny_phi2 import write_phi2


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_phi2(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("phi2", "llamacli_phi", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_epsilon", None),
        ("attention.layer_norm_epsilon", "x"),
        ("attention.layer_norm_epsilon", -1.0),
        ("rope.dimension_count", 9),
        ("rope.dimension_count", 18),
        ("attention.head_count", 0),
    ],
)
def test_wrong_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"phi2.{key}"):
        load(metadata={f"phi2.{key}": value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"without": ["output.weight"]}, r"tensor output\.weight is missing"),
        ({"without": ["output.bias"]}, r"tensor output\.bias is missing"),
        ({"without": ["output_norm.bias"]}, r"tensor output_norm\.bias is missing, expected \(64,\)"),
        ({"without": ["blk.1.attn_norm.bias"]}, r"tensor blk\.1\.attn_norm\.bias is missing, expected \(64,\)"),
        ({"without": ["blk.1.attn_v.weight"]}, r"tensor blk\.1\.attn_v\.weight is missing, expected \(64, 64\)"),
        ({"without": ["blk.0.attn_output.bias"]}, r"tensor blk\.0\.attn_output\.bias is missing, expected \(64,\)"),
        ({"without": ["blk.0.ffn_down.bias"]}, r"tensor blk\.0\.ffn_down\.bias is missing, expected \(64,\)"),
        ({"tensors": {"blk.0.ffn_up.bias": np.zeros(95)}}, r"blk\.0\.ffn_up\.bias has shape \(95,\), expected \(96,\)"),
        ({"tensors": {"blk.0.ffn_norm.weight": np.ones(64)}}, r"blk\.0\.ffn_norm\.weight \(64,\) is not one that"),
    ],
)
def test_mismatches_are_named(options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(**options)
