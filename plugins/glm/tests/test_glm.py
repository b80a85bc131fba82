"""Hyperparameters and invalid files of GLM.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Graph, Model, ModelFormatError, Value, Weights, load_model
from llamacli.blocks.nextn import nextn_input, nextn_logits
from llamacli.engine import ReferenceEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import ConformanceError, parametrize_with_checks
from llamacli.testing.parametrize import Check, checks_of
from llamacli_glm.dense import ChatGlm, Glm4, GlmConfig
from llamacli_glm.mixture import Glm4Moe
from tiny_glm import VARIANTS, write_glm

NAMES = ("chatglm", "glm4", "glm4moe")


@pytest.fixture
def load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    plugins = Plugins([EntryPoint(name, "llamacli_glm", ARCHITECTURES) for name in NAMES])

    def write_and_load(architecture: str, **options: Any) -> Model:
        path = write_glm(tmp_path / "model.gguf", architecture=architecture, **options)
        model = load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())
        assert not caplog.records, "keys of the file are not read"
        return model

    return write_and_load


@parametrize_with_checks([ChatGlm(), Glm4(), Glm4Moe()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
def test_metadata_selects_the_architecture(name: str, load: Any) -> None:
    assert load(name).arch == name


@pytest.mark.parametrize("name", ["glm4", "glm4moe"])
def test_blocks_of_multi_token_prediction_change_nothing(name: str, load: Any) -> None:
    logits = []
    for n_nextn in (0, 2):
        model = load(name, n_nextn=n_nextn, biases=True)
        assert model.config.n_layer == 2
        logits.append(model.create_session().eval([1, 2, 3]))
    np.testing.assert_array_equal(*logits)


class WithoutBlock(Glm4):
    """GLM-4 whose head leaves out its block."""

    def nextn(self, g: Graph, config: GlmConfig, weights: Weights) -> Value:
        block = weights.nextn[0]
        return nextn_logits(g, config, weights, block, nextn_input(g, config, weights, block))


def test_a_head_that_leaves_out_its_block_is_found() -> None:
    variants = {name: VARIANTS[name] for name in ("glm4", "glm4_nextn")}
    for architecture, right in ((Glm4(), True), (WithoutBlock(), False)):
        (tables,) = (check for check in checks_of(architecture, variants) if check.name == "tables")
        if right:
            tables()
            continue
        with pytest.raises(
            ConformanceError, match=r"head leaves out blk\.2\.attn_k\.weight, blk\.2\.attn_norm\.weight"
        ):
            tables()


def test_some_tensors_of_multi_token_prediction_may_be_missing(load: Any) -> None:
    assert load("glm4moe", n_nextn=1, without=["blk.2.ffn_up_exps.weight", "blk.2.nextn.enorm.weight"])


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        *((name, "attention.layer_norm_rms_epsilon", None, "'{key}' is missing") for name in NAMES),
        *(
            (name, "attention.head_count_kv", 1, "blk.0.attn_k.weight has shape (32, 64), expected (16,")
            for name in NAMES
        ),
        *((name, "rope.dimension_count", 18, "'{key}' is 18; at most 16 is supported") for name in NAMES),
        ("glm4", "nextn_predict_layers", 2, "'{key}' is 2; at most 1 is supported"),
        ("glm4", "nextn_predict_layers", "x", "'{key}'"),
        ("glm4", "rope.dimension_sections", [2, 1, 1], "'{key}'"),
        ("glm4moe", "rope.dimension_sections", [2, 1, 1, 99], "'{key}'"),
        ("glm4moe", "expert_count", None, "'{key}' is missing"),
        ("glm4moe", "expert_count", 0, "'{key}' is 0; at least 1 is needed"),
        ("glm4moe", "expert_used_count", None, "'{key}' is missing"),
        ("glm4moe", "expert_used_count", 9, "{key} = 9 does not fit glm4moe.expert_count = 8"),
        ("glm4moe", "expert_feed_forward_length", None, "'{key}' is missing"),
        ("glm4moe", "expert_shared_count", None, "'{key}' is missing"),
        ("glm4moe", "expert_shared_count", 0, "'{key}' is 0; at least 1 is needed"),
        ("glm4moe", "expert_group_count", 2, "'{key}' is 2; at most 1 is supported"),
        ("glm4moe", "expert_gating_func", 5, "'{key}' is 5; at most 4 is supported"),
        ("glm4moe", "expert_weights_norm", 1, "'{key}'"),
        ("glm4moe", "expert_weights_scale", "x", "'{key}'"),
        ("glm4moe", "leading_dense_block_count", "x", "'{key}'"),
    ],
)
def test_invalid_keys_are_named(name: str, key: str, value: Any, problem: str, load: Any) -> None:
    key = f"{name}.{key}"
    with pytest.raises(ModelFormatError, match=re.escape(problem.format(key=key))):
        load(name, metadata={key: value})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("chatglm", "blk.0.post_ffw_norm.weight"),
        ("glm4", "blk.0.attn_q_norm.weight"),
        ("glm4moe", "blk.0.exp_probs_b.bias"),
        ("glm4", "blk.2.nextn.enorm.weight"),
    ],
)
def test_unknown_tensors_are_named(name: str, tensor: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor {re.escape(tensor)} \(64,\) is not one"):
        load(name, tensors={tensor: np.zeros(64)})
