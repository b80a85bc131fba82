"""Keys, tensors and invalid files of the Granite family.

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
from llamacli_granite import Granite, GraniteMoe
from tiny_granite import MOE, VARIANTS, write_granite

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
    with model.create_session(n_ctx=256) as session:
        return session.eval(TOKENS, all_logits=True)


@parametrize_with_checks([Granite(), GraniteMoe()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


def test_scales_of_zero_are_not_set(load: Any) -> None:
    keys = {f"granite.{key}": 0.0 for key in ("embedding_scale", "residual_scale", "attention.scale")}
    config = load(metadata=keys).config
    assert (config.embedding_scale, config.residual_scale, config.attention_scale) == (1.0, 1.0, 0.25)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", None),
        ("logit_scale", 0.0),
        ("attention.layer_norm_rms_epsilon", None),
        ("rope.scaling.type", 3),
        ("expert_shared_feed_forward_length", -1.0),
        ("expert_used_count", 9),
    ],
)
def test_invalid_keys_are_named(key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"granitemoe.{key}"):
        load(**SHARED, metadata={f"granitemoe.{key}": value})


def test_only_granitemoe_ignores_the_key_of_its_rotation(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"granite\.rope\.scaling\.finetuned"):
        load(metadata={"granite.rope.scaling.finetuned": 1})
    assert load(metadata={"granite.rope.scaling.finetuned": False}).config.rope is None
    assert load(**SHARED, metadata={"granitemoe.rope.scaling.finetuned": False}).config.rope is not None
