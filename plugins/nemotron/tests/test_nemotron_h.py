"""Hyperparameters and invalid files of Nemotron-H.

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
from llamacli_nemotron.hybrid import NemotronH, NemotronHMoe
from tiny_nemotron_h import INERT, VARIANTS, write_nemotron_h

NAMES = ("nemotron_h", "nemotron_h_moe")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(architecture: str = "nemotron_h", **options: Any) -> Model:
        path = write_nemotron_h(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_nemotron", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([NemotronH(), NemotronHMoe()], VARIANTS, inert=INERT, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_kinds_of_layers(load: Any) -> None:
    layers = load().config.layers
    assert [(layer.n_head_kv, layer.n_ff) for layer in layers] == [(0, 0), (0, 96), (2, 0), (0, 96), (0, 0)]


def test_sizes_of_experts(load: Any) -> None:
    experts = load("nemotron_h_moe", n_latent=32).config.experts
    assert (experts.widths, experts.n_ff_shared, experts.n_latent, experts.scale) == ((96,) * 5, 96, 32, 2.5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("nextn_predict_layers", 1),
        ("feed_forward_length", None),
        ("feed_forward_length", [0, 96]),
        ("attention.head_count", None),
        ("attention.head_count_kv", None),
        ("attention.head_count_kv", [0, 1, 2, 0, 0]),
        ("attention.head_count_kv", [0, 2, 2, 0, 0]),
        ("attention.layer_norm_rms_epsilon", None),
        ("ssm.conv_kernel", None),
        ("ssm.inner_size", None),
        ("ssm.inner_size", 120),
        ("ssm.state_size", None),
        ("ssm.state_size", 16.0),
        ("ssm.time_step_rank", None),
        ("ssm.group_count", None),
    ],
)
def test_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"{name}.{key}")):
        load(name, metadata={f"{name}.{key}": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", None),
        ("expert_used_count", 9),
        ("expert_used_count", [0, 2, 0, 0, 0]),
        ("expert_feed_forward_length", None),
        ("expert_feed_forward_length", [0, 96, 0, 0, 0]),
        ("expert_shared_feed_forward_length", None),
        ("expert_weights_norm", 1),
    ],
)
def test_keys_of_experts_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"nemotron_h_moe.{key}")):
        load("nemotron_h_moe", metadata={f"nemotron_h_moe.{key}": value})


@pytest.mark.parametrize("tensor", ["blk.0.attn_q.weight", "blk.1.ffn_gate.weight", "blk.2.ssm_a"])
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {re.escape(tensor)} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})
