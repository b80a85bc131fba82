"""Hyperparameters and invalid files of RWKV-7, and its dot product.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import logging
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
from llamacli.testing.conformance import check_op
from llamacli.testing.parametrize import Check
from llamacli_rwkv import Rwkv7
from llamacli_rwkv.dot import Dot
from tiny_rwkv import VARIANTS, write_rwkv

TOKENS = list(range(3, 20))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(**options: Any) -> Model:
        path = write_rwkv(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("rwkv7", "llamacli_rwkv", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


def logits(model: Model) -> np.ndarray:
    return np.asarray(model.create_session().eval(TOKENS, all_logits=True))


@parametrize_with_checks([Rwkv7()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_dot() -> None:
    check_op(Dot)


def test_every_key_is_read(load: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load().config
    assert (config.n_head, config.head_dim, config.n_ff) == (2, 64, 96)
    assert (config.ranks.decay, config.ranks.rate, config.ranks.value, config.ranks.gate) == (8, 12, 4, 16)
    assert caplog.messages == []


def test_mix_of_the_first_layer_is_not_used(load: Any) -> None:
    np.testing.assert_array_equal(logits(load()), logits(load(first_mix=False)))


def test_shapes_without_leading_ones(load: Any) -> None:
    """Files that llama.cpp has quantized have them so."""
    name, mix = "blk.0.channel_mix_lerp_k.weight", np.linspace(0, 1, 128)
    short, whole = (logits(load(tensors={name: array})) for array in (mix, mix[None, None]))
    np.testing.assert_array_equal(short, whole)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("embedding_length", None),
        ("feed_forward_length", None),
        ("attention.layer_norm_epsilon", None),
        ("attention.layer_norm_epsilon", -1.0),
        ("attention.decay_lora_rank", None),
        ("attention.iclr_lora_rank", 0),
        ("attention.value_residual_mix_lora_rank", None),
        ("wkv.head_size", None),
        ("wkv.head_size", 48),
        ("wkv.head_size", 8),
        ("token_shift_count", 1),
    ],
)
def test_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"rwkv7.{key}")):
        load(metadata={f"rwkv7.{key}": value})


@pytest.mark.parametrize("tensor", ["blk.0.attn_q.weight", "blk.1.time_mix_first.weight"])
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {re.escape(tensor)} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})
