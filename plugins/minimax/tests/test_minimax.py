"""Hyperparameters and invalid files of MiniMax-M2.

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
from llamacli_minimax import MiniMaxM2
from tiny_minimax import VARIANTS, write_minimax


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_minimax(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("minimax-m2", "llamacli_minimax", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([MiniMaxM2()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize(("n_rot", "n_dims"), [(None, 16), (8, 8)])
def test_rope_may_rotate_a_part_of_each_head(n_rot: int | None, n_dims: int, load: Any) -> None:
    assert load(n_rot=n_rot).config.rope.n_dims == n_dims


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("rope.dimension_count", 17),
        ("expert_count", None),
        ("expert_used_count", 9),
        ("expert_feed_forward_length", None),
        ("expert_gating_func", None),
        ("expert_gating_func", "sigmoid"),
        ("expert_gating_func", 0),
        ("expert_gating_func", 5),
        ("expert_group_count", 2),
        ("nextn_predict_layers", 1),
    ],
)
def test_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"minimax-m2\.{key}"):
        load(metadata={f"minimax-m2.{key}": value})


def test_norms_of_queries_and_keys_have_the_whole_width(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_q_norm\.weight has shape \(16,\), expected \(64,\)"):
        load(tensors={"blk.0.attn_q_norm.weight": np.ones(16)})


@pytest.mark.parametrize("tensor", ["blk.0.attn_output.bias", "blk.0.ffn_gate_shexp.weight", "rope_freqs.weight"])
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {tensor} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})
