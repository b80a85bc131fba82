"""Hyperparameters and invalid files of the Qwen hybrids.

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
from llamacli_qwen.hybrid import Qwen3Next, Qwen35, Qwen35Moe
from tiny_qwen_hybrid import VARIANTS, write_qwen_hybrid

NAMES = ("qwen35", "qwen35moe", "qwen3next")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(architecture: str = "qwen35", **options: Any) -> Model:
        path = write_qwen_hybrid(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_qwen", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Qwen35(), Qwen35Moe(), Qwen3Next()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
def test_every_other_layer_is_recurrent(name: str, load: Any) -> None:
    config = load(name).config
    assert (config.recurrent, config.delta.n_k, config.delta.n_v) == ((True, False, True, False), 32, 64)


def test_list_of_recurrent_layers(load: Any) -> None:
    model = load(interval=2, metadata={"qwen35.attention.recurrent_layers": [True, False, True, False]})
    assert model.config.recurrent == (True, False, True, False)


def test_blocks_of_multi_token_prediction_are_not_layers(load: Any) -> None:
    config = load(n_layer=5, n_nextn=1).config
    assert (config.n_layer, config.n_nextn) == (4, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.value_length", 16),
        ("attention.recurrent_layers", [True]),
        ("full_attention_interval", 0),
        ("nextn_predict_layers", 4),
        ("rope.dimension_count", 17),
        ("ssm.conv_kernel", None),
        ("ssm.conv_kernel", 1),
        ("ssm.group_count", None),
        ("ssm.inner_size", None),
        ("ssm.inner_size", 65),
        ("ssm.state_size", None),
        ("ssm.state_size", 0),
        ("ssm.time_step_rank", None),
        ("ssm.time_step_rank", 4.0),
    ],
)
def test_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"{name}.{key}")):
        load(name, metadata={f"{name}.{key}": value})


@pytest.mark.parametrize("groups", [3, 5])
def test_heads_of_values_are_a_multiple_of_those_of_keys(groups: int, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"group_count = {groups}"):
        load(metadata={"qwen35.ssm.group_count": groups})


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", None),
        ("expert_used_count", None),
        ("expert_used_count", 7),
    ],
)
def test_keys_of_experts_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"{name}.{key}")):
        load(name, metadata={f"{name}.{key}": value})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("qwen35", "blk.0.ssm_ba.weight"), ("qwen3next", "blk.0.ssm_beta.weight"), ("qwen35", "blk.1.ssm_a")],
)
def test_unknown_tensors_are_named(name: str, tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {re.escape(tensor)} \(8,\) is not one that"):
        load(name, tensors={tensor: np.ones(8)})
