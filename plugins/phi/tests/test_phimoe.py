"""Keys, tensors and invalid files of Phi-3.5-MoE.

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
from llamacli_phi.phimoe import PhiMoE
from tiny_phimoe import VARIANTS, write_phimoe


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(**options: Any) -> Model:
        path = write_phimoe(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("phimoe", "llamacli_phi", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([PhiMoE()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.head_count_kv", 3),
        ("rope.scaling.type", "other"),
        ("expert_count", None),
        ("expert_used_count", 9),
    ],
)
def test_invalid_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"phimoe.{key}"):
        load(metadata={f"phimoe.{key}": value})


def test_a_file_without_experts_is_refused(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"phimoe\.expert_count is missing or 0"):
        load(metadata={"phimoe.expert_count": 0, "phimoe.expert_used_count": 0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": {"blk.0.ffn_up.weight": np.ones((64, 64))}}, r"ffn_up\.weight \(64, 64\) is not one that"),
    ],
)
def test_invalid_tensors_are_named(options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(**options)
