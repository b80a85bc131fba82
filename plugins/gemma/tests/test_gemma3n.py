"""Keys, tensors, own verbs and invalid files of Gemma 3n.

`tests/test_goldens.py` of the core compares results with llama.cpp's.
"""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacli import Graph, Model, ModelFormatError, PluginError, load_model
from llamacli.engine import ReferenceEngine
from llamacli.ops.base import Op
from llamacli.ops.lanewise import ARRAYS
from llamacli.plugins import ARCHITECTURES, Plugins
from llamacli.testing import parametrize_with_checks
from llamacli.testing.conformance import check_op
from llamacli.testing.parametrize import Check
from llamacli_gemma.altup import CorrectStream, MatchMagnitude, PredictStream, correct, match_magnitude, predict
from llamacli_gemma.gaussian_topk import GaussianTopK, gaussian_topk
from llamacli_gemma.gemma3n import Gemma3n
from tiny_gemma3n import SHARED, VARIANTS, write_gemma3n


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model and load it."""

    def write_and_load(**options: Any) -> Model:
        path = write_gemma3n(tmp_path / "model.gguf", **options)
        plugins = Plugins([EntryPoint("gemma3n", "llamacli_gemma", ARCHITECTURES)])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@pytest.mark.slow
@parametrize_with_checks([Gemma3n()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("op", [PredictStream, CorrectStream, MatchMagnitude, GaussianTopK], ids=lambda op: op.__name__)
def test_kernels_agree_with_the_reference(op: type[Op]) -> None:
    check_op(op)


def test_correction_follows_the_paper() -> None:
    predicted, coef, computed, active = np.random.default_rng(3).normal(size=(4, 5, 8))
    formula = CorrectStream.formula
    expected = predicted + (1 + coef) * (computed - active)
    np.testing.assert_allclose(formula(None, ARRAYS, predicted, coef, computed, active), expected)


def test_misfits_are_refused() -> None:
    g = Graph()
    x, narrow = g.value(64), g.value(16)
    with pytest.raises(PluginError, match="predict: streams of different widths"):
        predict(g, (x, narrow), g.value(4))
    with pytest.raises(PluginError, match="predict: coefficients of width 16 and 2 streams"):
        predict(g, (x, x), narrow)
    with pytest.raises(PluginError, match="correct: width 16 and 2 streams"):
        correct(g, (x, x), narrow, x)
    with pytest.raises(PluginError, match="match_magnitude: widths 64 and 16"):
        match_magnitude(g, x, narrow)
    with pytest.raises(PluginError, match="gaussian_topk: a row of 1 number"):
        gaussian_topk(g, g.value(1), 1.0)


def test_layers(load: Any) -> None:
    layers = load(**SHARED).config.layers
    assert [layer.window is None for layer in layers] == [i % 5 == 4 for i in range(25)]
    assert [layer.kv_layer for layer in layers] == [*range(20), 18, 18, 18, 18, 19]
    assert [layer.sparsity is None for layer in layers] == [i >= 10 for i in range(25)]
    assert {layer.rope.base for layer in layers if layer.window} == {10000.0}
    scales = [float("-inf")] * 11 + [0.5]
    layers = load(metadata={"gemma3n.activation_sparsity_scale": scales}).config.layers
    assert [layer.sparsity for layer in layers] == [None] * 11 + [0.5]


def test_layers_of_different_widths(load: Any) -> None:
    """As models cut out of E4B have (MatFormer)."""
    model = load(n_ff=[96, 32] * 6)
    assert [layer.n_ff for layer in model.config.layers] == [96, 32] * 6
    assert np.isfinite(model.create_session().eval([1, 2], all_logits=True)).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("feed_forward_length", [96] * 11),
        ("feed_forward_length", 0),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.sliding_window", None),
        ("attention.sliding_window", 0),
        ("attention.sliding_window_pattern", [True, False]),
        ("attention.shared_kv_layers", 12),
        ("attention.shared_kv_layers", 11),
        ("altup.num_inputs", 3),
        ("altup.active_idx", 1),
        ("activation_sparsity_scale", 1.5),
        ("activation_sparsity_scale", [1.5] * 11),
        ("activation_sparsity_scale", [float("nan")] * 12),
        ("activation_sparsity_scale", [float("inf")] * 12),
        ("embedding_length_per_layer_input", 0),
        ("final_logit_softcapping", -1.0),
        ("rope.freq_base_swa", 0.0),
    ],
)
def test_invalid_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=rf"gemma3n\.{key}\b"):
        load(metadata={f"gemma3n.{key}": value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"without": ["blk.0.altup_predict_coef.weight"]},
            r"altup_predict_coef\.weight is missing, expected \(16, 4\)",
        ),
        ({"tensors": {"blk.0.layer_output_scale.weight": np.ones(1)}}, r"layer_output_scale\.weight \(1,\) is not one"),
    ],
)
def test_invalid_tensors_are_named(options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(**options)
