"""Keys, tensors and invalid files of the Granite family.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

import logging
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Model, ModelFormatError, load_model
from llamacli.engine import ReferenceEngine
from llamacli.plugins import ARCHITECTURES, Plugins
from tiny_granite import MOE, write_granite

NAMES = ("granite", "granitemoe")
SHARED = MOE | {"n_ff_shared": 96}
TOKENS = list(range(3, 43))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(**options: Any) -> Model:
        path = write_granite(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint(name, "llamacli_granite", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


def logits(model: Model) -> np.ndarray:
    with model.create_session(seq_len=256) as session:
        return session.eval(TOKENS, all_logits=True)


@pytest.mark.parametrize("options", [{}, {"longrope": True}, {"architecture": "granitemoe"}, MOE, SHARED])
def test_every_key_is_read(options: dict[str, Any], load: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(**options).arch == options.get("architecture", "granite")
    assert caplog.messages == []


def test_scales_of_zero_are_not_set(load: Any) -> None:
    keys = {f"granite.{key}": 0.0 for key in ("embedding_scale", "residual_scale", "attention.scale")}
    config = load(metadata=keys).config
    assert (config.embedding_scale, config.residual_scale, config.attention_scale) == (1.0, 1.0, 0.25)


@pytest.mark.parametrize("key", ["embedding_scale", "residual_scale", "attention.scale", "logit_scale"])
@pytest.mark.parametrize("value", ["x", -1.0])
def test_invalid_scales_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"granite.{key}"):
        load(metadata={f"granite.{key}": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", None),
        ("logit_scale", 0.0),
        ("attention.layer_norm_rms_epsilon", None),
        ("rope.scaling.finetuned", 1),
        ("rope.scaling.type", 3),
        ("expert_shared_feed_forward_length", -1.0),
        ("expert_used_count", 9),
    ],
)
def test_invalid_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"granitemoe.{key}"):
        load(**SHARED, metadata={f"granitemoe.{key}": value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"without": ["blk.1.attn_q.weight"]}, r"tensor blk\.1\.attn_q\.weight is missing, expected \(64, 64\)"),
        ({"without": ["blk.0.ffn_norm.weight"]}, r"tensor blk\.0\.ffn_norm\.weight is missing"),
        ({"tensors": {"output_norm.weight": np.zeros(63)}}, r"tensor output_norm\.weight has shape \(63,\), expected"),
        ({"tensors": {"blk.0.attn_output.bias": np.zeros(3)}}, r"attn_output\.bias has shape \(3,\), expected \(64,\)"),
        ({"tensors": {"blk.0.attn_q_norm.weight": np.zeros(16)}}, r"attn_q_norm\.weight \(16,\) is not one that"),
        ({"longrope": True, "without": ["rope_factors_long.weight"]}, r"rope_factors_long\.weight is missing"),
        ({"tensors": {"rope_factors_long.weight": np.ones(8)}}, r"rope_factors_long\.weight \(8,\) is not one that"),
        (SHARED | {"without": ["blk.1.ffn_up_shexp.weight"]}, r"ffn_up_shexp\.weight is missing, expected \(96, 64\)"),
        (MOE | {"without": ["blk.1.ffn_gate_inp.weight"]}, r"ffn_gate_inp\.weight is missing, expected \(8, 64\)"),
        (MOE | {"tensors": {"blk.0.ffn_up_shexp.weight": np.ones((96, 64))}}, r"ffn_up_shexp\.weight .* is not one"),
    ],
)
def test_invalid_tensors_are_named(options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(**options)


def test_context_length_selects_the_rope_factors(load: Any) -> None:
    model = load(longrope=True)
    with model.create_session(seq_len=32) as session:
        short = session.eval(TOKENS[:30], all_logits=True)
    assert not np.allclose(short, logits(model)[:30], atol=1e-3)


def test_tokens_can_be_removed_from_the_middle_without_rope(load: Any) -> None:
    with load(metadata={"granite.rope.scaling.finetuned": False}).create_session() as session:
        session.eval(TOKENS)
        session.remove_range(5, 10)
        assert session.tokens == tuple(TOKENS[:5] + TOKENS[10:])
