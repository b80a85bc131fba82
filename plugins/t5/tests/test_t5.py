"""Hyperparameters and invalid files of T5, and its contexts.

`tests/test_goldens.py` and `tests/tools/test_embedding.py` of the core compare results with llama.cpp's.
"""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from llamacli import Model, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_t5 import T5, T5Encoder
from tiny_t5 import ENCODERS, VARIANTS, write_t5


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_t5(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint(name, "llamacli_t5", ARCHITECTURES) for name in ("t5", "t5encoder")])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([T5(), T5Encoder()], VARIANTS | ENCODERS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()
