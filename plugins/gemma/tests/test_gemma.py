"""Hyperparameters and invalid files of Gemma.

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
from llamacli_gemma.gemma1 import Gemma1
from llamacli_gemma.gemma2 import Gemma2
from llamacli_gemma.gemma3 import Gemma3
from llamacli_gemma.gemma4 import Gemma4
from tiny_gemma import E_SERIES, EXPERTS, INERT, VARIANTS, write_gemma, write_gemma4

NAMES = {1: "gemma", 2: "gemma2", 3: "gemma3", 4: "gemma4"}
PLUGINS = Plugins([EntryPoint(name, "llamacli_gemma", ARCHITECTURES) for name in NAMES.values()])


def load(folder: Path, generation: int, **options: Any) -> Model:
    path = folder / "m.gguf"
    if generation == 4:
        write_gemma4(path, **options)
    else:
        write_gemma(path, generation=generation, **options)
    return load_model(path, "fp32", plugins=PLUGINS, engine=ReferenceEngine())


WHOLE = [(1, {}), (2, {"window": 8}), (3, {"window": 8}), (4, {**E_SERIES, **EXPERTS})]


@parametrize_with_checks(
    [Gemma1(), Gemma2(), Gemma3(), Gemma4()],
    VARIANTS,
    inert=INERT,
    slow=pytest.mark.slow,
)
def test_architecture(check: Check) -> None:
    check()


def test_gemma_2_alternates_sliding_and_global_layers(tmp_path: Path) -> None:
    config = load(tmp_path, 2, n_layer=4, metadata={"gemma2.rope.freq_base": 5e4}).config
    assert [layer.window for layer in config.layers] == [4096, None, 4096, None]
    assert {layer.rope.base for layer in config.layers} == {5e4}
    assert (config.attention_softcap, config.final_softcap) == (2.0, 3.0)


def test_gemma_2_default_softcaps(tmp_path: Path) -> None:
    keys = {"gemma2.attn_logit_softcapping": None, "gemma2.final_logit_softcapping": None}
    config = load(tmp_path, 2, metadata=keys).config
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)


def test_layers_of_gemma_3(tmp_path: Path) -> None:
    scaled = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = load(tmp_path, 3, n_layer=7, window=9, metadata=scaled).config
    assert [layer.window for layer in config.layers] == [9] * 5 + [None, 9]
    ropes = [(layer.rope.base, layer.rope.freq_scale) for layer in config.layers]
    assert ropes == [(1e4, 1)] * 5 + [(1e6, 0.125), (1e4, 1)]
    assert config.final_softcap is None


@pytest.mark.parametrize(("generation", "n_layer"), [(2, 46), (3, 62)])
def test_the_27b_models_scale_scores_by_each_heads_share(generation: int, n_layer: int, tmp_path: Path) -> None:
    for n, width in ((n_layer, 40 // 4), (n_layer - 1, 16)):
        config = load(tmp_path, generation, n_layer=n, n_embd=40, head_dim=16, n_ff=32).config
        assert config.attention_scale == width**-0.5


def test_layers_of_gemma_4(tmp_path: Path) -> None:
    config = load(tmp_path, 4, **E_SERIES, n_ff=[32, 32, 32, 64, 64, 64]).config
    assert [layer.kv_layer for layer in config.layers] == [0, 1, 2, 1, 1, 2]
    assert [layer.window for layer in config.layers] == [12, 12, None, 12, 12, None]
    assert [(layer.head_dim, layer.n_head_kv) for layer in config.layers] == [(16, 2), (16, 2), (32, 1)] * 2
    assert [layer.n_ff for layer in config.layers] == [32] * 3 + [64] * 3
    assert [(layer.rope.base, layer.rope.n_dims) for layer in config.layers] == [(1e4, 16), (1e4, 16), (1e6, 32)] * 2


KEYS = {
    2: {
        "attention.sliding_window": [0, 0.5],
        "attention.sliding_window_pattern": [[True], 1.5, "2"],
        "attn_logit_softcapping": [-1.0, "x"],
        "attention.head_count_kv": [3],
        "rope.freq_base_swa": [0.0],
    },
    3: {
        "attention.sliding_window": [0.5, "x"],
        "attention.sliding_window_pattern": [[True, False, True], [1.0, 2.0]],
        "final_logit_softcapping": [-1.0],
        "attention.value_length": [16],
        "rope.dimension_count": [31, 64],
    },
    4: {
        "attention.sliding_window": [None, 0],
        "attention.sliding_window_pattern": [None, [True, True], [1, 2, 0], 3],
        "attention.head_count_kv": [[2, 2], [2, 3, 1], [2, 0, 1], 3],
        "attention.key_length_swa": [None, 0],
        "attention.value_length_swa": [32],
        "attention.shared_kv_layers": [1, 2, 3],
        "feed_forward_length": [None, [96, 96], [96, 96, 0]],
        "embedding_length_per_layer_input": [0.5, "x"],
        "rope.dimension_count_swa": [15, 18],
        "expert_used_count": [0, 9],
        "expert_feed_forward_length": [None, 0],
    },
}


@pytest.mark.parametrize(
    ("generation", "key", "value"),
    [(generation, key, value) for generation in KEYS for key, values in KEYS[generation].items() for value in values],
)
def test_wrong_key_is_named(generation: int, key: str, value: object, tmp_path: Path) -> None:
    options = EXPERTS if generation == 4 else {"window": 8}
    with pytest.raises(ModelFormatError, match=rf"{NAMES[generation]}\.{key}\b"):
        load(tmp_path, generation, **options, metadata={f"{NAMES[generation]}.{key}": value})


CONTRADICTIONS = [
    (4, "expert_count", 4, "blk.0.ffn_gate_inp.weight has shape (8, 64), expected (4, 64)"),
    (4, "expert_feed_forward_length", 64, "blk.0.ffn_gate_up_exps.weight has shape (8, 64, 64), expected (8, 128, 64)"),
    (4, "attention.head_count_kv", 2, "blk.2.attn_k.weight has shape (32, 64), expected (64, 64)"),
    (4, "attention.sliding_window_pattern", [True, False, False], "blk.1.attn_q.weight has shape (64, 64), expected"),
    (4, "attention.sliding_window_pattern", [True] * 3, "rope_freqs.weight (16,) is not one"),
    (4, "rope.dimension_count", 16, "rope_freqs.weight has shape (16,), expected (8,)"),
    (4, "embedding_length_per_layer_input", 16, "per_layer_token_embd.weight is missing, expected (128, 48)"),
    (2, "attention.head_count_kv", 1, "blk.0.attn_k.weight has shape (64, 64), expected (32, 64)"),
    (3, "block_count", 1, "blk.1.attn_q.weight (128, 64) is not one"),
]


@pytest.mark.parametrize(("generation", "key", "value", "message"), CONTRADICTIONS)
def test_key_that_contradicts_the_tensors(
    generation: int, key: str, value: object, message: str, tmp_path: Path
) -> None:
    options = EXPERTS if generation == 4 else {}
    with pytest.raises(ModelFormatError) as raised:
        load(tmp_path, generation, **options, metadata={f"{NAMES[generation]}.{key}": value})
    assert message in str(raised.value)


MISSING = ["rope_freqs.weight", "blk.0.attn_v.weight", "blk.1.ffn_gate_inp.scale", "blk.2.pre_ffw_norm_2.weight"]


def test_optional_expert_scale_and_global_v(tmp_path: Path) -> None:
    names = ["blk.0.ffn_down_exps.scale", "blk.2.attn_v.weight", "blk.1.layer_output_scale.weight"]
    load(tmp_path, 4, **EXPERTS, values=True, without=names)


@pytest.mark.parametrize(("generation", "name"), [(1, "attn_q_norm"), (2, "attn_k_norm"), (3, "attn_sinks")])
def test_unexpected_tensor(generation: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=rf"blk\.0\.{name}\.weight \(32,\) is not one"):
        load(tmp_path, generation, tensors={f"blk.0.{name}.weight": np.ones(32)})


def test_output_is_the_embedding_in_gemma_1_and_2(tmp_path: Path) -> None:
    for generation in (1, 2):
        with pytest.raises(ModelFormatError, match=r"output\.weight \(128, 64\) is not one"):
            load(tmp_path, generation, untied=True)
