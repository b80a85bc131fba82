"""Hyperparameters and invalid files of ERNIE 4.5.

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
from llamacli_ernie import Ernie, ErnieMoe
from tiny_ernie import VARIANTS, write_ernie

NAMES = ("ernie4_5", "ernie4_5-moe")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(architecture: str, **options: Any) -> Model:
        path = write_ernie(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_ernie", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Ernie(), ErnieMoe()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_widths_of_experts(load: Any) -> None:
    config = load("ernie4_5-moe").config
    assert (config.n_dense, config.n_ff, config.n_ff_expert, config.n_ff_shared) == (1, 96, 64, 128)
    assert load("ernie4_5-moe", n_ff_shared=None).config.n_ff_shared == 0
    assert load("ernie4_5").config.n_dense == 2


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *((name, "attention.layer_norm_rms_epsilon", value) for name in NAMES for value in (None, "x", -1.0)),
        *((name, "nextn_predict_layers", 1) for name in NAMES),
        ("ernie4_5-moe", "expert_count", None),
        ("ernie4_5-moe", "expert_used_count", 0),
        ("ernie4_5-moe", "expert_used_count", 9),
        ("ernie4_5-moe", "expert_group_count", 2),
        ("ernie4_5-moe", "interleave_moe_layer_step", None),
        ("ernie4_5-moe", "interleave_moe_layer_step", 2),
        ("ernie4_5-moe", "leading_dense_block_count", None),
        ("ernie4_5-moe", "leading_dense_block_count", 3),
        ("ernie4_5-moe", "expert_feed_forward_length", None),
        ("ernie4_5-moe", "expert_shared_feed_forward_length", "x"),
        ("ernie4_5-moe", "expert_shared_count", -1.0),
    ],
)
def test_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"{name}.{key}")):
        load(name, metadata={f"{name}.{key}": value})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ernie4_5", "blk.0.attn_output_norm.weight"),
        ("ernie4_5", "blk.0.exp_probs_b.bias"),
        ("ernie4_5-moe", "blk.0.exp_probs_b.bias"),
        ("ernie4_5-moe", "blk.1.ffn_gate.weight"),
    ],
)
def test_unknown_tensors_are_named(name: str, tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {tensor} \(8,\) is not one that"):
        load(name, tensors={tensor: np.ones(8)})


def test_shape_of_the_selection_bias(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tensor blk\.1\.exp_probs_b\.bias has shape \(7,\), expected \(8,\)"):
        load("ernie4_5-moe", tensors={"blk.1.exp_probs_b.bias": np.ones(7)})
