"""Hyperparameters and invalid files of Granite 4 with state spaces.

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
from llamacli_granite import GraniteHybrid
from tiny_granite import HYBRID, VARIANTS, write_granite


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(**options: Any) -> Model:
        path = write_granite(tmp_path / "model.gguf", **HYBRID | options)
        plugins = Plugins([EntryPoint("granitehybrid", "llamacli_granite", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([GraniteHybrid()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_layers(load: Any) -> None:
    config = load().config
    assert (config.recurrent, config.n_head_kv) == ((True, True, False, True), 2)
    assert (config.space.n_head, config.space.n_group, config.space.d_state) == (4, 2, 16)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("attention.head_count_kv", None),
        ("attention.head_count_kv", [0, 0, 2]),
        ("attention.head_count_kv", [0, 1, 2, 0]),
        ("attention.layer_norm_rms_epsilon", None),
        ("ssm.conv_kernel", None),
        ("ssm.conv_kernel", 1),
        ("ssm.inner_size", None),
        ("ssm.inner_size", 120),
        ("ssm.state_size", None),
        ("ssm.time_step_rank", None),
        ("ssm.time_step_rank", 4.0),
        ("ssm.group_count", None),
    ],
)
def test_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"granitehybrid.{key}")):
        load(metadata={f"granitehybrid.{key}": value})


@pytest.mark.parametrize("tensor", ["blk.0.attn_q.weight", "blk.2.ssm_a", "blk.0.ffn_gate_exps.weight"])
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {re.escape(tensor)} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})
