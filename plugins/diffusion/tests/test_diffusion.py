"""Hyperparameters and invalid files of diffusion models.

`tests/tools/test_diffusion.py` of the core compares logits and filled masks with llama.cpp's.
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
from llamacli_diffusion import Dream, Llada, LladaMoe, Rnd1
from tiny_diffusion import ENCODERS, write_diffusion

NAMES = ("llada", "llada-moe", "dream", "rnd1")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_diffusion(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint(name, "llamacli_diffusion", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Llada(), LladaMoe(), Dream(), Rnd1()], ENCODERS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llada", "attention.causal", True),
        ("llada", "attention.layer_norm_rms_epsilon", None),
        ("llada", "expert_count", 8),
        ("llada-moe", "expert_count", None),
        ("llada-moe", "expert_used_count", 9),
        ("rnd1", "expert_feed_forward_length", 0),
        ("dream", "rope.dimension_count", 17),
    ],
)
def test_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    used = {f"{name}.expert_used_count": 3} if value == 8 else {}
    with pytest.raises(ModelFormatError, match=rf"{name}\.{key}"):
        load(architecture=name, metadata=used | {f"{name}.{key}": value})


def test_width_of_experts_by_default(load: Any) -> None:
    model = load(architecture="rnd1", metadata={"rnd1.expert_feed_forward_length": None})
    assert model.config.n_ff == 96 // 3


@pytest.mark.parametrize("name", NAMES)
def test_unknown_tensors_are_named(name: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tensor blk\.0\.attn_output\.bias \(8,\) is not one that"):
        load(architecture=name, tensors={"blk.0.attn_output.bias": np.ones(8)})
