"""Hyperparameters and invalid files of DeepSeek-V2 and V3.

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
from llamacli_deepseek.deepseek2 import DeepSeek2
from tiny_deepseek2 import INERT, VARIANTS, write_deepseek2


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(**options: Any) -> Model:
        path = write_deepseek2(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("deepseek2", "llamacli_deepseek.deepseek2", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([DeepSeek2()], VARIANTS, inert=INERT, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("expert_count", None),
        ("expert_used_count", 9),
        ("expert_feed_forward_length", 0),
        ("rope.dimension_count", None),
        ("attention.kv_lora_rank", None),
        ("attention.head_count_kv", 4),
        ("attention.key_length", 41),
        ("attention.value_length", None),
        ("expert_shared_count", 0),
        ("expert_gating_func", 5),
        ("expert_weights_norm", 1),
        ("expert_weights_scale", -1.0),
        ("expert_group_count", 3),
        ("expert_group_used_count", 2),
        ("leading_dense_block_count", 3),
        ("nextn_predict_layers", 2),
        ("rope.scaling.yarn_log_multiplier", -0.1),
        ("attention.temperature_scale", -0.1),
    ],
)
def test_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"deepseek2\.{key}"):
        load(metadata={f"deepseek2.{key}": value})


@pytest.mark.parametrize(
    "tensor", ["blk.0.exp_probs_b.bias", "blk.0.attn_kv_b.weight", "blk.0.attn_q.weight", "rope_freqs.weight"]
)
def test_unknown_tensors_are_named(tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {tensor} \(8,\) is not one that"):
        load(tensors={tensor: np.ones(8)})


def test_temperature_needs_its_length(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"deepseek2\.attention\.temperature_length"):
        load(metadata={"deepseek2.attention.temperature_scale": 0.1})


def test_latent_attention_caches_one_head_of_keys(load: Any) -> None:
    absorbed, legacy = load(), load(absorbed=False)
    state = absorbed.program.states[0]
    assert (state.n_head_kv, state.head_dim, state.value_dim, state.values_in_keys) == (1, 40, 32, True)
    sizes = [model.kv_pool("f32").layout.n_bytes(16) for model in (absorbed, legacy)]
    assert sizes == [2 * 16 * 4 * 40, 2 * 16 * 4 * 4 * (24 + 12)]


def test_keys_are_longer_than_their_rotated_part(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"keys of 8 numbers .* deepseek2\.rope\.dimension_count = 8"):
        load(metadata={"deepseek2.attention.key_length_mla": 8})


def test_older_files_need_all_heads_of_keys(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"deepseek2\.attention\.head_count_kv"):
        load(absorbed=False, metadata={"deepseek2.attention.head_count_kv": 1})


@pytest.mark.parametrize("absorbed", [True, False])
def test_cached_keys_can_be_shifted(absorbed: bool, load: Any) -> None:
    model = load(absorbed=absorbed, n_layer=1)
    with model.create_session(reuse=False) as session, model.create_session(reuse=False) as other:
        session.eval([5, 9, 1, 7, 3, 2])
        session.remove_range(0, 2)
        other.eval([1, 7, 3, 2])
        for mine, theirs in zip(session.cache.read(0, 4), other.cache.read(0, 4), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_vocabulary_of_files_without_a_gating_function(load: Any) -> None:
    assert load(scoring=None).config.routing["scoring"] == 1
