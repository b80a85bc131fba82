"""Keys, tensors and invalid files of Llama's kin.

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
from llamacli_llama.arcee import Arcee
from llamacli_llama.internlm2 import InternLM2
from llamacli_llama.minicpm import MiniCPM
from llamacli_llama.seed_oss import SeedOss
from llamacli_llama.smollm3 import SmolLM3
from tiny_kin import INERT, KIN, SCALES, VARIANTS, write_kin

NAMES = tuple(KIN)
TOKENS = list(range(3, 43))
SKIPPED = {"attn_output": 64, "ffn_down": 96}
"""Matrices whose zeros make a layer the identity, and their columns."""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model of an architecture and load it."""

    def write_and_load(architecture: str, **options: Any) -> Model:
        path = write_kin(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, f"llamacli_llama.{name}", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


def logits(model: Model, n_ctx: int = 256) -> np.ndarray:
    with model.create_session(n_ctx=n_ctx) as session:
        return session.eval(TOKENS[:30], all_logits=True)


@parametrize_with_checks(
    [Arcee(), InternLM2(), MiniCPM(), SeedOss(), SmolLM3()],
    VARIANTS,
    inert=INERT,
    slow=pytest.mark.slow,
)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", "x"),
        ("block_count", None),
        ("attention.head_count_kv", 3),
        ("rope.dimension_count", 15),
        ("rope.scaling.type", "other"),
    ],
)
def test_invalid_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"{name}.{key}"):
        load(name, metadata={f"{name}.{key}": value})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("internlm2", {"tied": True}, r"tensor output\.weight is missing"),
        ("smollm3", {"rope_freqs": True}, r"tensor rope_freqs\.weight \(8,\) is not one that"),
        ("smollm3", {"biases": ("attn_output",)}, r"tensor blk\.0\.attn_output\.bias \(64,\) is not one that"),
        ("arcee", {"tensors": {"blk.0.ffn_gate.weight": np.ones((96, 64))}}, r"ffn_gate\.weight .* is not one that"),
        ("arcee", {"biases": ("ffn_up",)}, r"tensor blk\.0\.ffn_up\.bias \(96,\) is not one that"),
        ("seed_oss", {"without": ["blk.1.post_attention_norm.weight"]}, r"post_attention_norm\.weight is missing"),
        ("seed_oss", {"tensors": {"blk.0.ffn_norm.weight": np.ones(64)}}, r"ffn_norm\.weight \(64,\) is not one that"),
        ("minicpm", {"longrope": True, "without": ["rope_factors_short.weight"]}, r"rope_factors_short\.weight is mis"),
    ],
)
def test_tensors_of_one_architecture(name: str, options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(name, **options)


@pytest.mark.parametrize("key", SCALES)
@pytest.mark.parametrize("value", ["x", -1.0])
def test_invalid_scales_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=key):
        load("minicpm", metadata={key: value})


def test_default_scales_of_minicpm(load: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = load("minicpm", n_layer=4).config
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12.0, 0.7, 4.0)
    assert "minicpm.logit_scale is missing" in caplog.text


def test_every_fourth_layer_of_smollm3_has_no_rope(load: Any) -> None:
    """Fourth layer alone: logits are independent of RoPE's base."""
    slow = {"smollm3.rope.freq_base": 1e6}
    fourth = {f"blk.{i}.{name}.weight": np.zeros((64, n)) for i in range(3) for name, n in SKIPPED.items()}
    for tensors, same in (({}, False), (fourth, True)):
        first, second = (logits(load("smollm3", n_layer=4, tensors=tensors, metadata=m)) for m in ({}, slow))
        assert np.array_equal(first, second) == same


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.temperature_scale", "x"),
        ("attention.temperature_scale", float("nan")),
        ("rope.scaling.yarn_log_multiplier", "x"),
        ("rope.scaling.yarn_log_multiplier", -1.0),
    ],
)
def test_invalid_keys_of_long_contexts_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"mistral3.{key}"):
        load("mistral3", metadata={f"mistral3.{key}": value})


def test_temperature_begins_behind_the_original_context(load: Any) -> None:
    def results(scale: float) -> np.ndarray:
        keys = {"attention.temperature_scale": scale, "rope.scaling.original_context_length": 16}
        return logits(load("mistral3", metadata={f"mistral3.{key}": value for key, value in keys.items()}))

    plain, warm = results(0.0), results(0.5)
    np.testing.assert_array_equal(plain[:16], warm[:16])
    assert (np.abs(plain - warm)[16:].max(1) > 1e-5).all()


def test_the_multiplier_divides_the_magnitude_of_yarn(load: Any) -> None:
    yarn = {"mistral3.rope.scaling.type": "yarn", "mistral3.rope.scaling.factor": 4.0}
    multiplier = {"mistral3.rope.scaling.yarn_log_multiplier": 1.0}
    cos = [load("mistral3", metadata=keys).config.rope.table([0])[0][0, 0] for keys in (yarn, yarn | multiplier)]
    np.testing.assert_allclose(cos, [1 + 0.1 * np.log(4), 1], rtol=1e-6)
    assert load("mistral3", metadata=multiplier).config.rope.attn_factor == 1
