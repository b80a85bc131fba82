"""Hyperparameters and invalid files of OLMo.

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
from llamacli_olmo import Olmo2, Olmoe
from tiny_olmo import VARIANTS, write_olmo

NAMES = ("olmo2", "olmoe")


@pytest.fixture
def load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    plugins = Plugins([EntryPoint(name, "llamacli_olmo", ARCHITECTURES) for name in NAMES])

    def write_and_load(architecture: str, **options: Any) -> Model:
        path = write_olmo(tmp_path / "model.gguf", architecture=architecture, **options)
        model = load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())
        assert not caplog.records, "keys of the file are not read"
        return model

    return write_and_load


@parametrize_with_checks([Olmo2(), Olmoe()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
def test_metadata_selects_the_architecture(name: str, load: Any) -> None:
    assert load(name).arch == name


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, (8, 8, 8, None, 8)),
        (2, (8, None, 8, None, 8)),
        (0, (8, 8, 8, 8, 8)),
        ([True, False, False, False, True], (8, None, None, None, 8)),
    ],
)
def test_sliding_layers(pattern: Any, windows: tuple[int | None, ...], load: Any) -> None:
    keys = {"sliding_window": 8, "sliding_window_pattern": pattern}
    model = load("olmo2", n_layer=5, metadata={f"olmo2.attention.{key}": value for key, value in keys.items()})
    assert model.config.windows == windows


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        *((name, "attention.layer_norm_rms_epsilon", None, "'{key}' is missing") for name in NAMES),
        *(
            (name, "attention.head_count_kv", 2, "blk.0.attn_k.weight has shape (64, 64), expected (32,")
            for name in NAMES
        ),
        *((name, "rope.dimension_count", 8, "'{key}' is 8; at least 16 is needed") for name in NAMES),
        ("olmo2", "attention.sliding_window", "x", "'{key}'"),
        ("olmo2", "rope.freq_base_swa", 100.0, "{key} differs from olmo2.rope.freq_base"),
        ("olmoe", "expert_count", None, "'{key}' is missing"),
        ("olmoe", "expert_count", 4, "expected by olmoe.attention"),
        ("olmoe", "expert_used_count", 0, "'{key}' is 0; at least 1 is needed"),
        ("olmoe", "expert_used_count", 9, "{key} = 9 does not fit olmoe.expert_count = 8"),
        ("olmoe", "expert_group_count", 2, "'{key}' is 2; at most 1 is supported"),
    ],
)
def test_invalid_keys_are_named(name: str, key: str, value: Any, problem: str, load: Any) -> None:
    key = f"{name}.{key}"
    window = {"olmo2.attention.sliding_window": 8} if name == "olmo2" else {}
    with pytest.raises(ModelFormatError, match=re.escape(problem.format(key=key))):
        load(name, metadata=window | {key: value})


@pytest.mark.parametrize(
    ("name", "tensor"), [("olmo2", "blk.0.attn_norm.weight"), ("olmoe", "blk.0.post_ffw_norm.weight")]
)
def test_unknown_tensors_are_named(name: str, tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {re.escape(tensor)} \(64,\) is not one"):
        load(name, tensors={tensor: np.zeros(64)})
