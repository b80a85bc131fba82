"""Hyperparameters and invalid files of Cohere.

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
from llamacli_cohere import Cohere2, CommandR
from tiny_cohere import INERT, VARIANTS, write_cohere

NAMES = ("command-r", "cohere2")
PLUS = {"n_layer": 64, "n_embd": 32, "n_head": 2, "n_head_kv": 1, "n_ff": 32}
TOKENS = list(range(3, 43))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def write_and_load(architecture: str, **options: Any) -> Model:
        path = write_cohere(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_cohere", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


def logits(model: Model) -> np.ndarray:
    return model.create_session().eval(TOKENS, all_logits=True)


@parametrize_with_checks([Cohere2(), CommandR()], VARIANTS, inert=INERT, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
def test_logit_scale_multiplies_the_logits(name: str, load: Any) -> None:
    unscaled = logits(load(name, logit_scale=1.0))
    np.testing.assert_allclose(logits(load(name, logit_scale=0.25)), 0.25 * unscaled, rtol=1e-5)
    np.testing.assert_array_equal(logits(load(name, logit_scale=0.0)), unscaled)
    np.testing.assert_allclose(logits(load(name, logit_scale=-2.0)), -2 * unscaled, rtol=1e-5)


def test_logit_scale_is_required_of_cohere2_only(load: Any) -> None:
    assert load("command-r", logit_scale=None).config.logit_scale == 1
    with pytest.raises(ModelFormatError, match=r"'cohere2\.logit_scale' is missing"):
        load("cohere2", logit_scale=None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_epsilon", None),
        ("attention.layer_norm_epsilon", -1.0),
        ("attention.layer_norm_epsilon", "x"),
        ("logit_scale", "x"),
        ("rope.scaling.type", "unknown"),
        ("rope.dimension_count", 18),
    ],
)
def test_wrong_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"{name}.{key}"):
        load(name, metadata={f"{name}.{key}": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", None),
        ("sliding_window", 0),
        ("sliding_window", "x"),
        ("sliding_window_pattern", [True]),
        ("sliding_window_pattern", "x"),
    ],
)
def test_wrong_windows_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"cohere2.attention.{key}"):
        load("cohere2", metadata={f"cohere2.attention.{key}": value})


@pytest.mark.parametrize(
    ("pattern", "sliding"),
    [(None, "1110"), (2, "1010"), (0, "1111"), (1, "0000"), ([False, True, False, True], "0101")],
)
def test_sliding_layers(pattern: Any, sliding: str, load: Any) -> None:
    model = load("cohere2", n_layer=4, metadata={"cohere2.attention.sliding_window_pattern": pattern})
    assert model.config.sliding == tuple(layer == "1" for layer in sliding)


@pytest.mark.parametrize(("norm", "shape"), [("attn_q_norm", r"\(2, 16\)"), ("attn_k_norm", r"\(1, 16\)")])
def test_models_of_64_layers_need_norms_of_queries_and_keys(norm: str, shape: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"tensor blk\.63\.{norm}\.weight is missing, expected {shape}"):
        load("command-r", without=[f"blk.63.{norm}.weight"], **PLUS)


@pytest.mark.parametrize("name", NAMES)
def test_keys_can_be_moved(name: str, load: Any) -> None:
    model = load(name, n_layer=1)
    with model.create_session() as session, model.create_session() as other:
        session.eval(TOKENS[:20])
        session.remove_range(0, 5)
        session.eval([7])
        other.eval([*TOKENS[5:20], 7])
        np.testing.assert_allclose(session.logits, other.logits, rtol=1e-3, atol=1e-3)
