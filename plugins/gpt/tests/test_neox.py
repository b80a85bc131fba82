"""Hyperparameters and invalid files of GPT-NeoX and StableLM.

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
from llamacli_gpt.gptneox import GptNeoX
from llamacli_gpt.stablelm import StableLm
from tiny_neox import UNREAD, VARIANTS, write_neox

NAMES = ("gptneox", "stablelm")
TOKENS = list(range(3, 23))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(architecture: str, **options: Any) -> Model:
        path = write_neox(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_gpt", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


def logits(model: Model) -> np.ndarray:
    return model.create_session().eval(TOKENS, all_logits=True)


@parametrize_with_checks([GptNeoX(), StableLm()], VARIANTS, unread=UNREAD, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["x", 9, 18])
def test_rotated_dimensions(name: str, value: object, load: Any) -> None:
    key = f"{name}.rope.dimension_count"
    assert load(name).config.rope.n_dims == 8
    with pytest.raises(ModelFormatError, match=key):
        load(name, metadata={key: value})


@pytest.mark.parametrize("value", [None, "x", 1])
def test_gptneox_needs_its_kind_of_residual(value: object, load: Any) -> None:
    key = "gptneox.use_parallel_residual"
    with pytest.raises(ModelFormatError, match=key):
        load("gptneox", metadata={key: value})


def test_parallel_residual_of_gptneox_changes_the_logits(load: Any) -> None:
    together, in_turn = (logits(load("gptneox", parallel=parallel)) for parallel in (True, False))
    assert np.abs(together - in_turn).max() > 0.01


def test_blocks_of_stablelm_are_parallel_where_the_norm_is_missing(load: Any) -> None:
    expected = logits(load("stablelm", parallel=True))
    np.testing.assert_array_equal(
        logits(load("stablelm", parallel=True, metadata={"stablelm.use_parallel_residual": False})), expected
    )
    assert np.abs(logits(load("stablelm", parallel=False)) - expected).max() > 0.01


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gptneox", {"without": ["blk.1.ffn_norm.weight"]}, r"blk\.1\.ffn_norm\.weight is missing"),
        ("gptneox", {"without": ["blk.1.attn_qkv.bias"]}, r"blk\.1\.attn_qkv\.bias is missing, expected \(192,\)"),
        ("gptneox", {"query_key_norm": True}, r"blk\.0\.attn_q_norm\.weight \(4, 16\) is not one that"),
        ("stablelm", {"without": ["blk.1.attn_k.weight"]}, r"blk\.1\.attn_k\.weight is missing, expected \(64, 64\)"),
        ("stablelm", {"tensors": {"blk.0.attn_q_norm.weight": np.ones(16)}}, r"has shape \(16,\), expected \(4, 16\)"),
        ("stablelm", {"tensors": {"blk.0.ffn_up.bias": np.ones(96)}}, r"blk\.0\.ffn_up\.bias \(96,\) is not one that"),
    ],
)
def test_tensors_of_one_architecture(name: str, options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(name, **options)
