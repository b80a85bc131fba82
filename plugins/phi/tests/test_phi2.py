"""Hyperparameters and invalid files of Phi-2.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from llamacli import Model, ModelFormatError, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_phi.phi2 import Phi2
from tiny_phi2 import VARIANTS, write_phi2


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_phi2(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("phi2", "llamacli_phi", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Phi2()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_epsilon", None),
        ("attention.layer_norm_epsilon", "x"),
        ("attention.layer_norm_epsilon", -1.0),
        ("rope.dimension_count", 9),
        ("rope.dimension_count", 18),
        ("attention.head_count", 0),
    ],
)
def test_wrong_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"phi2.{key}"):
        load(metadata={f"phi2.{key}": value})
