"""Hyperparameters and invalid files of Mamba, Mamba-2, Jamba and Falcon-H1.

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
from llamacli_mamba.hybrid import FalconH1, Jamba
from llamacli_mamba.pure import Mamba, Mamba2
from tiny_mamba import VARIANTS, write_mamba

NAMES = ("mamba", "mamba2", "jamba", "falcon-h1")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(architecture: str = "mamba", **options: Any) -> Model:
        path = write_mamba(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_mamba", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Mamba(), Mamba2(), Jamba(), FalconH1()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_sizes_of_the_selective_scan(load: Any) -> None:
    sizes = load(d_state=8, dt_rank=24).config.sizes
    assert (sizes.d_inner, sizes.d_state, sizes.dt_rank, sizes.n_taps, sizes.normalizes) == (128, 8, 24, 4, False)


def test_sizes_of_state_space_duality(load: Any) -> None:
    sizes = load("mamba2", n_group=2).config.sizes
    assert (sizes.n_head, sizes.head_dim, sizes.n_group, sizes.d_inner, sizes.d_conv) == (4, 32, 2, 128, 192)


def test_layers_of_jamba(load: Any) -> None:
    assert load("jamba", n_expert=4).config.heads_kv == (0, 2, 0, 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("attention.layer_norm_rms_epsilon", None),
        ("ssm.conv_kernel", None),
        ("ssm.conv_kernel", 1),
        ("ssm.inner_size", None),
        ("ssm.inner_size", 120),
        ("ssm.state_size", None),
        ("ssm.state_size", 0),
        ("ssm.time_step_rank", None),
    ],
)
def test_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"{name}.{key}")):
        load(name, metadata={f"{name}.{key}": value})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mamba", "ssm.dt_b_c_rms", 1),
        ("mamba2", "ssm.group_count", None),
        ("jamba", "attention.head_count", None),
        ("jamba", "attention.head_count_kv", None),
        ("jamba", "attention.head_count_kv", [0, 2]),
        ("jamba", "expert_used_count", 2),
        ("falcon-h1", "attention.head_count_kv", 3),
        ("falcon-h1", "feed_forward_length", None),
        ("falcon-h1", "rope.dimension_count", 18),
        ("falcon-h1", "ssm.group_count", 0),
    ],
)
def test_keys_of_one_architecture_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"{name}.{key}")):
        load(name, metadata={f"{name}.{key}": value})


def test_groups_divide_the_heads(load: Any) -> None:
    with pytest.raises(ModelFormatError, match="group_count = 3"):
        load("mamba2", metadata={"mamba2.ssm.group_count": 3})


def test_layer_without_a_network(load: Any) -> None:
    with pytest.raises(ModelFormatError, match="neither ffn_gate_inp"):
        load("jamba", n_expert=4, without=["blk.0.ffn_up.weight"])


@pytest.mark.parametrize(("name", "tensor"), [("mamba", "blk.0.ssm_norm.weight"), ("jamba", "blk.1.ssm_a")])
def test_unknown_tensors_are_named(name: str, tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {re.escape(tensor)} \(8,\) is not one that"):
        load(name, tensors={tensor: np.ones(8)})
