"""Keys, tensors and invalid files of MiniCPM3 and PLM.

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
from llamacli_llama.latent import PLM, MiniCPM3
from tiny_latent import LATENT, VARIANTS, write_latent

NAMES = tuple(LATENT)
TOKENS = list(range(3, 33))


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a model of an architecture and load it."""

    def write_and_load(architecture: str, **options: Any) -> Model:
        path = write_latent(tmp_path / "model.gguf", architecture=architecture, **options)
        plugins = Plugins([EntryPoint(name, "llamacli_llama.latent", ARCHITECTURES) for name in NAMES])
        return load_model(path, "fp32", plugins=plugins, engine=ReferenceEngine())

    return write_and_load


@parametrize_with_checks([PLM(), MiniCPM3()], VARIANTS, slow=pytest.mark.slow)
def test_architecture(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_can_be_removed_from_the_middle(name: str, load: Any) -> None:
    """Shared keys are rotated back; those without positions stay."""
    model = load(name, n_layer=1)
    with model.create_session(n_ctx=64) as session, model.create_session(n_ctx=64) as other:
        session.eval(TOKENS)
        session.remove_range(5, 11)
        other.eval(TOKENS[:5] + TOKENS[11:])
        assert session.n_past == other.n_past
        rows = [one.eval([40], all_logits=True) for one in (session, other)]
    np.testing.assert_allclose(*rows, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.key_length", None),
        ("attention.value_length", 0),
        ("attention.kv_lora_rank", None),
        ("attention.kv_lora_rank", 0),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", 24),
        ("rope.dimension_count", 7),
        ("rope.scaling.type", "other"),
    ],
)
def test_invalid_keys_are_named(name: str, key: str, value: object, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"{name}.{key}"):
        load(name, metadata={f"{name}.{key}": value})


def test_the_rank_of_queries_is_needed(load: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"minicpm3\.attention\.q_lora_rank"):
        load("minicpm3", metadata={"minicpm3.attention.q_lora_rank": None})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensors": {"blk.0.attn_output.weight": np.ones((64, 96))}},
            r"attn_output\.weight has shape \(64, 96\), exp",
        ),
        ({"tensors": {"blk.0.attn_k.weight": np.ones((64, 64))}}, r"attn_k\.weight \(64, 64\) is not one that"),
    ],
)
def test_invalid_tensors_are_named(name: str, options: dict[str, Any], message: str, load: Any) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(name, **options)
