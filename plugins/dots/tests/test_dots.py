"""Hyperparameters and invalid files of dots.llm1.

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
from llamacli_dots import Dots
from tiny_dots import VARIANTS, write_dots


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_dots(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("dots1", "llamacli_dots", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Dots()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_widths_of_experts(load: Any) -> None:
    config = load(n_shared=3).config
    assert (config.n_dense, config.n_ff, config.n_ff_expert, config.n_ff_shared) == (1, 96, 64, 192)


@pytest.mark.parametrize(("value", "factor"), [(None, 1.0), (0.0, 1.0), (2.5, 2.5)])
def test_factor_of_the_routed_experts(value: float | None, factor: float, load: Any) -> None:
    assert load(weight_scale=value).config.weight_scale == factor


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("expert_count", None),
        ("expert_used_count", 9),
        ("expert_shared_count", None),
        ("expert_shared_count", 0),
        ("expert_feed_forward_length", None),
        ("expert_weights_scale", "x"),
        ("expert_weights_norm", 1),
        ("expert_gating_func", None),
        ("expert_gating_func", 0),
        ("expert_gating_func", 5),
        ("expert_group_count", 2),
        ("leading_dense_block_count", None),
        ("leading_dense_block_count", 3),
        ("nextn_predict_layers", 1),
    ],
)
def test_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"dots1\.{key}"):
        load(metadata={f"dots1.{key}": value})


@pytest.mark.parametrize("tensor", ["blk.0.exp_probs_b.bias", "blk.0.attn_output.bias", "rope_freqs.weight"])
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {tensor} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})


def test_shape_of_the_selection_bias(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tensor blk\.1\.exp_probs_b\.bias has shape \(7,\), expected \(8,\)"):
        load(tensors={"blk.1.exp_probs_b.bias": np.ones(7)})
