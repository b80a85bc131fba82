"""Hyperparameters and invalid files of Bailing MoE 2.

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
from llamacli_bailing import BailingMoe2
from tiny_bailing import INERT, VARIANTS, write_bailing


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_bailing(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("bailingmoe2", "llamacli_bailing", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([BailingMoe2()], VARIANTS, inert=INERT, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("expert_count", None),
        ("expert_used_count", 9),
        ("expert_feed_forward_length", 0),
        ("expert_shared_count", None),
        ("expert_gating_func", None),
        ("expert_gating_func", 5),
        ("expert_group_count", 3),
        ("expert_group_used_count", 2),
        ("attention.key_length", 8),
        ("leading_dense_block_count", 3),
        ("nextn_predict_layers", 2),
        ("expert_weights_norm", 1),
    ],
)
def test_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"bailingmoe2\.{key}"):
        load(metadata={f"bailingmoe2.{key}": value})


@pytest.mark.parametrize(
    "tensor", ["blk.0.exp_probs_b.bias", "blk.0.attn_output.bias", "blk.0.attn_qkv.bias", "rope_freqs.weight"]
)
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {tensor} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})
