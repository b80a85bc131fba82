"""Hyperparameters and invalid files of gpt-oss.

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
from llamacli_gptoss import GptOss
from tiny_gptoss import PATTERN, VARIANTS, write_gptoss

PLUGINS = Plugins([EntryPoint("gpt-oss", "llamacli_gptoss", ARCHITECTURES)])


def load(tmp_path: Path, **options: Any) -> Model:
    path = write_gptoss(tmp_path / "m.gguf", **options)
    return load_model(path, "fp32", plugins=PLUGINS, engine=ReferenceEngine())


@parametrize_with_checks([GptOss()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_every_second_layer_is_global(tmp_path: Path) -> None:
    assert load(tmp_path).config.windows == (8, None, 8, None)
    assert load(tmp_path, metadata={PATTERN: [False, True, True, False]}).config.windows == (None, 8, 8, None)


KEYS = {
    "expert_count": [None, 0, 1 << 20],
    "expert_used_count": [None, 0, 9],
    "expert_feed_forward_length": [None, 0],
    "attention.sliding_window": [None, 0],
    "attention.sliding_window_pattern": [[True, False], [1.0] * 4, "2"],
    "attention.head_count_kv": [3],
    "rope.scaling.type": ["other"],
    "rope.dimension_count": [31, 64],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in KEYS.items() for value in values])
def test_wrong_key_is_named(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=rf"gpt-oss\.{key}"):
        load(tmp_path, metadata={f"gpt-oss.{key}": value})


CONTRADICTIONS = {
    "expert_count": (4, "blk.0.ffn_gate_inp.weight has shape (8, 64), expected (4, 64)"),
    "expert_feed_forward_length": (64, "blk.0.ffn_gate_exps.weight has shape (8, 96, 64), expected (8, 64, 64)"),
    "attention.head_count_kv": (4, "blk.0.attn_k.weight has shape (64, 64), expected (128, 64)"),
    "attention.head_count": (2, "blk.0.attn_sinks.weight has shape (4,), expected (2,)"),
    "block_count": (3, "blk.3.attn_q.weight (128, 64) is not one that the architecture reads"),
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_key_that_contradicts_the_tensors(key: str, tmp_path: Path) -> None:
    value, message = CONTRADICTIONS[key]
    with pytest.raises(ModelFormatError) as raised:
        load(tmp_path, metadata={f"gpt-oss.{key}": value})
    assert message in str(raised.value)


MISSING = (
    "output.weight",
    "blk.0.attn_output.bias",
    "blk.1.attn_sinks.weight",
    "blk.2.post_attention_norm.weight",
    "blk.3.ffn_gate_inp.bias",
    "blk.3.ffn_up_exps.weight",
    "blk.3.ffn_down_exps.bias",
)


@pytest.mark.parametrize("name", ["attn_q_norm", "ffn_norm", "ffn_gate"])
def test_unexpected_tensor(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=rf"blk\.0\.{name}\.weight \(32,\) is not one"):
        load(tmp_path, tensors={f"blk.0.{name}.weight": np.ones(32)})
