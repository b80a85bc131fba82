"""Hyperparameters, invalid files and key shifts of Hunyuan.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Model, ModelFormatError, load_model
from llamacli.engine import ReferenceEngine, default_engine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import formulas, parametrize_with_checks
from llamacli.testing.parametrize import Check
from llamacli_hunyuan import HunyuanDense, HunyuanMoe
from tiny_hunyuan import VARIANTS, write_hunyuan

NAMES = ("hunyuan-dense", "hunyuan-moe")
TOKENS = list(range(3, 43))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(architecture: str, engine: Any = ReferenceEngine, **options: Any) -> Model:
        path = write_hunyuan(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_hunyuan", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=engine())

    return write_and_load


@parametrize_with_checks([HunyuanDense(), HunyuanMoe()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("engine", [ReferenceEngine, default_engine])
@pytest.mark.parametrize("name", NAMES)
def test_keys_normed_after_rope_can_be_moved(name: str, engine: Any, load: Any) -> None:
    """Compare with a new session, in a model of one layer."""
    model, rest = load(name, engine, n_layer=1), TOKENS[:5] + TOKENS[17:]
    with model.create_session(kv_type="f32") as session, model.create_session(kv_type="f32", reuse=False) as fresh:
        session.eval(TOKENS)
        session.remove_range(5, 17)
        assert session.tokens == tuple(rest)
        fresh.eval(rest)
        for moved, expected in zip(session.cache.read(0, len(rest)), fresh.cache.read(0, len(rest)), strict=True):
            assert formulas.nmse(moved, expected) < 1e-9
        session.eval([1, 2])
        fresh.eval([1, 2])
        np.testing.assert_allclose(session.logits, fresh.logits, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_deeper_layers_can_be_moved(name: str, load: Any) -> None:
    with load(name).create_session() as session:
        session.eval(TOKENS)
        session.remove_range(5, 10)
        assert session.tokens == tuple(TOKENS[:5] + TOKENS[10:])


def test_alpha_raises_the_base_of_rope(load: Any) -> None:
    keys = {"hunyuan-dense.rope.freq_base": 10000.0, "hunyuan-dense.rope.scaling.alpha": 1000.0}
    rope = load("hunyuan-dense", head_dim=128, n_head=1, n_head_kv=1, metadata=keys).config.rope
    assert rope.base == pytest.approx(10000 * 1000 ** (128 / 126), rel=1e-6)


def test_dense_files_may_count_one_expert(load: Any) -> None:
    config = load("hunyuan-dense", metadata={"hunyuan-dense.expert_count": 1}).config
    assert (config.n_expert, config.n_expert_used) == (0, 0)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *((name, "attention.layer_norm_rms_epsilon", value) for name in NAMES for value in (None, "x", -1.0)),
        *((name, "feed_forward_length", None) for name in NAMES),
        *((name, "nextn_predict_layers", 1) for name in NAMES),
        ("hunyuan-dense", "rope.scaling.alpha", "x"),
        ("hunyuan-dense", "rope.scaling.alpha", -1.0),
        ("hunyuan-moe", "expert_count", None),
        ("hunyuan-moe", "expert_used_count", 0),
        ("hunyuan-moe", "expert_used_count", 9),
        ("hunyuan-moe", "expert_group_count", 2),
        ("hunyuan-moe", "expert_feed_forward_length", None),
        ("hunyuan-moe", "expert_shared_feed_forward_length", "x"),
    ],
)
def test_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=re.escape(f"{name}.{key}")):
        load(name, metadata={f"{name}.{key}": value})


def test_alpha_needs_heads_wider_than_two(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"hunyuan-dense\.rope\.scaling\.alpha"):
        load("hunyuan-dense", head_dim=2, metadata={"hunyuan-dense.rope.scaling.alpha": 1000.0})


@pytest.mark.parametrize("name", NAMES)
def test_unknown_tensors_are_named(name: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"tensor blk\.0\.attn_output\.bias \(64,\) is not one that"):
        load(name, tensors={"blk.0.attn_output.bias": np.ones(64)})
