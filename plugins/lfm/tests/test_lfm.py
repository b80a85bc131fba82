"""Hyperparameters and invalid files of the LFM2 family.

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
from llamacli.testing.vocabularies import vocabulary_size
from llamacli_lfm.decoder import Lfm2, Lfm2Moe
from tiny_lfm import ENCODERS, INERT, SIZES_1_2B, VARIANTS, write_lfm

TOKENS = list(range(3, 43))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(**options: Any) -> Model:
        path = write_lfm(tmp_path / "model.gguf", **options)
        names = ("lfm2", "lfm2moe")
        plugins = Plugins([EntryPoint(name, "llamacli_lfm", ARCHITECTURES) for name in names])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([Lfm2(), Lfm2Moe()], VARIANTS | ENCODERS, inert=INERT, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_layers(load: Any) -> None:
    config = load().config
    assert (config.heads_kv, config.n_head_kv, config.n_taps, config.n_dense) == ((0, 2, 0, 4), 4, 3, 4)


def test_one_number_of_heads_means_attention_everywhere(load: Any) -> None:
    model = load(heads_kv=(2, 2), metadata={"lfm2.attention.head_count_kv": 2})
    assert model.config.heads_kv == (2, 2)


def test_sliding_window(load: Any) -> None:
    def logits(window: int) -> np.ndarray:
        model = load(metadata={"lfm2.attention.sliding_window": window})
        return np.asarray(model.create_session().eval(TOKENS, all_logits=True))

    whole, short = logits(0), logits(12)
    np.testing.assert_array_equal(whole[:12], short[:12])
    assert np.abs(whole[12:] - short[12:]).max() > 1e-4


def test_sizes_of_the_benchmark() -> None:
    assert vocabulary_size(SIZES_1_2B["tokenizer"]) == 65536
    assert (len(SIZES_1_2B["heads_kv"]), set(SIZES_1_2B["heads_kv"])) == (16, {0, 8})


def check_key(load: Any, architecture: str, key: str, value: object) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"{architecture}.{key}")):
        load(architecture=architecture, metadata={f"{architecture}.{key}": value})


@pytest.mark.parametrize("architecture", ["lfm2", "lfm2moe"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("embedding_length", None),
        ("attention.head_count", None),
        ("attention.head_count_kv", None),
        ("attention.head_count_kv", [0, 2, 0]),
        ("attention.head_count_kv", [0, 3, 0, 4]),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.causal", 1),
        ("shortconv.l_cache", None),
        ("shortconv.l_cache", 1),
        ("shortconv.l_cache", 3.0),
        ("rope.dimension_count", 18),
    ],
)
def test_keys_are_named(architecture: str, key: str, value: object, load: Any) -> None:
    check_key(load, architecture, key, value)


def test_an_even_number_of_taps_around_a_token_is_named(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"lfm2\.shortconv\.l_cache = 4, expected an odd number"):
        load(n_taps=4, metadata={"lfm2.attention.causal": False})


def test_window_is_named(load: Any) -> None:
    check_key(load, "lfm2", "attention.sliding_window", "x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", None),
        ("expert_used_count", 9),
        ("expert_feed_forward_length", None),
        ("expert_gating_func", None),
        ("expert_gating_func", 5),
        ("leading_dense_block_count", 5),
    ],
)
def test_keys_of_experts_are_named(key: str, value: object, load: Any) -> None:
    check_key(load, "lfm2moe", key, value)


@pytest.mark.parametrize("tensor", ["output_norm.weight", "blk.0.attn_q.weight", "blk.1.shortconv.conv.weight"])
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {tensor} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})
